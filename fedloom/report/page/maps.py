"""Representations of a run's models, projected by t-SNE, with scores of how well they separate classes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedloom.core.errors import UserError
from fedloom.core.rng import numpy_generator
from fedloom.core.task import group_of_clients
from fedloom.inference.image_model import chunks
from fedloom.inference.trained_model import TrainedModel
from fedloom.inference.trained_run import TrainedRun
from fedloom.report.page.layers import Layers, compare_layers

CLASSES = 10
"""Largest number of classes in a map: more cannot be distinguished by colour."""
CLIENTS = 40
"""Largest number of clients whose networks contribute to one map."""
EACH = 200
"""Largest number of samples of one client."""
CHOSEN = 6
"""Number of clients that get a separate map."""
LEAST = 12
"""Smallest number of samples in a map."""
STYLE = "style"
"""Name of the part that is a client's style network (FedStyle)."""


@dataclass
class Map:
    """Representations projected to two dimensions."""

    what: str
    x: list[float]
    y: list[float]
    labels: list[int]
    names: dict[int, str]
    """Names of the labels."""
    separation: float | None
    """Silhouette of the labels, with cosine distance, in the representation itself (not in the projection)."""
    within: float | None = None
    """The same score computed within each client, as the mean over samples.

    A global map has this score too if the clients' networks equal the global network.
    """


class Viewer:
    """Maps of test samples as represented by the global network and by personal networks.

    Args:
        trained: The run.
        evaluated: Clients that have test results.
        points: Largest number of points of a map.
    """

    def __init__(self, trained: TrainedRun, evaluated: Sequence[int], points: int):
        self.trained, self.task, self.points = trained, trained.task, points
        self._labels = self.task.dataset.labels.numpy()
        self._rng = numpy_generator(trained.recipe.seed, "report")
        tests = self.task.federation.test
        able = [client for client in evaluated if len(tests[client])]
        self.clients = sorted(int(c) for c in self._some(np.array(able, int), CLIENTS))
        drawn = {client: self._some(tests[client], EACH) for client in self.clients}
        every = np.concatenate([self._labels[s] for s in drawn.values()]) if drawn else np.empty(0, int)
        seen, times = np.unique(every, return_counts=True)
        kept = seen[np.argsort(-times, kind="stable")[:CLASSES]]
        self.samples = {client: s[np.isin(self._labels[s], kept)] for client, s in drawn.items()}

    def together(self) -> Iterator[Map]:
        """Yield maps of all clients' samples: through the global network, and each through its client's network."""
        mine = [np.full(len(s), client) for client, s in self.samples.items()]
        if not mine:
            return
        owners, positions = np.concatenate(mine), np.concatenate(list(self.samples.values()))
        shown = np.sort(self._some(np.arange(len(positions)), self.points))
        labels = self._labels[positions]
        shared = self._global()
        z = None if shared is None else self._features(shared.features, positions)
        try:
            own = np.concatenate([self._features(self._own(c).features, s) for c, s in self.samples.items()])
        except UserError:  # no personal models were saved
            if z is not None:
                yield from self._map("global", z, labels, shown)
            raise
        within = _within(own, labels, owners)
        same = z is not None and np.allclose(z, own, rtol=1e-3, atol=1e-5)  # personal heads on a shared extractor
        if z is not None:
            yield from self._map("global", z, labels, shown, within if same else None)
        if not same:
            yield from self._map("clients' own", own, labels, shown, within)

    def one_by_one(self) -> list[Map]:
        """Return maps of some clients' local data through their networks, most classes first (RepPer's Fig. 4)."""
        federation = self.task.federation
        local = {c: np.concatenate([federation.train[c], federation.test[c]]) for c in self.clients}
        rich = sorted(
            (c for c in self.clients if len(local[c]) >= LEAST), key=lambda c: -len(np.unique(self._labels[local[c]]))
        )
        picked = np.unique(np.linspace(0, len(rich) - 1, min(CHOSEN, len(rich))).round().astype(int))
        maps: list[Map] = []
        for client in (rich[i] for i in picked):
            positions = np.sort(self._some(local[client], EACH))
            z = self._features(self._own(client).features, positions)
            maps += self._map(federation.name(client), z, self._labels[positions], np.arange(len(positions)))
        return maps

    def layers(self) -> Layers | None:
        """Compare the layers of some clients' networks on the same samples; None if their networks are equal."""
        positions = np.concatenate([np.empty(0, int), *self.samples.values()])
        if len(positions) < LEAST:
            return None
        shown = np.sort(self._some(positions, EACH))
        images = self.task.dataset.inputs[torch.from_numpy(shown)]
        return compare_layers([self._own(client) for client in self.clients[:CHOSEN]], images)

    def styles(self) -> list[Map]:
        """Return maps of style features and of stylised features, if the method has style networks (FedStyle's Fig. 4).

        Labels are styles if the dataset has several, otherwise clients.
        """
        if not self.clients or not hasattr(self._own(self.clients[0]).parts, STYLE):
            return []
        names = self.task.dataset.group_names
        groups = group_of_clients(self.task)
        by_style = len(names) > 1
        name = self.task.federation.name
        chosen = self.clients if by_style else self.clients[:CLASSES]
        kinds = {"styles": lambda model: self._style(model), "stylised": lambda model: model.features}
        labels = np.concatenate([np.full(len(self.samples[c]), groups[c] if by_style else c) for c in chosen])
        titles = {int(v): names[v] if by_style else name(int(v)) for v in np.unique(labels)}
        shown = np.sort(self._some(np.arange(len(labels)), self.points))
        maps: list[Map] = []
        for what, represent in kinds.items():
            z = np.concatenate([self._features(represent(self._own(c)), self.samples[c]) for c in chosen])
            maps += self._map(what, z, labels, shown, names=titles)
        return maps

    def _style(self, model: TrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(images: torch.Tensor) -> torch.Tensor:
            z: torch.Tensor = getattr(model.parts, STYLE)(model.prepared(images))
            return z

        return of

    def _global(self) -> TrainedModel | None:
        trained = self.trained
        style = trained.styles[0] if trained.method.has_global and trained.method.overrides("generalise") else None
        try:
            return trained.global_model(style)
        except UserError:  # the method shares no representation
            return None

    def _own(self, client: int) -> TrainedModel:
        if client not in self._models:
            self._models[client] = self.trained.personal(client)
        return self._models[client]

    @cached_property
    def _models(self) -> dict[int, TrainedModel]:
        return {}

    @torch.no_grad()
    def _features(self, represent: Callable[[torch.Tensor], torch.Tensor], positions: np.ndarray) -> np.ndarray:
        images = self.task.dataset.inputs[torch.from_numpy(positions)]
        return torch.cat([represent(chunk).float() for chunk in chunks(images)]).cpu().numpy()

    def _some(self, values: np.ndarray, count: int) -> np.ndarray:
        return values if len(values) <= count else self._rng.choice(values, count, replace=False)

    def _map(
        self, what: str, z: np.ndarray, labels: np.ndarray, shown: np.ndarray, within: float | None = None,
        names: dict[int, str] | None = None,
    ) -> Iterator[Map]:  # fmt: skip
        """Yield one map, or none: with too few samples, for a diverged network or for constant features."""
        if len(shown) < LEAST or not np.isfinite(z).all() or np.ptp(z[shown], axis=0).max() < 1e-9:
            return
        plane = in_the_plane(z[shown])
        names = names or {int(k): self.task.dataset.classes[k] for k in np.unique(labels[shown])}
        x, y = plane[:, 0].tolist(), plane[:, 1].tolist()
        yield Map(what, x, y, labels[shown].tolist(), names, silhouette(z, labels), within)


def _within(z: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> float | None:
    """Return the mean of the clients' separation scores, weighted by their samples."""
    scores = [(silhouette(z[owners == c], labels[owners == c]), int((owners == c).sum())) for c in np.unique(owners)]
    known = [(score, count) for score, count in scores if score is not None]
    return sum(score * count for score, count in known) / sum(count for _, count in known) if known else None


def in_the_plane(z: np.ndarray) -> np.ndarray:
    """Project to two dimensions by t-SNE of the normalised vectors; norms differ between clients and mean little."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    directions = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
    tsne = TSNE(perplexity=min(30, (len(z) - 1) / 3), init="pca", random_state=0)
    with threadpool_limits(1):  # with many threads on a busy machine, a few hundred points took minutes
        plane = tsne.fit_transform(directions)
    return np.asarray(plane, float)


def silhouette(z: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the silhouette score (−1 to 1, cosine distance); None unless there are at least two classes.

    It measures how much closer samples are to their own class than to the nearest other class. It is None too if every
    sample has a class to itself.
    """
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(labels)) < len(labels):
        return None
    return float(silhouette_score(z, labels, metric="cosine"))
