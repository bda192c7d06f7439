"""FedPAC: a shared extractor with aligned features, and a personal combination of heads for each client.

Reference: Xu et al., "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedloom.core.batches import Batch
from fedloom.core.client import Client
from fedloom.core.message import Message
from fedloom.core.method import Method
from fedloom.core.server import Server, weighted_sum
from fedloom.core.state import Part, State, copy_, lerp_, under
from fedloom.core.task import Task
from fedloom.losses.class_means import CLASS_STATISTICS, class_means


class FedPAC(Method):
    """A shared extractor aligned to global class centroids, and an optimised mixture of all heads per client.

    Deviations: a class without a global centroid is not aligned (the authors' code takes the client's own centroid). A
    client that has not sent a head yet starts from the average head. The head's learning rate is the round's.
    """

    paper = "Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023"
    shares = ("model", "means", "counts")
    sends = ("moments", "variance")
    receives = ("known",)
    keeps = ("model.head",)
    by, sums, reveals = {"means": "counts"}, ("counts",), CLASS_STATISTICS
    has_global = False
    learns_from = ("labels",)

    lam: float = 1.0
    """Weight λ of the feature alignment; 0 with a single client gives FedRep."""
    personal_epochs: int = 1
    """Epochs in which a client trains its head, before it trains the extractor."""
    personal_lr: float | None = None
    """Learning rate of the head; by default the round's. The authors use 0.1, and 0.01 for the extractor."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the model, class means with counts, h_y = P(y) μ_y and V, and whether the server knows the client."""
        means, counts = torch.zeros(task.classes, task.features), torch.zeros(task.classes)
        return {
            "model": task.model(), "means": means, "counts": counts, "moments": torch.zeros_like(means),
            "variance": torch.zeros(()), "known": torch.zeros(()),
        }  # fmt: skip

    def update(self, client: Client) -> None:
        """Compute statistics with the received extractor, train head and extractor, then compute class means."""
        z, y = client.features()
        means, counts = class_means(z, y, len(client.counts))
        copy_(client.moments, counts[:, None] / client.size * means)
        second = z.square().sum(1).mean()  # Σ_y P(y) E‖z‖²
        copy_(client.variance, (second - client.moments.square().sum()) / client.size)
        copy_(client.model.head, client.received.model.head)
        client.fit("model.head", self.head_loss, epochs=self.personal_epochs, lr=self.personal_lr)
        client.fit("model.extractor", self.loss)
        means, counts = class_means(*client.features(), len(client.counts))
        copy_(client.means, means)
        copy_(client.counts, counts)

    head_loss = Method.loss

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return cross-entropy plus λ times the distance from the class's global centroid, if it has one."""
        z, known = client.model.extractor(batch.x), (client.received.counts > 0)[batch.y]
        apart = torch.where(known, (z - client.received.means[batch.y]).square().mean(1), 0)
        loss: Tensor = client.objective.classify(client.model.head(z), batch.y)
        return loss + self.lam * apart.mean()

    def combine(self, server: Server, messages: Iterator[Message]) -> None:
        """Average the messages as they arrive, then compute a mixture of heads for each client that sent one."""
        heads: dict[int, State] = {}  # not whole messages: extractors need not stay in memory
        moments: list[Tensor] = []
        variances: list[Tensor] = []

        def collected() -> Iterator[Message]:
            for message in messages:
                assert message.client is not None
                heads[message.client] = {n: tensor for n, tensor in message.items() if under(n, ("model.head",))}
                moments.append(message["moments"].flatten())
                variances.append(message["variance"])
                yield message

        server.move(server.average(collected(), self.shares, by=self.by, sums=self.sums))
        h, v = (torch.stack(rows).double().cpu().numpy() for rows in (moments, variances))
        for client, weights in zip(heads, collaboration(h, v), strict=True):
            server.clients[client] = weighted_sum(list(heads.values()), weights) | {"known": torch.ones(())}

    def message_for(self, server: Server, client: int) -> Mapping[str, Tensor]:
        """Return the shared state, with the client's mixture of heads if it has one."""
        return {**super().message_for(server, client), **server.clients.get(client, {})}

    def personalise(self, client: Client) -> None:
        """Replace the head by the client's mixture; a client unknown to the server keeps the head it trained."""
        lerp_(client.model.head, client.received.model.head, client.received.known)


def collaboration(moments: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """Return a matrix whose row i holds the weights of all clients' heads in client i's mixture.

    The weights minimise Σ_j α_j² V_j + Σ_jl α_j α_l ⟨h_i − h_j, h_i − h_l⟩ on the simplex; the h are rows of
    `moments`.
    """
    gram = moments @ moments.T
    biases = (gram[i, i] - gram[i][:, None] - gram[i] + gram for i in range(len(gram)))
    return np.stack([least_quadratic(np.diag(variances) + bias) for bias in biases])


def least_quadratic(quadratic: np.ndarray) -> np.ndarray:
    """Return the α ≥ 0 with Σα = 1 that minimises αᵀQα.

    Negative eigenvalues of Q, usually rounding errors, are set to zero. The solution is exact (active set), by
    non-negative least squares: let x ≥ 0 minimise xᵀQx + (Σx − 1)². For x = s·α the optimal s gives q / (1 + q) with
    q = αᵀQα. This grows with q, so the optimal x is a multiple of the optimal α.
    """
    from scipy.optimize import nnls  # imported here: it takes 0.4 s, and few methods need it

    values, vectors = np.linalg.eigh((quadratic + quadratic.T) / 2)
    root = (vectors * np.sqrt(values.clip(0) / (values.clip(0).mean() or 1.0))).T
    x, _ = nnls(np.vstack([root, np.ones(len(root))]), np.append(np.zeros(len(root)), 1.0))
    return np.asarray(x / x.sum())
