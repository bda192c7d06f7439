"""LG-FedAvg: a local extractor per client and a shared head, trained together.

Reference: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
NeurIPS 2019 workshop.
"""

from fedloom.core.method import Method


class LGFedAvg(Method):
    """FedAvg of the head, with a personal extractor per client; both are trained together."""

    paper = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, "
        "NeurIPS 2019 workshop"
    )
    shares = ("model.head",)
    keeps = ("model.extractor",)
    has_global = False
