"""FedAvg whose clients remember their last local model: what MOON, FedIntR and FedCKA have in common."""

from copy import deepcopy

from fedloom.client import Client
from fedloom.methods.fedavg import FedAvg
from fedloom.models import SplitModel
from fedloom.parts import Part, copy_
from fedloom.task import Task


class Remembering(FedAvg, abstract=True):
    """A loss may compare the model in training with the received one and with `previous`; none of them is served."""

    keeps, serves = ("previous",), ()
    learns_from = ("labels",)

    def build(self, task: Task) -> dict[str, Part]:
        """The network, and the client's last one; the first time that is the common start."""
        model = self.equipped(task)
        return {"model": model, "previous": deepcopy(model)}

    def equipped(self, task: Task) -> SplitModel:
        """The network with what the method puts on it."""
        return task.model()

    def update(self, client: Client) -> None:
        """Trains, then remembers the local model for the next time."""
        client.fit("model", self.loss)
        copy_(client.previous, client.model)
