"""FedRep: first the own head, then the common representation (Collins et al., 2021)."""

from fedloom.core.client import Client
from fedloom.methods.fedper import FedPer


class FedRep(FedPer):
    """FedPer in two steps: the head on the frozen extractor, then the extractor under the frozen head."""

    paper = "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"

    personal_epochs: int | None = 10
    """Epochs of the head; null: as many as the extractor's, which are the recipe's (FedStyle's appendix)."""

    def update(self, client: Client) -> None:
        """Two fits, each with the rest frozen."""
        client.fit("model.head", self.loss, epochs=self.personal_epochs)
        client.fit("model.extractor", self.loss)
