"""The trigger of a backdoor attack: a bright square in the corner of an image, and the class that it stands for."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Trigger:
    """A square in the lower right corner of images, and the class that a backdoored model predicts for them."""

    target: int
    """The class."""
    size: int
    """Side of the square in pixels."""
    value: float = 1.0
    """Value of its pixels in images of floats; 255 in images of bytes."""

    def stamp(self, images: Tensor) -> Tensor:
        """Return copies of images [N, C, H, W] with the square."""
        stamped = images.clone()
        stamped[..., -self.size :, -self.size :] = self.value if images.is_floating_point() else 255
        return stamped
