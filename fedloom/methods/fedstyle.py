"""FedStyle: unsupervised learning of a shared content network, with private style networks (Alg. 2–4).

Reference: Yang et al., "More Generalized and Personalized Unsupervised Representation Learning In A Distributed
System", arXiv:2211.06470, 2022.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fedloom.core.batches import Batch, FeatureBatch
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.state import Part, copy_
from fedloom.core.task import Task
from fedloom.data.augment.images import sobel
from fedloom.losses import supcon, supcon_sum
from fedloom.methods.addons.probes import Probed
from fedloom.objectives import SelfSupervised, Views, mlp


class FedStyle(Probed):
    """Training without labels of a shared content network, with private style features infused on each client.

    A client first learns to tell its images from Sobel-filtered copies, which yields its style features. In each round
    a generator infuses them into the content features, and both plain and infused features are trained contrastively.
    Deviations: the generator is trained too (Alg. 3: only the content network); the average is weighted by samples.
    """

    paper = "Yang et al., More Generalized and Personalized Unsupervised Representation Learning, arXiv 2211.06470"
    shares = ("model",)
    keeps = ("style", "style_projector", "generator", "own")
    objective = "simclr"
    learns_from = ("views",)

    lam: float = 1.0
    """Weight λ of the loss on style-infused features."""
    tau: float = 0.07
    """Temperature of the style loss."""
    anchors: Literal["mean", "sum"] = "mean"
    """Mean over anchors and their positives, or Eq. 2 as printed: about B times as large for a batch of B images."""
    style_epochs: int = 10
    """Training epochs of the style network, before a client's first round."""
    train_generator: bool = True
    """Whether the generator is trained. Off is Alg. 3 as printed: it keeps its random weights."""
    stylised: bool = True
    """Whether personal features include the style-infused ones (Eq. 4)."""
    hidden: int = 256
    """Hidden width of the generator and the style projector."""

    def build(self, task: Task) -> dict[str, Part]:
        """Return the content network f_c, g_c (`model`), the style network f_s, g_s and the generator G."""
        if len(task.shape) != 3:
            raise UserError(f"method.name = 'fedstyle': it needs images, but samples have the shape {task.shape}")
        k = task.features
        return super().build(task) | {
            "style": task.model().extractor,
            "style_projector": mlp(k, self.hidden, 128),
            "generator": mlp(2 * k, self.hidden, k),
            "norm": torch.ones(()),
        }

    def prepare(self, client: Client) -> None:
        """Train the style network to separate the client's images from Sobel-filtered ones (Alg. 2)."""
        client.fit(("style", "style_projector"), self.style_loss, epochs=self.style_epochs)

    def style_loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the supervised InfoNCE loss with two classes: images and their Sobel-filtered copies."""
        images = torch.cat([batch.plain, batch.normalise(sobel(batch.image))])
        z = normalize(client.style_projector(client.style(images)), dim=1)
        style = torch.arange(len(z), device=z.device) < batch.size
        return supcon_sum(z, style, self.tau) if self.anchors == "sum" else supcon(z, style, self.tau, "out")

    def update(self, client: Client) -> None:
        """Train content network and generator with the style network frozen (Alg. 3)."""
        client.fit(("model", "generator") if self.train_generator else "model", self.loss)
        self.remember(client)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Return the unsupervised loss on content features plus λ times that on style-infused features."""
        objective: SelfSupervised = client.objective
        content = objective.encode(client.model, batch)
        with torch.no_grad():
            styles = [client.style(batch.plain), client.style(batch.normalise(sobel(batch.image)))]
        online = self.infuse(client, content.online, styles)
        target = None if content.target is None else self.infuse(client, content.target, styles)
        infused = objective.contrast(client.model, Views(online, target), remember=False)
        return objective.contrast(client.model, content) + self.lam * infused  # Eq. 3

    def infuse(self, client: Client, views: tuple[Tensor, Tensor], styles: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Infuse the client's style into the first view and the Sobel style into the second (lines 7, 8)."""
        first, second = (client.generator(torch.cat(pair, 1)) for pair in zip(views, styles, strict=True))
        return first, second

    def personalise(self, client: Client) -> None:
        """Train the classifier together with the generator, on frozen content and style features."""
        if not self.stylised:
            super().personalise(client)
            return
        data = client.features(self.content_and_style)
        with torch.no_grad():
            copy_(client.norm, self.scale(self.stylise(client, data[0])))
        client.fit(
            ("classifier.linear", "generator"), self.personal_loss, data=data,
            epochs=self.head_epochs, at_least=self.head_steps, lr=self.head_lr, purpose="head",
        )  # fmt: skip
        self.fold(client.classifier["linear"], client.norm)
        if self.head_of(client) != "linear":
            self.fit_head(client, self.head_of(client), client.features(self.represent))

    def content_and_style(self, client: Client, x: Tensor) -> Tensor:
        """Return h_c and h_s, concatenated."""
        return torch.cat([super().represent(client, x), client.style(x)], 1)

    def personal_loss(self, client: Client, batch: FeatureBatch) -> Tensor:
        """Return the cross-entropy on the style-infused features."""
        return cross_entropy(client.classifier["linear"](self.stylise(client, batch.x) / client.norm), batch.y)

    def stylise(self, client: Client, both: Tensor) -> Tensor:
        """Return content features plus content features in the client's style."""
        return both[:, : both.shape[1] // 2] + client.generator(both)  # Eq. 4

    def represent(self, client: Client, x: Tensor) -> Tensor:
        """Return the client's personal features."""
        if not self.stylised:
            return super().represent(client, x)
        return self.stylise(client, self.content_and_style(client, x))
