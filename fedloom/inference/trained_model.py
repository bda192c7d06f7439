"""A trained model on its own: a client's, everybody's, or a newcomer's; also as one safetensors file."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, with_config
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import TypedDict

from fedloom import methods, objectives
from fedloom.core import trusted_code
from fedloom.core.batches import Pixels
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.limits import refuse_without_room
from fedloom.core.optimizers import Training
from fedloom.core.protocols import ModelFactory
from fedloom.core.reading import CHECKED, decoding, parse_json
from fedloom.core.state import State, serialisable
from fedloom.core.task import ImageFormat, refuse_model_without_room
from fedloom.core.workspace import Setup, Workspace
from fedloom.experiment.files import write_whole
from fedloom.experiment.records import ImageFacts, Named
from fedloom.inference.image_model import ImageModel, blank_task
from fedloom.methods import Method, Probed
from fedloom.models import Factory
from fedloom.objectives import Objective

GLOBAL, AVERAGED = -1, -2
"""Whose model it is, where it is no client's: everybody's, or the average of the clients'."""
FORMAT = "fedloom-model-1"
IMAGE_COST = 64
"""Bytes that each value of an image takes while a blank one is made and looked at."""


@with_config(CHECKED)
class ModelFacts(TypedDict):
    """What the metadata of a model's file say."""

    format: Literal["fedloom-model-1"]
    method: Named
    objective: Named
    network: Named
    images: ImageFacts
    client: Annotated[int, Field(ge=AVERAGED, le=2**53)]
    about: dict[str, Any]


class TrainedModel(ImageModel):
    """A client's model, or the one for everybody, as the method predicts with it."""

    def __init__(self, workspace: Workspace, form: ImageFormat, client: int, about: Mapping[str, Any] | None = None):
        super().__init__(form)
        method = workspace.setup.method
        assert isinstance(method, Method)
        self.client, self.method, self.about = client, method, dict(about or {})
        self.workspace = workspace
        self.parts, self.received = workspace.parts, workspace.received
        self.requires_grad_(False).eval()
        self._holder = Client(workspace, id=client, round=1, job="use", samples=np.empty(0, np.int64), first=False)

    def logits(self, x: Tensor) -> Tensor:
        """By the method's prediction."""
        if self.client != GLOBAL:
            return self.method.predict(self._holder, x)
        self.refuse_without_classifier()
        return self.method.predict_global(self._holder, x)

    def refuse_without_classifier(self) -> None:
        """Some methods share a representation alone."""
        if self.client == GLOBAL and not self.method.has_global:
            raise UserError(
                f"{self.method.name} has no classifier for everybody: take a client's model (--client 3), or give a "
                "new client one (fedloom adapt)"
            )

    def represent(self, x: Tensor) -> Tensor:
        """The client's representation, or the one that all share."""
        if self.client != GLOBAL:
            return self.method.represent(self._holder, x)
        if isinstance(self.method, Probed):
            return self.method.represent_global(self._holder, x)
        z: Tensor = self._holder.model.extractor(x)
        return z

    def save(self, path: Path) -> None:
        """Writes one safetensors file, for `load_model`."""
        write_anywhere(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """As safetensors: the tensors that an answer depends on; all else that it takes is in the metadata."""
        task = self.workspace.setup.task
        says = {
            "format": FORMAT,
            "method": {"name": self.method.name} | _fields(self.method),
            "objective": {"name": task.objective.name} | _fields(task.objective),
            "network": {"name": task.network.name, **task.network.options},
            "images": self.form.to_json(),
            "client": self.client,
            "about": self.about,
        }
        return save(self.needed(), {"fedloom": json.dumps(says)})

    @torch.no_grad()
    def needed(self) -> State:
        """Tensors that logits or representation read, by name: a run's bookkeeping is left out."""
        reads = _Reads()
        device = self.scale.device
        blank = torch.zeros(2, *self.form.shape, dtype=torch.uint8, device=device)
        with reads:
            self(blank)
            self.features(blank)
        read = self.state_dict(keep_vars=True).items()
        return serialisable({name: tensor for name, tensor in read if id(tensor) in reads.seen})


def _fields(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in fields(thing)}


class _Reads(TorchFunctionMode):
    """Notes the tensors that functions get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.seen.add(id(value))
            elif isinstance(value, (list, tuple)):
                self._note(value)


def write_anywhere(path: Path, data: bytes) -> None:
    """Puts bytes where a user wants them, wholly or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (OSError, UserError) as error:
        why = getattr(error.__cause__ or error, "strerror", None) or error
        raise UserError(f"'{path}' cannot be written: {why}; choose another place, or make room") from None


def load_model(path: str | Path, *, trust_code: bool = False) -> TrainedModel:
    """The model in a file that `save`, `fedloom adapt` or `fedloom export --to safetensors` wrote.

    `trust_code` imports the Python files that it names; without it they are refused.
    """
    remedy = "give a run folder or an adapted model"
    tensors, metadata = read_tensors(Path(path), "a model", remedy)
    if f'"{FORMAT}"' not in metadata:
        raise UserError(f"'{path}' is no model of fedloom: its metadata say nothing of '{FORMAT}'; {remedy}")
    says = parse_json(metadata.encode(), ModelFacts, f"'{path}'", remedy)
    if trust_code:
        trusted_code.trust(says)
    with decoding(f"'{path}'", "a model", remedy):
        form = ImageFormat.from_json(says["images"])
        workspace = blank_workspace(
            methods.get(**says["method"]), objectives.get(**says["objective"]), form, factory_of(says["network"])
        )
        model = TrainedModel(workspace, form, says["client"], says["about"])
        unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    if unknown:
        raise UserError(f"'{path}': {unknown[0]:.80} is unknown to this version of {workspace.setup.method.name}")
    return model


def read_tensors(path: Path, what: str, remedy: str) -> tuple[State, str]:
    """The tensors of a safetensors file, and what fedloom wrote into its metadata (empty if nothing)."""
    if path.exists() and not path.is_file():
        raise UserError(f"'{path}' is not a file; {remedy}")
    with decoding(f"'{path}'", what, remedy):
        refuse_without_room(2 * path.stat().st_size, f"'{path}'", remedy, "it")
        with safe_open(str(path), "pt") as file:
            metadata = (file.metadata() or {}).get("fedloom", "")
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def factory_of(network: Mapping[str, Any]) -> Factory:
    """The network that a file describes by its name and options."""
    return Factory(network["name"], {name: value for name, value in network.items() if name != "name"})


def blank_workspace(
    method: Method, objective: Objective, form: ImageFormat, network: ModelFactory, *,
    training: Training | None = None, seed: int = 0,
) -> Workspace:  # fmt: skip
    """A workspace to load a model into, without data."""
    refuse_without_room(IMAGE_COST * math.prod(form.shape), f"images of shape {list(form.shape)}", "use smaller ones")
    task = blank_task(form, network, objective)
    refuse_model_without_room(task)
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (form.mean, form.std))
    pixels = Pixels(task.dataset.images, task.dataset.labels, mean, std)
    return Workspace(Setup(task, method, training or Training(), seed), pixels=pixels)
