"""Linear probes, which evaluate a representation that was trained without labels (FedStyle's two evaluations)."""

from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from fedloom.core.client import Client
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.methods.addons.heads import Headed, classify
from fedloom.models import SplitModel


class Probed(Headed, addon="probe"):
    """Linear classifiers on the frozen representation, which evaluate training without labels.

    Personalisation: one classifier per client, on its own data. Generalisation: one per style on the global
    representation, on all data of that style.
    """

    head_epochs: int = 100
    """Training epochs of the linear classifier. They are cheap, since features are computed once."""
    personal_network: Literal["local", "global"] = "local"
    """Network of the personal features: the client's own last one, or the aggregated one."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """The method's kept parts, and the client's last extractor if it is evaluated."""
        return (*super().keeps, "own") if self.remembers else super().keeps

    @property
    def serves(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """The method's parts for personal models, and the client's last extractor if it is evaluated."""
        base = super().serves
        return base if base is None or not self.remembers else (*base, "own")

    @property
    def remembers(self) -> bool:
        """Whether the client's last extractor is kept; not needed where the method has a personal network."""
        return self.personal_network == "local" and not self.overrides("network")

    def build(self, task: Task) -> dict[str, Part]:
        """Return the method's parts, the classifiers and a copy of the client's last extractor."""
        parts = super().build(task)
        model = parts["model"]
        assert isinstance(model, SplitModel)
        return parts | {"own": deepcopy(model.extractor) if self.remembers else nn.Identity()}

    def update(self, client: Client) -> None:
        """Update as the method does, then keep the trained extractor."""
        super().update(client)
        self.remember(client)

    def remember(self, client: Client) -> None:
        """Copy the trained extractor, before the server's average replaces it."""
        if self.remembers:
            copy_(client.own, client.model.extractor)

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """Return the representation by the client's own network, or by the aggregated one."""
        if self.remembers:
            return client.own(x)
        return super().represent(client, x) if self.personal_network == "local" else self.represent_global(client, x)

    def generalise(self, client: Client) -> None:
        """Fit a classifier on the global representation."""
        self.fit_head(client, self.head, client.features(self.represent_global))

    def represent_global(self, client: Client, x: Tensor) -> Tensor:
        """Return the representation by the global extractor."""
        z: Tensor = client.model.extractor(x)
        return z

    def predict_global(self, server: Any, x: Tensor) -> Tensor:
        """Return the logits of the style's classifier on the global representation."""
        return classify(server, self.head, self.represent_global(server, x))
