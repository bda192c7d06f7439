"""The recipe: the validated description of an experiment. YAML ⇄ pydantic; nothing runs before it is whole."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from fedloom import methods, models, objectives, plugins
from fedloom.checking import Section, checked, refusal
from fedloom.data import parse_partition, parts
from fedloom.data.augment import parse_augment
from fedloom.data.federation import parse_split
from fedloom.engines import ENGINES, EngineSettings, engine_class
from fedloom.errors import UserError, nearest
from fedloom.failing.faults import Faults
from fedloom.plugins import short
from fedloom.raw import assign, read_assignment, read_yaml
from fedloom.training import Training
from fedloom.trust.attack import AttackSettings
from fedloom.trust.combination import RobustSettings
from fedloom.trust.privacy import PrivacySettings
from fedloom.wire import WireSettings


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def _checked(parse: Any) -> AfterValidator:
    """Keeps the written form, once it has been read without complaint."""

    def check(value: Any) -> Any:
        try:
            parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


class MethodSettings(BaseModel):
    """A method's name (`fedprox`, `fedavg+ft`) and its hyperparameters beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "fedavg"

    @property
    def parameters(self) -> dict[str, Any]:
        """What was set."""
        return dict(self.model_extra or {})


class ObjectiveSettings(BaseModel):
    """What is trained on (labels, simclr, simsiam, byol, moco, barlow) and its constants beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "labels"

    def make(self) -> objectives.Objective:
        """The objective."""
        return objectives.get(self.name, **(self.model_extra or {}))


class ModelSettings(BaseModel):
    """A network's name and its options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "mlp"

    @model_validator(mode="after")
    def _exists(self) -> "ModelSettings":
        self._check("name", self.name, {})
        for option, value in self.options.items():
            self._check(option, value, {option: value})
        return self

    def _check(self, field: str, value: Any, options: dict[str, Any]) -> None:
        try:
            models.check(self.name, options)
        except UserError as error:
            problem = str(error).removeprefix(f"model '{value}'").lstrip(": ")
            raise refusal(f"model.{field} = {value!r}: {problem}") from None

    @property
    def options(self) -> dict[str, Any]:
        """What was set."""
        return dict(self.model_extra or {})


class DataSettings(Section):
    """Which images, who holds which of them, and what is done to them on the way into a network."""

    name: str = Field("digits", description="a dataset (see `fedloom datasets`), `a+b` for styles, a folder or .npz")
    dir: Path | None = Field(None, description="data folder; else $FEDLOOM_DATA, else the user's cache")
    size: int | None = Field(None, ge=4, description="resize images to size × size")
    channels: int | None = Field(None, ge=3, le=3, description="3: grey images are repeated to three channels")
    limit: int | None = Field(None, ge=1, description="at most this many training and test images (of each style)")
    clients: int = Field(20, ge=1, description="how many clients (`natural` takes one per folder)")
    partition: Annotated[str, _checked(parse_partition)] = Field(
        "dirichlet:0.1",
        description="iid, dirichlet:α, capped-dirichlet:α, equal-dirichlet:α, pathological:k, shards:k, quantity:α, …",
    )
    split: Annotated[str, _checked(parse_split)] = Field(
        "pooled:0.75", description="where test data come from: pooled:0.75, official, common"
    )
    minimum: int = Field(10, ge=1, description="samples that every client has at least (dirichlet, quantity)")
    newcomers: float = Field(0, ge=0, description="clients held out of training: a number, or a share below 1")
    resample: bool = Field(False, description="resample every style to the mean style size (FedStyle)")
    augment: Annotated[tuple[str, ...], _checked(parse_augment)] = Field(
        (), description="on training images: crop:4, flip, jitter:0.4, …"
    )
    views: Annotated[tuple[str, ...], _checked(parse_augment)] = Field(
        ("crop:4", "flip"), description="on the views of contrastive losses"
    )
    normalise: Literal["half", "channels"] = Field("half", description="mean and std 0.5, or measured per channel")
    seed: int | None = Field(None, description="of the federation alone; the run's seed if not given")

    @model_validator(mode="after")
    def _possible(self) -> "DataSettings":
        if self.newcomers >= 1 and self.newcomers != int(self.newcomers):
            raise refusal(f"data.newcomers = {self.newcomers:g}: must be a whole number, or a share below 1")
        held_out = self.newcomers if self.newcomers >= 1 else round(self.newcomers * self.clients)
        if held_out >= self.clients and self.partition != "natural":
            raise refusal(
                f"data.newcomers = {self.newcomers:g}: leaves none of data.clients = {self.clients} to train; "
                f"it can be {self.clients - 1} at most"
            )
        return self


def _summary_rule(rule: str) -> str:
    kind, _, count = rule.partition(":")
    if rule == "last" or (kind in ("median", "mean") and count.isdigit() and int(count) > 0):
        return rule
    raise ValueError(f"'{rule}' is no rule: write last, median:10 or mean:10 (of the last ten evaluations)")


class EvaluationSettings(Section):
    """When and on whom to test."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    clients: int | None = Field(None, ge=1, description="evaluate a fixed random sample of so many clients")
    summary: Annotated[str, AfterValidator(_summary_rule)] = Field(
        "last",
        description="a run's figure: last, median:10 or mean:10 of the last evaluations; never the best",
    )
    distance: str | None = Field(
        None, description="a part that clients keep (model.head): also tell how far apart their copies are"
    )


class StorageSettings(Section):
    """What is kept where."""

    memory_mb: int = Field(1024, ge=1, description="RAM for clients' memory; what exceeds it spills to disk")
    personal_models: bool = Field(True, description="write what is personal of every client's model at the end")
    checkpoint_every: int = Field(10, ge=0, description="rounds between checkpoints; 0: only when a run is stopped")
    checkpoint_seconds: float = Field(
        60, ge=0, description="where rounds are long: seconds between checkpoints; 0: by rounds alone"
    )


class Recipe(Section):
    """Everything that determines a run."""

    method: Annotated[MethodSettings, BeforeValidator(_named)] = MethodSettings()
    data: Annotated[DataSettings, BeforeValidator(_named)] = DataSettings()
    model: Annotated[ModelSettings, BeforeValidator(_named)] = ModelSettings()
    objective: Annotated[ObjectiveSettings | None, BeforeValidator(_named)] = Field(
        None, description="labels, simclr, simsiam, byol, moco or barlow; the method's own by default"
    )
    training: Training = Training()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: Annotated[EngineSettings, BeforeValidator(_named)] = EngineSettings()
    storage: StorageSettings = StorageSettings()
    faults: Faults = Faults()
    robust: RobustSettings | None = Field(None, description="a robust rule in the place of the mean")
    attack: AttackSettings | None = Field(None, description="hostile clients, for study")
    privacy: PrivacySettings | None = Field(None, description="client-level differential privacy")
    wire: WireSettings = Field(WireSettings(), description="smaller messages")
    log: Annotated[tuple[Literal["tensorboard", "wandb"], ...], BeforeValidator(_listed)] = Field(
        (), description="where else rounds are written: tensorboard, wandb (extras of these names)"
    )
    seed: int = Field(0, ge=0)
    out: Path | None = Field(None, description="run folder; default: a new one under runs/")

    @model_validator(mode="after")
    def _engine_exists(self) -> "Recipe":
        try:
            engine = engine_class(self.engine)
        except UserError as error:
            raise refusal(str(error)) from None
        if self.engine.device == "cuda" and not engine.gpu:
            able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].gpu))
            raise refusal(
                f"engine.device = 'cuda': the engine '{engine.name}' works on CPUs; engine.name can be {able}"
            )
        if self.engine.client_timeout is not None and not engine.can_stop_clients:
            able = ", ".join(sorted(name for name in ENGINES if ENGINES[name].can_stop_clients))
            raise refusal(
                f"engine.client_timeout = {self.engine.client_timeout:g}: the engine '{engine.name}' cannot stop a "
                f"client that takes too long; engine.name can be {able}"
            )
        return self

    @model_validator(mode="after")
    def _robust_or_private(self) -> "Recipe":
        if self.robust is not None and self.privacy is not None:
            raise refusal(
                f"robust.rule = '{self.robust.rule}': cannot be combined with privacy, whose noise is measured for the "
                "mean of clipped updates; remove one of the sections (privacy.clip bounds what a client can do as well)"
            )
        return self

    @model_validator(mode="after")
    def _attack_or_wire(self) -> "Recipe":
        if self.attack is not None and self.wire.up != "none":
            raise refusal(
                f"wire.up = '{self.wire.up}': cannot be combined with attack, which falsifies what clients send before "
                "it is encoded; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _method_exists(self) -> "Recipe":
        try:
            self.make_method()
        except UserError as error:
            raise refusal(str(error)) from None
        return self

    def make_objective(self) -> objectives.Objective:
        """What the run trains on."""
        if self.objective is None:
            return objectives.get(methods.method_class(self.method.name).objective)
        return self.objective.make()

    def make_method(self) -> methods.Method:
        """The method; without labels, linear probes are added so that it can be judged."""
        name, objective = self.method.name, self.make_objective()
        found = methods.method_class(name)
        if ("labels" if objective.supervised else "views") not in found.learns_from:
            able = [o for o, kind in objectives.OBJECTIVES.items() if kind.supervised != objective.supervised]
            raise UserError(
                f"objective.name = '{objective.name}': {found.name} cannot be trained on it; "
                f"{nearest(objective.name, able)}"
            )
        if not objective.supervised and not issubclass(found, methods.Probed):
            name += "+probe"
        return methods.get(name, **self.method.parameters)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Recipe":
        """Checks; a mistake becomes one sentence that names the field, the value and the nearest valid choice."""
        return checked(
            cls, {name: {} if value is None and name in _SECTIONS else value for name, value in values.items()}
        )

    @classmethod
    def load(cls, source: str | Path) -> "Recipe":
        """From a YAML file, or by the name of one that is shipped (`demo`)."""
        return cls.parse(read_yaml(source))

    def with_(self, *assignments: str, **values: Any) -> "Recipe":
        """A changed copy: `with_("training.rounds=5", "method.mu=0.1")`, or `with_(seed=1)`."""
        changed = self.model_dump(mode="json", exclude_unset=True)
        for path, value in [*map(read_assignment, assignments), *values.items()]:
            assign(changed, path, value)
        return Recipe.parse(changed)

    def resolved(self) -> dict[str, Any]:
        """Every field, defaults and the method's hyperparameters included."""
        values = self.model_dump(mode="json")
        method, objective = self.make_method(), self.make_objective()
        name = objective.name if self.objective is None else self.objective.name
        values["objective"] = {"name": name} | asdict(objective)
        values["method"] |= {name: getattr(method, name) for name in methods.hyperparameters(type(method))}
        for section in ("method", "model", "objective"):
            values[section]["name"] = plugins.absolute(values[section]["name"])
        values["data"]["name"] = "+".join(map(plugins.absolute, parts(self.data.name)))
        return values

    @property
    def label(self) -> str:
        """Names the run's folder."""
        return f"{self.make_method().name}-{Path(short(self.data.name)).stem}-s{self.seed}"

    def to_yaml(self) -> str:
        """The whole resolved recipe."""
        return str(yaml.safe_dump(_plain(self.resolved()), sort_keys=False, allow_unicode=True, width=100))


_SECTIONS = tuple(name for name, field in Recipe.model_fields.items() if isinstance(field.default, BaseModel))


def _plain(value: Any) -> Any:
    """What YAML can write."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
