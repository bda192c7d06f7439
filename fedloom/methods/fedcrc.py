"""FedCRC: one criterion for the representation, a global and a personal predictor (Alg. 1)."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class FedCRC(FedAvg):
    """The extractor learns under a common predictor; each client has its own; the common one imitates it, slowly.

    Global result: extractor and global predictor (`model`). Personal result: extractor and personal predictor.
    """

    paper = "Wang et al., Federated Learning with Common Representation Learning Criterion and Personalized Predictor"
    keeps = ("personal", "own")
    learns_from = ("labels",)

    tau: float = 0.99
    """How much of the old global predictor stays in a round (Eq. 9)."""
    predictor_epochs: int = 1
    """Epochs of the global predictor."""
    kl: Literal["imitate", "reverse"] = "imitate"
    """`imitate`: KL(personal ‖ global), the global predictor follows; `reverse` is Eq. 6 read literally."""
    personal_extractor: Literal["global", "local"] = "global"
    """Evaluate the personal predictor on the aggregated extractor, or on the client's own last one."""

    def build(self, task: Task) -> dict[str, Part]:
        """f and h_g (`model`), h_i (`personal`), and the client's last f where it is asked for (`own`)."""
        model = task.model()
        own = model.extractor if self.personal_extractor == "local" else nn.Identity()
        return {"model": model, "personal": deepcopy(model.head), "own": deepcopy(own)}

    def update(self, client: Client) -> None:
        """The three steps, each with everything else frozen."""
        client.fit("model.extractor", self.loss)  # Eq. 4
        client.fit("personal", self.personal_loss)  # Eq. 5
        client.fit("model.head", self.predictor_loss, epochs=self.predictor_epochs)  # Eq. 7
        if self.personal_extractor == "local":
            copy_(client.own, client.model.extractor)

    def personal_loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy of the personal predictor."""
        return cross_entropy(client.personal(client.model.extractor(batch.x)), batch.y)

    def predictor_loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy, and the distance from what the personal predictor says."""
        z = client.model.extractor(batch.x)
        logits = client.model.head(z)
        ours, theirs = logits.log_softmax(1), client.personal(z).detach().log_softmax(1)
        pair = (ours, theirs) if self.kl == "imitate" else (theirs, ours)
        return cross_entropy(logits, batch.y) + kl_div(*pair, log_target=True, reduction="batchmean")  # Eq. 6

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """The extractor is averaged (Eq. 3); the predictor moves a little towards its average (Eq. 8, 9)."""
        server.move(server.average(messages), {"model.head": 1 - self.tau})

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """By the aggregated extractor, or by the client's own."""
        z: Tensor = client.own(x) if self.personal_extractor == "local" else client.model.extractor(x)
        return z

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """The personal predictor on the extractor."""
        logits: Tensor = client.personal(self.represent(client, x))
        return logits
