"""FedCRC: a shared extractor trained under a global predictor, and a personal predictor per client.

In each round a client trains the extractor, its personal predictor and the global predictor in turn (Alg. 1). The
global predictor changes slowly, so that all clients train the representation by the same criterion.

Reference: Wang et al., "Federated Learning with Common Representation Learning Criterion and Personalized Predictor".
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import kl_div

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.server import Server
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.methods.fedavg import FedAvg


class FedCRC(FedAvg):
    """A shared extractor trained under a slowly changing global predictor, and a personal predictor per client.

    The global predictor learns to imitate the personal ones. Global result: extractor and global predictor (`model`).
    Personal result: extractor and personal predictor.
    """

    paper = "Wang et al., Federated Learning with Common Representation Learning Criterion and Personalized Predictor"
    keeps = ("personal", "own")
    learns_from = ("labels",)

    tau: float = 0.99
    """Weight of the old global predictor in the server's update (Eq. 9); 0 replaces it by the clients' average."""
    predictor_epochs: int = 1
    """Training epochs of the global predictor in a round."""
    kl: Literal["imitate", "reverse"] = "imitate"
    """`imitate` minimises KL(personal ‖ global); `reverse` minimises KL(global ‖ personal), Eq. 6 as printed."""
    personal_extractor: Literal["global", "local"] = "global"
    """Extractor of the personal model: the aggregated one, or the one the client trained last."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return f and h_g (`model`), h_i (`personal`), and the client's last f if it is used (`own`)."""
        model = task.model()
        own = model.extractor if self.personal_extractor == "local" else nn.Identity()
        return {"model": model, "personal": deepcopy(model.head), "own": deepcopy(own)}

    def update(self, client: Client) -> None:
        """Train extractor, personal predictor and global predictor in turn; the other parts are frozen."""
        client.fit("model.extractor", self.loss)  # Eq. 4
        client.fit("personal", self.personal_loss)  # Eq. 5
        client.fit("model.head", self.predictor_loss, epochs=self.predictor_epochs)  # Eq. 7
        if self.personal_extractor == "local":
            copy_(client.own, client.model.extractor)

    def personal_loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the cross-entropy of the personal predictor."""
        loss: Tensor = client.objective.classify(client.personal(client.model.extractor(batch.x)), batch.y)
        return loss

    def predictor_loss(self, client: Client, batch: Batch) -> Tensor:
        """Return cross-entropy plus the KL divergence between global and personal predictor."""
        z = client.model.extractor(batch.x)
        logits, both = client.model.head(z), client.objective.class_logits
        ours, theirs = both(logits).log_softmax(1), both(client.personal(z).detach()).log_softmax(1)
        pair = (ours, theirs) if self.kl == "imitate" else (theirs, ours)
        loss: Tensor = client.objective.classify(logits, batch.y)
        return loss + kl_div(*pair, log_target=True, reduction="batchmean")  # Eq. 6

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Average the extractor (Eq. 3) and move the predictor by 1 − τ towards its average (Eq. 8, 9)."""
        server.move(server.average(messages), {"model.head": 1 - self.tau})

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """Return the representation by the aggregated extractor, or by the client's own."""
        z: Tensor = client.own(x) if self.personal_extractor == "local" else client.model.extractor(x)
        return z

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the logits of the personal predictor."""
        logits: Tensor = client.personal(self.represent(client, x))
        return logits
