"""Linear probes: how a representation that was learnt without labels is judged (FedStyle's two evaluations)."""

from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.methods.addons.heads import Headed, classify
from fedloom.models import SplitModel


class Probed(Headed, addon="probe"):
    """How a representation learnt without labels is judged: linear classifiers on it, frozen.

    Personalisation: a client's own, on its data. Generalisation: one per style on the global representation, on all of
    that style's data.
    """

    head_epochs: int = 100
    """Epochs of the linear classifier: features are computed once, so they are cheap."""
    personal_network: Literal["local", "global"] = "local"
    """Judge personal features by the client's own last network, or by the aggregated one."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the method keeps, and the client's last extractor where that is what is judged."""
        return (*super().keeps, "own") if self.remembers else super().keeps

    @property
    def serves(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """That extractor is what personal features come from."""
        base = super().serves
        return base if base is None or not self.remembers else (*base, "own")

    @property
    def remembers(self) -> bool:
        """Whether the client's last extractor is set aside: not where the method keeps a personal network anyway."""
        return self.personal_network == "local" and not self.overrides("network")

    def build(self, task: Task) -> dict[str, Part]:
        """The method's parts, classifiers, and a place for the client's last extractor."""
        parts = super().build(task)
        model = parts["model"]
        assert isinstance(model, SplitModel)
        return parts | {"own": deepcopy(model.extractor) if self.remembers else nn.Identity()}

    def update(self, client: Client) -> None:
        """As the method does; then the network is remembered."""
        super().update(client)
        self.remember(client)

    def remember(self, client: Client) -> None:
        """Keeps what the client has trained before the server averages it away."""
        if self.remembers:
            copy_(client.own, client.model.extractor)

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """By the client's own network, or by the aggregated one."""
        if self.remembers:
            return client.own(x)
        return super().represent(client, x) if self.personal_network == "local" else self.represent_global(client, x)

    def generalise(self, client: Client) -> None:
        """A classifier on the global representation."""
        self.fit_head(client, self.head, client.features(self.represent_global))

    def represent_global(self, client: Client, x: Tensor) -> Tensor:
        """What is the same for everybody."""
        z: Tensor = client.model.extractor(x)
        return z

    def predict_global(self, server: Any, x: Tensor) -> Tensor:
        """The style's classifier on the global representation."""
        return classify(server, self.head, self.represent_global(server, x))
