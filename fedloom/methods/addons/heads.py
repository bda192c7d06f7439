"""Classifiers on a frozen representation, as something that any method can have: `repper`, or `fedavg+svm`.

RepPer's second stage (Eq. 6, 9) and its Table 3.
"""

from typing import Any, Literal

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
    """Then every client fits a classifier of its own on the frozen representation, and keeps that to itself."""

    head: Head = "linear"
    """linear and mlp are trained with cross-entropy; svm and logreg are scikit-learn's, for weak devices."""
    heads: dict[int, Head] | None = None
    """Other heads for single clients: {3: svm}."""
    head_epochs: int = 10
    """Epochs of a linear or mlp head."""
    head_steps: int = 100
    """Steps that it takes at least, however small the client: what ten epochs are for the paper's clients."""
    head_lr: float | None = None
    """Its learning rate; the round's if not given."""
    head_optimizer: Literal["recipe", "sgd"] = "recipe"
    """Whose steps: the recipe's optimizer, or plain gradient descent (RepPer's paper)."""
    scale_features: bool = True
    """Fit heads on features of unit root mean square; off takes them as they are, whatever their scale."""

    def build(self, task: Task) -> dict[str, Part]:
        """The method's parts and the classifiers."""
        parts = super().build(task)  # first, so that the model starts as it does in every other method
        kinds = {self.head, *(self.heads or {}).values()}
        classifier = nn.ModuleDict({"linear": nn.Linear(task.features, task.classes)})
        if "mlp" in kinds:
            classifier["mlp"] = mlp(task.features, task.features, task.classes)
        return parts | {"classifier": classifier}

    def personalise(self, client: Client) -> None:
        """The extractor is frozen: its features are computed once."""
        super().personalise(client)
        self.fit_head(client, self.head_of(client), client.features(self.represent))

    def head_of(self, client: Client) -> Head:
        """Which head this client has."""
        return (self.heads or {}).get(client.id, self.head)

    def fit_head(self, client: Client, head: Head, data: Features) -> None:
        """Eq. 6: the classifier alone.

        Features are brought to unit root mean square first, and the factor folded into the weights: a contrastive loss
        leaves their scale open, and step sizes and regularisers should not depend on it.
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
        with torch.no_grad():
            first.weight.div_(scale)

    def scale(self, z: Tensor) -> Tensor:
        """The root mean square of features, or one."""
        return z.square().mean().sqrt().clamp_min(1e-12) if self.scale_features else z.new_ones(())

    def linear_loss(self, client: Client, batch: FeatureBatch) -> Tensor:
        """Cross-entropy of the linear head."""
        return cross_entropy(client.classifier["linear"](batch.x), batch.y)

    def mlp_loss(self, client: Client, batch: FeatureBatch) -> Tensor:
        """Cross-entropy of the MLP."""
        return cross_entropy(client.classifier["mlp"](batch.x), batch.y)

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """The client's classifier on the client's representation."""
        return classify(client, self.head_of(client), self.represent(client, x))


class Linear(Headed, addon="linear"):
    """Then every client fits a linear classifier on the frozen representation."""

    head: Head = "linear"


class Svm(Headed, addon="svm"):
    """Then every client fits a linear SVM on the frozen representation."""

    head: Head = "svm"


class LogReg(Headed, addon="logreg"):
    """Then every client fits a logistic regression on the frozen representation."""

    head: Head = "logreg"


class Mlp(Headed, addon="mlp"):
    """Then every client fits a two-layer network on the frozen representation."""

    head: Head = "mlp"


def classify(client: Any, head: Head, z: Tensor) -> Tensor:
    """Logits of the client's classifier."""
    logits: Tensor = client.classifier["mlp" if head == "mlp" else "linear"](z)
    return logits
