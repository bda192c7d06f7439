"""FedRep: each client trains its personal head first, then the shared extractor.

Reference: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
"""

from fedloom.core.client import Client
from fedloom.methods.fedper import FedPer


class FedRep(FedPer):
    """FedPer in two steps: the head with the extractor frozen, then the extractor with the head frozen."""

    paper = "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"

    personal_epochs: int | None = 10
    """Epochs of the head; null: the recipe's epochs, as for the extractor (FedStyle's appendix)."""

    def update(self, client: Client) -> None:
        """Train the head, then the extractor, each with the other frozen."""
        client.fit("model.head", self.loss, epochs=self.personal_epochs)
        client.fit("model.extractor", self.loss)
