"""FedBABU: the body alone is trained, under a head that nobody moves (Oh et al., 2022)."""

from typing import Literal

from fedloom.core.client import Client
from fedloom.methods.addons.finetune import FineTuned


class FedBABU(FineTuned):
    """FedAvg of the extractor under one random head that stays as it is; every client fine-tunes afterwards.

    Global result: the aggregated extractor with that head. Personal result: after fine-tuning.
    """

    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    shares = ("model.extractor",)
    learns_from = ("labels",)

    ft_parts: Literal["all", "head", "body"] = "all"  # type: ignore[assignment]
    """What is fine-tuned: everything, the head alone or the extractor alone."""
    ft_epochs: int = 5
    """For how long."""

    def update(self, client: Client) -> None:
        """The extractor; the head keeps its initial values, the same for all."""
        client.fit("model.extractor", self.loss)

    def personalise(self, client: Client) -> None:
        """Fine-tunes a copy of the global model."""
        parts = {"all": "model", "head": "model.head", "body": "model.extractor"}[self.ft_parts]
        client.fit(parts, self.ft_loss, epochs=self.ft_epochs, lr=self.ft_lr, purpose="fine-tune")
