"""FedBABU: only the extractor is trained and shared; the head keeps its random initial values.

After federated training each client fine-tunes the model on its own data.

Reference: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
"""

from typing import Literal

from fedloom.core.client import Client
from fedloom.methods.addons.finetune import FineTuned


class FedBABU(FineTuned):
    """FedAvg of the extractor with one fixed random head; each client fine-tunes the model afterwards.

    Global result: the aggregated extractor with the fixed head. Personal result: the model after fine-tuning.
    """

    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    shares = ("model.extractor",)
    learns_from = ("labels", "multilabel")

    ft_parts: Literal["all", "head", "body"] = "all"  # type: ignore[assignment]
    """Parts to fine-tune: the whole model, the head or the extractor (`body`)."""
    ft_epochs: int = 5
    """Epochs of fine-tuning."""

    def update(self, client: Client) -> None:
        """Train the extractor. The head keeps its initial values, which all clients have in common."""
        client.fit("model.extractor", self.loss)

    def personalise(self, client: Client) -> None:
        """Fine-tune a copy of the global model."""
        parts = {"all": "model", "head": "model.head", "body": "model.extractor"}[self.ft_parts]
        client.fit(parts, self.ft_loss, epochs=self.ft_epochs, lr=self.ft_lr, purpose="fine-tune")
