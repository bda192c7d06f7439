"""Fine-tuning, as something that any method with a global model can have: `fedavg+ft`."""

from typing import ClassVar, Literal

from torch import Tensor

from fedloom.core.client import Client
from fedloom.core.method import Method


class FineTuned(Method, addon="ft"):
    """Afterwards every client trains the shared model a little on its own data, and keeps that to itself."""

    needs_global: ClassVar[bool] = True

    ft_parts: Literal["head", "all"] = "head"
    """What is fine-tuned."""
    ft_epochs: int = 10
    """For how long."""
    ft_lr: float | None = None
    """Learning rate; the round's if not given."""
    ft_optimizer: Literal["recipe", "sgd"] = "recipe"
    """Whose steps: the recipe's optimizer, or plain gradient descent (RepPer's paper)."""

    def personalise(self, client: Client) -> None:
        """Fine-tunes on the plain objective."""
        super().personalise(client)
        parts = "model.head" if self.ft_parts == "head" else "model"
        plain = self.ft_optimizer == "sgd"
        client.fit(parts, self.ft_loss, epochs=self.ft_epochs, lr=self.ft_lr, plain=plain, purpose="fine-tune")

    ft_loss = Method.loss

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """What was fine-tuned is what serves the client."""
        logits: Tensor = client.model(x)
        return logits
