"""FedBN: FedAvg of everything but the normalisation layers, which stay with each client.

Reference: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
"""

from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedloom.core.method import Method


class FedBN(Method):
    """FedAvg with personal normalisation layers: their parameters and statistics are neither sent nor averaged.

    Without normalisation layers it is FedAvg. There is no global model, because the server has no normalisation layers.
    Deviation: the paper keeps batch-norm, the only kind in its networks; here every kind is kept. `norms: batch` is the
    literal reading, with which a network that has other kinds only is trained by FedAvg.
    """

    paper = "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    has_global = False

    norms: Literal["all", "batch"] = "all"
    """Layers that clients keep: `all` is batch, instance, group, layer and RMS norm; `batch` is batch-norm only."""

    @property
    def keeps_layers(self) -> tuple[type[nn.Module], ...]:  # type: ignore[override]
        """The types of normalisation layers that clients keep."""
        others = (_InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
        return (_BatchNorm,) if self.norms == "batch" else (_BatchNorm, *others)
