"""Sequences of augmentations, which recipes write as `name` or `name:value`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from fedloom.core.errors import UserError, nearest
from fedloom.core.protocols import Shape
from fedloom.core.rng import Random
from fedloom.data.augment.images import crop, flip, grayscale, jitter, noise, resized_crop
from fedloom.data.augment.signals import gaussian, mask, shift


@dataclass(frozen=True)
class Augment:
    """A sequence of augmentations: `augment(x, random)` applies them in order."""

    steps: tuple[tuple[str, float], ...] = ()
    """Names and values, such as ("crop", 4.0)."""

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __call__(self, x: Tensor, random: Random) -> Tensor:
        """Return augmented images [B, C, H, W] of images in [0, 1]."""
        for name, value in self.steps:
            x = _STEPS[name].apply(x, value, random)
        return x

    def refuse_for(self, shape: Shape, field: str) -> None:
        """Raise a UserError if an augmentation needs images and samples have another shape.

        Args:
            shape: Shape of a sample.
            field: Recipe field that the augmentations come from, for the message.
        """
        for name, value in self.steps:
            if _STEPS[name].images and len(shape) != 3:
                able = ", ".join(known for known, step in _STEPS.items() if not step.images)
                raise UserError(
                    f"{field} = '{name}:{value:g}': needs images, but samples have the shape {tuple(shape)}; use {able}"
                )

    def __str__(self) -> str:
        return ", ".join(f"{name}:{value:g}" for name, value in self.steps)


def parse_augment(specs: Iterable[str]) -> Augment:
    """Parse augmentations written as `name` or `name:value`.

    | augmentation | function | value |
    |---|---|---|
    | `crop:4` | `crop` | padding |
    | `flip:0.5` | `flip` | probability |
    | `jitter:0.4` | `jitter` with strengths (s, s, s, s/4) and probability 0.8 (s = 0.4 in MoCo v2) | s |
    | `grayscale:0.2` | `grayscale` | probability |
    | `resized-crop:0.2` | `resized_crop` with scale (s, 1) and ratio (3/4, 4/3) | s |
    | `noise:0.05` | `noise` | standard deviation |
    | `gaussian:0.1` | `gaussian`, for inputs of any shape | standard deviation |
    | `mask:0.2` | `mask`, for inputs of any shape | probability |
    | `shift:0.1` | `shift`, for signals | largest shift as a share of the length |

    The values in the table are the defaults of a name without a value.

    Args:
        specs: The augmentations, in the order in which they are applied.

    Returns:
        The sequence of augmentations.

    Raises:
        UserError: A name is unknown, or a value is invalid.

    Example:
        >>> str(parse_augment(["crop", "flip:0.3"]))
        'crop:4, flip:0.3'
    """
    return Augment(tuple(_parsed(spec) for spec in specs))


@dataclass(frozen=True)
class _Step:
    """An augmentation with the default and the range of its value."""

    apply: Callable[[Tensor, float, Random], Tensor]
    default: float
    least: float
    most: float
    whole: bool = False
    images: bool = True
    """Whether it needs images; False for augmentations of inputs of any shape."""

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
    "gaussian": _Step(gaussian, default=0.1, least=0, most=10, images=False),
    "mask": _Step(mask, default=0.2, least=0, most=1, images=False),
    "shift": _Step(shift, default=0.1, least=0, most=1, images=False),
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
        raise UserError(f"augmentation '{spec}': the value must be {remedy}") from None
    if not step.takes(value):
        raise UserError(f"augmentation '{spec}': the value is out of range; it must be {remedy}")
    return name, value
