"""Fine-tuning as an add-on to any method with a global model: `fedavg+ft`."""

from typing import ClassVar, Literal

from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.method import Method


class FineTuned(Method, addon="ft"):
    """Fine-tuning of the global model on each client's own data, after federated training."""

    needs_global: ClassVar[bool] = True

    ft_parts: Literal["head", "all"] = "head"
    """Parts to fine-tune: the head or the whole model."""
    ft_epochs: int = 10
    """Epochs of fine-tuning; 0 gives the global model."""
    ft_lr: float | None = None
    """Learning rate of fine-tuning; by default the round's."""
    ft_optimizer: Literal["recipe", "sgd"] = "recipe"
    """The recipe's optimizer, or plain gradient descent (`sgd`; RepPer's paper)."""

    def personalise(self, client: Client) -> None:
        """Fine-tune on the recipe's objective."""
        super().personalise(client)
        parts = "model.head" if self.ft_parts == "head" else "model"
        plain = self.ft_optimizer == "sgd"
        client.fit(parts, self.ft_loss, epochs=self.ft_epochs, lr=self.ft_lr, plain=plain, purpose="fine-tune")

    ft_loss = Method.loss

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Return the logits of the fine-tuned model."""
        logits: Tensor = client.model(x)
        return logits
