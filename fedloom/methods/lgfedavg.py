"""LG-FedAvg: local representations, a global head (Liang et al., 2020)."""

from fedloom.core.method import Method


class LGFedAvg(Method):
    """Every client has an extractor of its own; only the head is shared. Both are trained together."""

    paper = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, "
        "NeurIPS 2019 workshop"
    )
    shares = ("model.head",)
    keeps = ("model.extractor",)
    has_global = False
