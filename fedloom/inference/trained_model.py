"""Trained models of clients, the server or newcomers, and their safetensors files."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, with_config
from safetensors.torch import save
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import TypedDict

from fedloom import methods, objectives
from fedloom.core import trusted_code
from fedloom.core.batches import StoredSamples
from fedloom.core.client import Client
from fedloom.core.errors import UserError
from fedloom.core.input_format import InputFormat
from fedloom.core.limits import refuse_without_room
from fedloom.core.protocols import ModelFactory
from fedloom.core.reading import CHECKED, decoding, parse_json
from fedloom.core.setup import Setup
from fedloom.core.state import State, serialisable
from fedloom.core.task import refuse_model_without_room
from fedloom.core.tensor_files import read_tensors
from fedloom.core.training import Training
from fedloom.core.workspace import Workspace
from fedloom.experiment.files import write_whole
from fedloom.experiment.records import ImageFacts, Named
from fedloom.inference.image_model import ImageModel, blank_task
from fedloom.methods import Method, Probed
from fedloom.models import Factory
from fedloom.models.per_client import NetworkPerClient
from fedloom.objectives import Objective

GLOBAL, AVERAGED = -1, -2
"""Values of `TrainedModel.client` for models that do not belong to a client: global, average of the clients' models."""
FORMAT = "fedloom-model-1"
"""Format of model files, stored in their metadata."""
IMAGE_COST = 64
"""Estimated bytes of memory per value of a blank image, while a model is built."""


@with_config(CHECKED)
class ModelFacts(TypedDict):
    """The metadata of a model file."""

    format: Literal["fedloom-model-1"]
    method: Named
    objective: Named
    network: Named
    images: ImageFacts
    client: Annotated[int, Field(ge=AVERAGED, le=2**53)]
    about: dict[str, Any]


class TrainedModel(ImageModel):
    """A client's model, the global model, or an average of clients' models; predicts as the method does.

    Attributes:
        client: Id of the client; `GLOBAL` (-1) or `AVERAGED` (-2) for models that do not belong to a client.
        method: The method that trained the model.
        about: Further facts, stored in the model's file (for an adapted model: how it was tested).
    """

    def __init__(self, workspace: Workspace, form: InputFormat, client: int, about: Mapping[str, Any] | None = None):
        super().__init__(form)
        method = workspace.setup.method
        assert isinstance(method, Method)
        self.client, self.method, self.about = client, method, dict(about or {})
        self.workspace = workspace
        self.parts, self.received = workspace.parts, workspace.received
        self.requires_grad_(False).eval()
        self._holder = Client(workspace, id=client, round=1, job="use", samples=np.empty(0, np.int64), first=False)

    @property
    def multilabel(self) -> bool:
        """Whether an image can have several labels."""
        return self.workspace.setup.task.objective.multilabel

    def logits(self, x: Tensor) -> Tensor:
        """Compute logits of preprocessed images with the method's prediction: one per class or label.

        Raises:
            UserError: The model has no classifier.
        """
        class_logits = self.workspace.setup.task.objective.class_logits
        if self.client != GLOBAL:
            return class_logits(self.method.predict(self._holder, x))
        self.refuse_without_classifier()
        return class_logits(self.method.predict_global(self._holder, x))

    def refuse_without_classifier(self) -> None:
        """Raise a UserError if the method shares a representation but no classifier, and this is the global model."""
        if self.client == GLOBAL and not self.method.has_global:
            raise UserError(
                f"{self.method.name} has no global classifier: use a client's model (--client 3), or fit a classifier "
                "for a new client (fedloom adapt)"
            )

    def represent(self, x: Tensor) -> Tensor:
        """Compute representations of preprocessed images, with the client's extractor or the shared one."""
        if self.client != GLOBAL:
            return self.method.represent(self._holder, x)
        if isinstance(self.method, Probed):
            return self.method.represent_global(self._holder, x)
        z: Tensor = self._holder.model.extractor(x)
        return z

    def save(self, path: str | Path) -> None:
        """Write the model to one safetensors file, for `load_model`.

        Args:
            path: The file; missing folders are created.

        Raises:
            UserError: The file cannot be written, or the model has no classifier.

        Example:
            >>> fedloom.load("runs/mine").personal(3).save("client3.safetensors")   # doctest: +SKIP
        """
        write_anywhere(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the model as safetensors: the tensors that it needs, and a description of the rest as metadata.

        Raises:
            UserError: The model has no classifier.
        """
        task = self.workspace.setup.task
        facts = {
            "format": FORMAT,
            "method": {"name": self.method.name} | _fields(self.method),
            "objective": {"name": task.objective.name} | _fields(task.objective),
            "network": task.network.facts(),
            "images": self.form.to_json(),
            "client": self.client,
            "about": self.about,
        }
        return save(self.needed(), {"fedloom": json.dumps(facts)})

    @torch.no_grad()
    def needed(self) -> State:
        """Return the tensors that logits or representations depend on, by name; a method's other state is left out."""
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
    """Records the tensors that are passed to torch functions."""

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
    """Write a file atomically at a path that the user has chosen; missing folders are created.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except (OSError, UserError) as error:
        why = getattr(error.__cause__ or error, "strerror", None) or error
        raise UserError(f"'{path}' cannot be written: {why}; choose another place, or free disk space") from None


def load_model(path: str | Path, *, trust_code: bool = False) -> TrainedModel:
    """Load a model from a file.

    Args:
        path: A file written by `TrainedModel.save`, `fedloom adapt` or `fedloom export --to safetensors`.
        trust_code: Allow the Python files that the model file names to be imported. Without it, such a file is
            refused, unless the user has named it before in this process.

    Returns:
        The model, frozen and in eval mode, with preprocessing.

    Raises:
        UserError: The file cannot be read, is not a fedloom model, or names a Python file that is not trusted.

    Example:
        >>> model = fedloom.load_model("models/clinic/model.safetensors")   # doctest: +SKIP
        >>> model.probabilities(images)   # doctest: +SKIP
    """
    remedy = "give a run folder or an adapted model"
    tensors, metadata = read_tensors(Path(path), "a model", remedy)
    if f'"{FORMAT}"' not in metadata:
        raise UserError(f"'{path}' is not a fedloom model: its metadata do not contain '{FORMAT}'; {remedy}")
    facts = parse_json(metadata.encode(), ModelFacts, f"'{path}'", remedy)
    if trust_code:
        trusted_code.trust(facts)
    with decoding(f"'{path}'", "a model", remedy):
        form = InputFormat.from_json(facts["images"])
        workspace = blank_workspace(
            methods.get(**facts["method"]), objectives.get(**facts["objective"]), form, factory_of(facts["network"])
        )
        model = TrainedModel(workspace, form, facts["client"], facts["about"])
        unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    if unknown:
        raise UserError(
            f"'{path}': the tensor {unknown[0]:.80} is unknown to this version of {workspace.setup.method.name}"
        )
    return model


def factory_of(network: Mapping[str, Any]) -> Factory | NetworkPerClient:
    """Return the network that is described by its name and options, or the networks of different clients."""
    if several := network.get("networks"):
        kinds = tuple(one for one in map(factory_of, several) if isinstance(one, Factory))
        return NetworkPerClient(kinds, tuple(network.get("numbers", ())))
    return Factory(network["name"], {name: value for name, value in network.items() if name != "name"})


def blank_workspace(
    method: Method, objective: Objective, form: InputFormat, network: ModelFactory, *,
    training: Training | None = None, seed: int = 0,
) -> Workspace:  # fmt: skip
    """Create a workspace without data, to load a model into."""
    refuse_without_room(IMAGE_COST * math.prod(form.shape), f"images of shape {list(form.shape)}", "use smaller ones")
    task = blank_task(form, network, objective)
    refuse_model_without_room(task)
    stored = StoredSamples(task.dataset.inputs, task.dataset.labels, *form.statistics)
    return Workspace(Setup(task, method, training or Training(), seed), stored=stored)
