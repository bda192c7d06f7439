"""Augmentations of images [B, C, H, W] in [0, 1], with separate random numbers for each sample.

The operations never depend on values, so that they can be captured in a CUDA graph.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.rng import Random


def crop(x: Tensor, padding: int, random: Random) -> Tensor:
    """Pad images with zeros and crop them to their original size at a random position.

    Args:
        x: Images [B, C, H, W].
        padding: Pixels added on each side.
        random: Random numbers.

    Returns:
        Images [B, C, H, W].
    """
    batch, channels, height, width = x.shape
    padded = F.pad(x, (padding,) * 4)
    down, right = random.integers(2 * padding + 1, (2, batch, 1))
    rows = down + torch.arange(height, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    sample = torch.arange(batch, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def flip(x: Tensor, p: float, random: Random) -> Tensor:
    """Flip images horizontally with probability p.

    Args:
        x: Images [B, C, H, W].
        p: Probability for each image.
        random: Random numbers.

    Returns:
        Images [B, C, H, W].
    """
    return torch.where(_chosen(x, p, random), x.flip(-1), x)


def resized_crop(x: Tensor, scale: tuple[float, float], ratio: tuple[float, float], random: Random) -> Tensor:
    """Crop a random part of each image and resize it bilinearly to the original size.

    Args:
        x: Images [B, C, H, W].
        scale: Range of the part's share of the area, drawn uniformly.
        ratio: Range of its aspect ratio (width over height, in pixels), drawn log-uniformly. A side that exceeds the
            image is clipped, where torchvision draws again.
        random: Random numbers.

    Returns:
        Images [B, C, H, W].
    """
    height, width = x.shape[2:]
    area = _uniform(x, *scale, random)
    aspect = _uniform(x, math.log(ratio[0]), math.log(ratio[1]), random).exp()
    across = (area * aspect * (height / width)).sqrt().clamp_max(1)
    along = (area / aspect * (width / height)).sqrt().clamp_max(1)
    columns = _centres(x, width) * across + _uniform(x, -1, 1, random) * (1 - across)
    rows = _centres(x, height) * along + _uniform(x, -1, 1, random) * (1 - along)
    shape = (len(x), height, width)
    # Computed here because affine_grid multiplies matrices, in TF32 if the user has allowed it.
    grid = torch.stack([columns[:, 0].expand(shape), rows[:, 0].transpose(1, 2).expand(shape)], dim=-1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def jitter(
    x: Tensor, brightness: float, contrast: float, saturation: float, hue: float, p: float, random: Random
) -> Tensor:
    """Change brightness, contrast, saturation and hue with probability p, in this order.

    The first three mix the image with black, with its mean grey value and with its grey version, by a factor drawn
    uniformly from [1 − s, 1 + s] for strength s. Saturation needs more than one channel and hue three channels; for
    other images they have no effect.

    Args:
        x: Images [B, C, H, W] in [0, 1].
        brightness: Strength of the change of brightness; 0 for none, as for the others.
        contrast: Strength of the change of contrast.
        saturation: Strength of the change of saturation.
        hue: Maximum rotation of the hue, as a fraction of the colour circle.
        p: Probability for each image.
        random: Random numbers.

    Returns:
        Images [B, C, H, W] in [0, 1].
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
    """Replace every channel by the image's grey version with probability p.

    Args:
        x: Images [B, C, H, W].
        p: Probability for each image.
        random: Random numbers.

    Returns:
        Images [B, C, H, W].
    """
    return torch.where(_chosen(x, p, random), _grey(x), x)


def noise(x: Tensor, std: float, random: Random) -> Tensor:
    """Add Gaussian noise to every value and clamp to [0, 1].

    Args:
        x: Images [B, C, H, W] in [0, 1].
        std: Standard deviation of the noise.
        random: Random numbers.

    Returns:
        Images [B, C, H, W] in [0, 1].
    """
    return (x + std * random.normal(x.shape).to(x.dtype)).clamp(0, 1)


def sobel(x: Tensor) -> Tensor:
    """Apply the Sobel filter (Kanopoulos et al., 1988) to the grey version of images, as FedStyle does.

    The result is the magnitude of the gradient, divided by its maximum in each image, so that the style is the same for
    images of low and high contrast. The divisor is at least that of an edge of one grey level (1/255), so that a flat
    image stays black. The border is replicated, so that it is not an edge. The paper leaves these choices open.

    Args:
        x: Images [B, C, H, W] in [0, 1].

    Returns:
        Edges in [0, 1], repeated in every channel [B, C, H, W].
    """
    grey = F.pad(_grey(x), (1, 1, 1, 1), mode="replicate")
    down = grey[:, :, :-2] + 2 * grey[:, :, 1:-1] + grey[:, :, 2:]
    across = grey[..., :-2] + 2 * grey[..., 1:-1] + grey[..., 2:]
    magnitude = torch.hypot(down[..., 2:] - down[..., :-2], across[:, :, 2:] - across[:, :, :-2])
    strongest = magnitude.amax((1, 2, 3), keepdim=True).clamp_min(4 / 255)
    return (magnitude / strongest).repeat(1, x.shape[1], 1, 1)


def _uniform(x: Tensor, low: float, high: float, random: Random) -> Tensor:
    """Draw a number in [low, high) for each sample [B, 1, 1, 1]."""
    return random.uniform((len(x), 1, 1, 1), low, high).to(x.dtype)


def _chosen(x: Tensor, p: float, random: Random) -> Tensor:
    """Draw True with probability p for each sample [B, 1, 1, 1]."""
    return random.chosen((len(x), 1, 1, 1), p)


def _factor(x: Tensor, strength: float, random: Random) -> Tensor:
    return _uniform(x, max(0.0, 1 - strength), 1 + strength, random)


def _mixed(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Move images towards (factor < 1) or away from (factor > 1) other images."""
    return (factor * x + (1 - factor) * other).clamp(0, 1)


def _grey(x: Tensor) -> Tensor:
    """Return the luma of RGB images (ITU-R BT.601), or the mean over the channels of other images [B, 1, H, W]."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue (of HSV) by a fraction of the colour circle."""
    red, green, blue = x.split(1, dim=1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    safe = torch.where(chroma > 0, chroma, 1)
    # The hue in sixths of the circle; the formula depends on the largest channel.
    sixths = torch.where(value == red, (green - blue) / safe, (blue - red) / safe + 2)
    sixths = torch.where((value == blue) & (value != red) & (value != green), (red - green) / safe + 4, sixths)
    sixths = sixths + 6 * turn
    channels = []
    for offset in (5, 3, 1):
        k = (sixths + offset) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.cat(channels, dim=1)


def _centres(x: Tensor, side: int) -> Tensor:
    """Return the pixel centres along a side [side], with the image spanning [−1, 1]."""
    return (2 * torch.arange(side, device=x.device, dtype=x.dtype) + 1) / side - 1
