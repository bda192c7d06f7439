"""Losses: pure functions of tensors, one file each.

Values and gradients are finite even for a single class, a single sample or equal rows. All losses can be captured in a
CUDA graph: shapes never depend on values, and no value is read on the host. Shapes: B is the batch size, D the width of
a representation or projection, C the number of classes.
"""

from fedloom.losses.barlow_twins import barlow_twins
from fedloom.losses.byol import byol
from fedloom.losses.info_nce import info_nce
from fedloom.losses.layerwise_contrastive import layerwise_contrastive
from fedloom.losses.linear_cka import linear_cka
from fedloom.losses.moco import enqueue, moco
from fedloom.losses.model_contrastive import model_contrastive
from fedloom.losses.negative_cosine import negative_cosine
from fedloom.losses.nt_xent import nt_xent
from fedloom.losses.supcon import supcon, supcon_sum

__all__ = [
    "barlow_twins", "byol", "enqueue", "info_nce", "layerwise_contrastive", "linear_cka", "moco", "model_contrastive",
    "negative_cosine", "nt_xent", "supcon", "supcon_sum",
]  # fmt: skip
