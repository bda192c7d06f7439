import colorsys
import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedloom.core.errors import UserError
from fedloom.core.rng import Random
from fedloom.data.augment import Augment, parse_augment
from fedloom.data.augment.images import crop, flip, grayscale, jitter, noise, resized_crop, sobel

torch.set_num_threads(1)

ALL = ("crop:2", "flip", "jitter:0.4", "grayscale:0.2", "resized-crop:0.2", "noise:0.05")


def seeded(seed=0, device="cpu"):
    return Random.seeded(seed, device=device)


def images(*shape, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(99), dtype=dtype)


def uniform(random, size, low, high):
    """What one number per sample, drawn from here, will be: the draws of the code under test, replayed."""
    return random.uniform((size, 1, 1, 1), low, high).flatten().tolist()


def test_parameters_that_ask_for_nothing_give_the_image_back():
    x = images(5, 3, 9, 7)
    assert crop(x, 0, seeded()).equal(x)
    assert flip(x, 0.0, seeded()).equal(x)
    assert jitter(x, 0.0, 0.0, 0.0, 0.0, 1.0, seeded()).equal(x)
    assert jitter(x, 0.8, 0.8, 0.8, 0.2, 0.0, seeded()).equal(x)
    assert grayscale(x, 0.0, seeded()).equal(x)
    assert noise(x, 0.0, seeded()).equal(x)
    assert parse_augment([])(x, seeded()).equal(x)
    torch.testing.assert_close(resized_crop(x, (1.0, 1.0), (7 / 9, 7 / 9), seeded()), x, rtol=0, atol=2e-6)


def test_every_crop_is_a_window_of_the_padded_image_and_every_window_comes_up():
    padding, size = 2, 1000
    x = images(1, 2, 5, 6).repeat(size, 1, 1, 1) + 0.01
    cropped = crop(x, padding, seeded()).numpy()
    padded = np.pad(x[0].numpy(), ((0, 0), (padding, padding), (padding, padding)))
    windows = {
        padded[:, i : i + 5, j : j + 6].tobytes(): (i, j)
        for i in range(2 * padding + 1)
        for j in range(2 * padding + 1)
    }
    places = [windows[sample.tobytes()] for sample in cropped]
    counts = np.unique(places, axis=0, return_counts=True)[1]
    assert len(counts) == 25
    assert counts.min() > 15  # 40 expected, standard deviation 6.2


def test_flips_mirror_whole_samples_with_the_asked_frequency():
    x = images(1, 3, 4, 5).repeat(4000, 1, 1, 1)
    flipped = flip(x, 0.3, seeded())
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    kept = (flipped == x).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert mirrored.float().mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 4000))


def jittered_by_loops(x, strengths, p, random):
    """Brightness, contrast, saturation and hue of each pixel in turn, with colorsys."""
    size = len(x)
    *mixes, hue = strengths
    factors = [uniform(random, size, max(0, 1 - s), 1 + s) for s in mixes]
    turns = uniform(random, size, -hue, hue)
    chosen = random.chosen((size, 1, 1, 1), p).flatten().tolist()
    luma = np.array([0.299, 0.587, 0.114])
    out = x.copy()
    for i in range(size):
        if not chosen[i]:
            continue
        image = out[i].transpose(1, 2, 0)
        image = np.clip(factors[0][i] * image, 0, 1)
        image = np.clip(factors[1][i] * image + (1 - factors[1][i]) * (image @ luma).mean(), 0, 1)
        image = np.clip(factors[2][i] * image + (1 - factors[2][i]) * (image @ luma)[..., None], 0, 1)
        for row in image:
            for pixel in row:
                h, s, v = colorsys.rgb_to_hsv(*pixel)
                pixel[:] = colorsys.hsv_to_rgb((h + turns[i]) % 1, s, v)
        out[i] = image.transpose(2, 0, 1)
    return out


def test_jitter_equals_a_loop_over_pixels():
    x = images(12, 3, 4, 5, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(5).reshape(3, 5)
    x[:, :, 1, 0] = 0.25  # grey: a pixel without hue
    x[:, :2, 2, 0] = 0.75  # two channels share the maximum
    strengths = (0.4, 0.4, 0.4, 0.3)
    expected = jittered_by_loops(x.numpy(), strengths, 0.7, seeded(5))
    np.testing.assert_allclose(jitter(x, *strengths, 0.7, seeded(5)).numpy(), expected, rtol=0, atol=1e-12)


def test_jitter_of_grey_images_changes_brightness_and_contrast_alone():
    x = images(6, 1, 4, 5)
    assert jitter(x, 0.0, 0.0, 0.8, 0.3, 1.0, seeded()).equal(x)
    assert not jitter(x, 0.4, 0.0, 0.0, 0.0, 1.0, seeded()).equal(x)
    assert not jitter(x, 0.0, 0.4, 0.0, 0.0, 1.0, seeded()).equal(x)


def test_grayscale_puts_the_luma_into_every_channel_of_the_chosen():
    x = images(2000, 3, 2, 2, dtype=torch.float64)
    grey = grayscale(x, 0.2, seeded())
    luma = np.einsum("bchw,c->bhw", x.numpy(), [0.299, 0.587, 0.114])
    turned = (grey != x).flatten(1).any(1).numpy()
    for channel in range(3):
        np.testing.assert_allclose(grey[:, channel].numpy()[turned], luma[turned], rtol=1e-12)
    assert turned.mean() == pytest.approx(0.2, abs=4 * math.sqrt(0.2 * 0.8 / 2000))
    alone = images(4, 1, 3, 3)
    assert grayscale(alone, 1.0, seeded()).equal(alone)


def bilinear(image, row, column):
    """The value at these pixel coordinates, the border repeated."""
    height, width = image.shape
    row, column = min(max(row, 0), height - 1), min(max(column, 0), width - 1)
    top, left = math.floor(row), math.floor(column)
    below, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = image[top, left] * (left + 1 - column) + image[top, right] * (column - left)
    lower = image[below, left] * (left + 1 - column) + image[below, right] * (column - left)
    return upper * (top + 1 - row) + lower * (row - top)


def test_resized_crop_equals_a_loop_over_pixels():
    size, height, width = 6, 5, 8
    x = images(size, 2, height, width, dtype=torch.float64)
    scale, ratio = (0.2, 0.9), (3 / 4, 4 / 3)
    draws = seeded(7)
    areas = uniform(draws, size, *scale)
    aspects = [math.exp(u) for u in uniform(draws, size, math.log(ratio[0]), math.log(ratio[1]))]
    lefts, tops = ([(1 + u) / 2 for u in uniform(draws, size, -1, 1)] for _ in range(2))
    result = resized_crop(x, scale, ratio, seeded(7)).numpy()
    for i in range(size):
        across = min(width, math.sqrt(areas[i] * aspects[i] * height * width))
        along = min(height, math.sqrt(areas[i] / aspects[i] * height * width))
        left, top = lefts[i] * (width - across), tops[i] * (height - along)
        for channel in range(2):
            for r in range(height):
                for c in range(width):
                    row = top + (r + 0.5) * along / height - 0.5
                    column = left + (c + 0.5) * across / width - 0.5
                    expected = bilinear(x[i, channel].numpy(), row, column)
                    assert result[i, channel, r, c] == pytest.approx(expected, abs=1e-12)


def test_noise_has_the_asked_spread():
    x = torch.full((50, 1, 30, 30), 0.5, dtype=torch.float64)
    difference = noise(x, 0.05, seeded()) - x
    assert difference.mean().item() == pytest.approx(0, abs=4 * 0.05 / math.sqrt(45_000))
    assert difference.std().item() == pytest.approx(0.05, rel=0.02)


def test_sobel_equals_a_loop_over_pixels():
    x = images(3, 3, 5, 6, dtype=torch.float64)
    kernel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    filtered = sobel(x).numpy()
    for i in range(3):
        grey = np.pad(np.einsum("chw,c->hw", x[i].numpy(), [0.299, 0.587, 0.114]), 1, mode="edge")
        edges = np.zeros((5, 6))
        for r in range(5):
            for c in range(6):
                window = grey[r : r + 3, c : c + 3]
                edges[r, c] = math.hypot((window * kernel).sum(), (window * kernel.T).sum())
        for channel in range(3):
            np.testing.assert_allclose(filtered[i, channel], edges / edges.max(), rtol=1e-9, atol=1e-12)


def test_sobel_of_a_flat_image_is_black_and_of_a_pale_edge_as_strong_as_of_any():
    flat = torch.full((1, 1, 6, 6), 0.7)
    assert sobel(flat).max().item() < 1e-4
    edge = torch.zeros(1, 1, 6, 6)
    edge[..., 3:] = 0.1
    strong = torch.zeros(6)
    strong[2:4] = 1
    torch.testing.assert_close(sobel(edge)[0, 0], strong.expand(6, 6))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_dtype_and_range_are_kept(channels, dtype):
    x = images(40, channels, 8, 10, dtype=dtype)
    for augment in (*(parse_augment([spec]) for spec in ALL), parse_augment(ALL), lambda x, _: sobel(x)):
        y = augment(x, seeded())
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert y.min() >= 0
        assert y.max() <= 1 + 1e-6


def test_the_same_seed_gives_the_same_images_and_the_global_generator_is_left_alone():
    x, augment = images(8, 3, 8, 8), parse_augment(ALL)
    before = torch.get_rng_state()
    assert augment(x, seeded(1)).equal(augment(x, seeded(1)))
    assert not augment(x, seeded(1)).equal(augment(x, seeded(2)))
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("spec", ALL)
def test_each_sample_has_its_own_draw(spec):
    x = images(1, 3, 8, 8).repeat(400, 1, 1, 1)
    y = parse_augment([spec])(x, seeded())
    assert len({sample.numpy().tobytes() for sample in y}) > 1
    # What happened to a sample says nothing about its neighbour: no correlation beyond chance.
    change = (y - x).flatten(1).norm(dim=1).numpy()
    assert abs(np.corrcoef(change[:-1], change[1:])[0, 1]) < 4 / math.sqrt(399)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_shape_and_no_branch_depends_on_values(channels):
    # Fake tensors have no values: reading one, or a shape made of one, raises.
    assert len(seeded().counters)  # they are made once for all, and must be real
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(4, channels, 8, 8)
        random = Random(x.device)
        random.begin(torch.zeros(1, dtype=torch.int64))
        assert parse_augment(ALL)(x, random).shape == x.shape
        assert sobel(x).shape == x.shape


@pytest.mark.cuda
@pytest.mark.parametrize("spec", [*ALL, "all"])
def test_a_captured_augmentation_gives_what_an_eager_one_gives(spec):
    augment = parse_augment(ALL if spec == "all" else [spec])
    random, key = Random(torch.device("cuda")), torch.zeros(1, dtype=torch.int64, device="cuda")
    x = torch.rand(16, 3, 8, 8, device="cuda")

    def augmented():
        random.begin(key)
        return augment(x, random)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        augmented()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, edges = augmented(), sobel(x)
    x.uniform_()
    results = []
    for value in (1, 2, 1):
        key.fill_(value)
        graph.replay()
        results.append(captured.clone())
    assert results[0].equal(augmented())
    assert results[0].equal(results[2])
    assert not results[0].equal(results[1])
    assert edges.equal(sobel(x))


@pytest.mark.cuda
@pytest.mark.parametrize("spec", [*ALL, "all"])
def test_a_gpu_augments_as_a_cpu_does(spec):
    augment, x = parse_augment(ALL if spec == "all" else [spec]), images(16, 3, 8, 8)
    torch.testing.assert_close(augment(x.cuda(), seeded(3, "cuda")).cpu(), augment(x, seeded(3)), rtol=0, atol=1e-4)


def test_a_spec_is_a_name_with_or_without_a_value():
    augment = parse_augment(["crop", "flip", "jitter:1", "resized-crop:0.08", "noise:0.1"])
    assert augment.steps == (("crop", 4), ("flip", 0.5), ("jitter", 1.0), ("resized-crop", 0.08), ("noise", 0.1))
    assert str(augment) == "crop:4, flip:0.5, jitter:1, resized-crop:0.08, noise:0.1"
    assert parse_augment(str(augment).split(", ")) == augment
    assert pickle.loads(pickle.dumps(augment)) == augment
    assert Augment().steps == ()


def test_steps_come_in_the_order_given():
    x, first, second = images(6, 3, 8, 8), seeded(4), seeded(4)
    expected = noise(crop(x, 3, first), 0.1, first)
    assert parse_augment(["crop:3", "noise:0.1"])(x, second).equal(expected)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("flop", "augmentation 'flop' is unknown: did you mean 'flip'"),
        ("crop:2.5", "'crop:2.5': the value is out of range; it must be a whole number from 0 to 64"),
        ("crop:-1", "'crop:-1': the value is out of range"),
        ("flip:1.5", "'flip:1.5': the value is out of range; it must be a number from 0 to 1, such as flip:0.5"),
        ("jitter:nan", "'jitter:nan': the value is out of range"),
        ("noise:lots", "'noise:lots': the value must be a number"),
        ("noise:", "'noise:': the value must be a number"),
        ("resized-crop:0", "'resized-crop:0': the value is out of range"),
    ],
)
def test_a_bad_spec_is_refused_with_the_remedy(spec, says):
    with pytest.raises(UserError, match=says):
        parse_augment([spec])
