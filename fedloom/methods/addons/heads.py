"""Personal classifiers on a frozen representation, for RepPer and as add-ons to any method: `fedavg+svm`.

They are the second stage of RepPer (Eq. 6, 9). Its Table 3 adds them to other methods.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedloom.core.batches import FeatureBatch
from fedloom.core.client import Client
from fedloom.core.fit import Features
from fedloom.core.method import Method
from fedloom.core.state import Part
from fedloom.core.task import Task
from fedloom.methods.addons.classifiers import write_linear
from fedloom.objectives import mlp

Head = Literal["linear", "mlp", "svm", "logreg"]


class Headed(Method, abstract=True):
    """A personal classifier per client, fitted on the frozen representation after federated training."""

    learns_from: ClassVar[tuple[str, ...]] = ("labels", "views")

    head: Head = "linear"
    """Classifier: `linear` and `mlp` are trained with cross-entropy; `svm` and `logreg` are scikit-learn's."""
    heads: dict[int, Head] | None = None
    """Different classifiers for some clients, by client number: {3: svm}."""
    head_epochs: int = 10
    """Training epochs of a linear or mlp head."""
    head_steps: int = 100
    """Minimum number of training steps, for small clients; the paper's clients take about 100 in ten epochs."""
    head_lr: float | None = None
    """Learning rate of a linear or mlp head; by default the round's."""
    head_optimizer: Literal["recipe", "sgd"] = "recipe"
    """The recipe's optimizer, or plain gradient descent (`sgd`; RepPer's paper)."""
    scale_features: bool = True
    """Scale features to unit root mean square before a head is fitted on them."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the method's parts and the classifiers."""
        parts = super().build(task)  # first, so that the model's initial values are the same as in other methods
        kinds = {self.head, *(self.heads or {}).values()}
        classifier = nn.ModuleDict({"linear": nn.Linear(task.features, task.classes)})
        if "mlp" in kinds:
            classifier["mlp"] = mlp(task.features, task.features, task.classes)
        return parts | {"classifier": classifier}

    def personalise(self, client: Client) -> None:
        """Fit the client's head on features that are computed once, since the extractor is frozen."""
        super().personalise(client)
        self.fit_head(client, self.head_of(client), client.features(self.represent))

    def head_of(self, client: Client) -> Head:
        """Return the kind of head of a client."""
        return (self.heads or {}).get(client.id, self.head)

    def fit_head(self, client: Client, head: Head, data: Features) -> None:
        """Fit the classifier on features and labels (Eq. 6).

        Features are scaled to unit root mean square first, and the factor is folded into the weights afterwards. A
        contrastive loss does not determine the scale of features, and step sizes and regularisers should not depend
        on it.
        """
        z, y = data
        scale = self.scale(z)
        if head == "svm" or head == "logreg":
            write_linear(client.classifier["linear"], head, z / scale, y)
        else:
            loss = self.mlp_loss if head == "mlp" else self.linear_loss
            client.fit(
                f"classifier.{head}", loss, data=(z / scale, y), epochs=self.head_epochs, at_least=self.head_steps,
                lr=self.head_lr, plain=self.head_optimizer == "sgd", purpose="head",
            )  # Eq. 9  # fmt: skip
        first = client.classifier["mlp"][0] if head == "mlp" else client.classifier["linear"]
        self.fold(first, scale)

    @torch.no_grad()
    def fold(self, layer: nn.Linear, scale: Tensor) -> None:
        """Fold the factor of scaled features into the weights of the layer that was fitted to them."""
        layer.weight.div_(scale)

    def scale(self, z: Tensor) -> Tensor:
        """Return the root mean square of features, or 1 if `scale_features` is off."""
        return z.square().mean().sqrt().clamp_min(1e-12) if self.scale_features else z.new_ones(())

    def linear_loss(self, client: Client, batch: FeatureBatch) -> Tensor:
        """Return the cross-entropy of the linear head."""
        return cross_entropy(client.classifier["linear"](batch.x), batch.y)

    def mlp_loss(self, client: Client, batch: FeatureBatch) -> Tensor:
        """Return the cross-entropy of the MLP head."""
        return cross_entropy(client.classifier["mlp"](batch.x), batch.y)

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the logits of the client's classifier on its representation."""
        return classify(client, self.head_of(client), self.represent(client, x))


class Linear(Headed, addon="linear"):
    """A linear classifier per client on the frozen representation, fitted after federated training."""

    head: Head = "linear"


class Svm(Headed, addon="svm"):
    """A linear SVM per client on the frozen representation, fitted after federated training."""

    head: Head = "svm"


class LogReg(Headed, addon="logreg"):
    """A logistic regression per client on the frozen representation, fitted after federated training."""

    head: Head = "logreg"


class Mlp(Headed, addon="mlp"):
    """A two-layer network per client on the frozen representation, fitted after federated training."""

    head: Head = "mlp"


def classify(client: Any, head: Head, z: Tensor) -> Tensor:
    """Return the logits of a client's classifier."""
    logits: Tensor = client.classifier["mlp" if head == "mlp" else "linear"](z)
    return logits
