"""Augmentation of whole batches on their device, each sample with its own draw.

Every function takes images [B, C, H, W] in [0, 1], returns the same, and draws from the `Random` it is
given. The order of operations never depends on values, so that a CUDA graph can hold it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.core.rng import Random


def crop(x: Tensor, padding: int, random: Random) -> Tensor:
    """A window of the image's size at a random place of the image padded with zeros."""
    batch, channels, height, width = x.shape
    padded = F.pad(x, (padding,) * 4)
    down, right = random.integers(2 * padding + 1, (2, batch, 1))
    rows = down + torch.arange(height, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    sample = torch.arange(batch, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def flip(x: Tensor, p: float, random: Random) -> Tensor:
    """Left and right exchanged with probability p."""
    return torch.where(_chosen(x, p, random), x.flip(-1), x)


def jitter(
    x: Tensor, brightness: float, contrast: float, saturation: float, hue: float, p: float, random: Random
) -> Tensor:
    """Colours changed with probability p, in the order of the arguments.

    The first three mix the image with black, with its mean grey and with its own grey version, by a factor
    uniform in [1 − s, 1 + s]; the hue turns by a share of the circle uniform in [−hue, hue]. Where colour
    means nothing (saturation of one channel, hue of anything but three), it is left alone.
    """
    changed = x
    if brightness:
        changed = _mixed(changed, torch.zeros_like(changed), _factor(x, brightness, random))
    if contrast:
        changed = _mixed(changed, _grey(changed).mean((2, 3), keepdim=True), _factor(x, contrast, random))
    if saturation and x.shape[1] > 1:
        changed = _mixed(changed, _grey(changed), _factor(x, saturation, random))
    if hue and x.shape[1] == 3:
        changed = _turned(changed, _uniform(x, -hue, hue, random))
    return torch.where(_chosen(x, p, random), changed, x)


def grayscale(x: Tensor, p: float, random: Random) -> Tensor:
    """The image's grey version in every channel, with probability p."""
    return torch.where(_chosen(x, p, random), _grey(x), x)


def resized_crop(x: Tensor, scale: tuple[float, float], ratio: tuple[float, float], random: Random) -> Tensor:
    """A random part of the image, brought to its size bilinearly.

    The part's share of the area is uniform in `scale`, its aspect (width over height, in pixels) log-uniform
    in `ratio`; a side that would stick out is cut to the image (torchvision draws again instead).
    """
    height, width = x.shape[2:]
    area = _uniform(x, *scale, random)
    aspect = _uniform(x, math.log(ratio[0]), math.log(ratio[1]), random).exp()
    across = (area * aspect * (height / width)).sqrt().clamp_max(1)
    along = (area / aspect * (width / height)).sqrt().clamp_max(1)
    columns = _centres(x, width) * across + _uniform(x, -1, 1, random) * (1 - across)
    rows = _centres(x, height) * along + _uniform(x, -1, 1, random) * (1 - along)
    shape = (len(x), height, width)
    # By hand and not affine_grid: that one multiplies matrices, in TF32 where a user has allowed it.
    grid = torch.stack([columns[:, 0].expand(shape), rows[:, 0].transpose(1, 2).expand(shape)], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def noise(x: Tensor, std: float, random: Random) -> Tensor:
    """Gaussian noise of this standard deviation on every value, kept within [0, 1]."""
    return (x + std * random.normal(x.shape).to(x.dtype)).clamp(0, 1)


def sobel(x: Tensor) -> Tensor:
    """FedStyle's Sobel-filtered copy (Kanopoulos et al., 1988): edges of the grey version, in every channel.

    The gradient's magnitude, each image divided by its own maximum, so that the style is the same for pale
    and for strong images: values fill [0, 1]. That maximum is at least an edge of one grey level in 255, so a
    flat image stays black. The border is repeated, lest it be an edge itself. The paper leaves all this open.
    """
    grey = F.pad(_grey(x), (1, 1, 1, 1), mode="replicate")
    down = grey[:, :, :-2] + 2 * grey[:, :, 1:-1] + grey[:, :, 2:]
    across = grey[..., :-2] + 2 * grey[..., 1:-1] + grey[..., 2:]
    magnitude = torch.hypot(down[..., 2:] - down[..., :-2], across[:, :, 2:] - across[:, :, :-2])
    strongest = magnitude.amax((1, 2, 3), keepdim=True).clamp_min(4 / 255)
    return (magnitude / strongest).repeat(1, x.shape[1], 1, 1)


@dataclass(frozen=True)
class Augment:
    """Augmentations with their values, applied in order: `augment(x, random)`."""

    steps: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, x: Tensor, random: Random) -> Tensor:
        """Augmented images [B, C, H, W] of images in [0, 1]."""
        for name, value in self.steps:
            x = _STEPS[name].apply(x, value, random)
        return x

    def __str__(self) -> str:
        return ", ".join(f"{name}:{value:g}" for name, value in self.steps)


def parse_augment(specs: Iterable[str]) -> Augment:
    """An augmentation out of specs, `name` or `name:value`.

    | spec | does | value |
    |---|---|---|
    | `crop:4` | `crop` | padding |
    | `flip:0.5` | `flip` | probability |
    | `jitter:0.4` | `jitter` of strengths (s, s, s, s/4) with probability 0.8 (0.4: MoCo v2's) | s |
    | `grayscale:0.2` | `grayscale` | probability |
    | `resized-crop:0.2` | `resized_crop` of scale (s, 1) and ratio (3/4, 4/3) | s |
    | `noise:0.05` | `noise` | standard deviation |

    The values shown are the ones that a bare name gets.
    """
    return Augment(tuple(_parsed(spec) for spec in specs))


@dataclass(frozen=True)
class _Step:
    """How a spec is applied, what its value may be and what it is if none is given."""

    apply: Callable[[Tensor, float, Random], Tensor]
    default: float
    least: float
    most: float
    whole: bool = False

    def takes(self, value: float) -> bool:
        return self.least <= value <= self.most and (not self.whole or value == int(value))


_SMALLEST_CROP = 0.01

_STEPS = {
    "crop": _Step(lambda x, v, r: crop(x, int(v), r), default=4, least=0, most=64, whole=True),
    "flip": _Step(flip, default=0.5, least=0, most=1),
    "jitter": _Step(lambda x, v, r: jitter(x, v, v, v, v / 4, 0.8, r), default=0.4, least=0, most=2),
    "grayscale": _Step(grayscale, default=0.2, least=0, most=1),
    "resized-crop": _Step(
        lambda x, v, r: resized_crop(x, (v, 1), (3 / 4, 4 / 3), r), default=0.2, least=_SMALLEST_CROP, most=1
    ),
    "noise": _Step(noise, default=0.05, least=0, most=1),
}


def _parsed(spec: str) -> tuple[str, float]:
    name, colon, text = spec.partition(":")
    if name not in _STEPS:
        raise UserError(f"augmentation '{spec}' is unknown: {nearest(name, _STEPS)}")
    step = _STEPS[name]
    if not colon:
        return name, step.default
    kind = "a whole number" if step.whole else "a number"
    remedy = f"{kind} from {step.least:g} to {step.most:g}, such as {name}:{step.default:g}"
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"augmentation '{spec}' has no number after the colon: it takes {remedy}") from None
    if not step.takes(value):
        raise UserError(f"augmentation '{spec}' has a value out of range: it takes {remedy}")
    return name, value


def _uniform(x: Tensor, low: float, high: float, random: Random) -> Tensor:
    """A number in [low, high) for each sample [B, 1, 1, 1]."""
    return random.uniform((len(x), 1, 1, 1), low, high).to(x.dtype)


def _chosen(x: Tensor, p: float, random: Random) -> Tensor:
    """True with probability p for each sample [B, 1, 1, 1]."""
    return random.chosen((len(x), 1, 1, 1), p)


def _factor(x: Tensor, strength: float, random: Random) -> Tensor:
    return _uniform(x, max(0.0, 1 - strength), 1 + strength, random)


def _mixed(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """The image moved away from (factor > 1) or towards (factor < 1) the other one."""
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    """Luma of RGB by ITU-R BT.601, the channels' mean of anything else [B, 1, H, W]."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """The hue of HSV moved on by a share of the circle."""
    red, green, blue = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    safe = torch.where(chroma > 0, chroma, 1)
    # The hue in sixths of the circle, by which channel is strongest.
    sixths = torch.where(value == red, (green - blue) / safe, (blue - red) / safe + 2)
    sixths = torch.where((value == blue) & (value != red) & (value != green), (red - green) / safe + 4, sixths)
    sixths = sixths + 6 * turn
    channels = []
    for offset in (5, 3, 1):
        k = (sixths + offset) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.cat(channels, dim=1)


def _centres(x: Tensor, side: int) -> Tensor:
    """Pixel centres along a side, the image spanning [−1, 1] [side]."""
    return (2 * torch.arange(side, device=x.device, dtype=x.dtype) + 1) / side - 1
