"""Augmentations of whole batches on their device. `parse_augment` reads them from a recipe."""

from fedloom.data.augment.sequence import Augment, parse_augment

__all__ = ["Augment", "parse_augment"]
