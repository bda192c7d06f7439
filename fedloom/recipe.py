"""The recipe: the validated description of an experiment. YAML ⇄ pydantic; nothing runs before it is whole."""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from fedloom import methods, models
from fedloom.data import parse_partition
from fedloom.data.augment import parse_augment
from fedloom.data.federation import parse_split
from fedloom.engines import ENGINES, EngineSettings
from fedloom.errors import UserError, nearest
from fedloom.training import Training


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _checked(parse: Any) -> AfterValidator:
    """Keeps the written form, once it has been read without complaint."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


class MethodSettings(BaseModel):
    """A method's name (`fedprox`, `fedavg+ft`) and its hyperparameters beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "fedavg"

    @model_validator(mode="after")
    def _exists(self) -> "MethodSettings":
        methods.get(self.name, **self.parameters)
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """What was set."""
        return dict(self.model_extra or {})

    def make(self) -> methods.Method:
        """The method."""
        return methods.get(self.name, **self.parameters)


class ModelSettings(BaseModel):
    """A network's name and its options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "mlp"

    @model_validator(mode="after")
    def _exists(self) -> "ModelSettings":
        models.check(self.name, self.options)
        return self

    @property
    def options(self) -> dict[str, Any]:
        """What was set."""
        return dict(self.model_extra or {})


class DataSettings(Section):
    """Which images, who holds which of them, and what is done to them on the way into a network."""

    name: str = Field("digits", description="a dataset (see `fedloom datasets`), `a+b` for styles, a folder or .npz")
    dir: Path | None = Field(None, description="data folder; else $FEDLOOM_DATA, else the user's cache")
    size: int | None = Field(None, ge=4, description="resize images to size × size")
    limit: int | None = Field(None, ge=1, description="at most this many training and test images (of each style)")
    clients: int = Field(20, ge=1, description="how many clients (`natural` takes one per folder)")
    partition: Annotated[str, _checked(parse_partition)] = Field(
        "dirichlet:0.1",
        description="iid, dirichlet:α, equal-dirichlet:α, pathological:k, shards:k, quantity:α, …",
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
        held_out = self.newcomers if self.newcomers >= 1 else self.newcomers * self.clients
        if held_out >= self.clients and self.partition != "natural":
            raise UserError(
                f"data.newcomers = {self.newcomers:g} leaves none of data.clients = {self.clients} to train: lower it"
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


class StorageSettings(Section):
    """What is kept where."""

    memory_mb: int = Field(1024, ge=1, description="RAM for clients' memory; what exceeds it spills to disk")
    personal_models: bool = Field(True, description="write what is personal of every client's model at the end")


class Recipe(Section):
    """Everything that determines a run."""

    method: Annotated[MethodSettings, BeforeValidator(_named)] = MethodSettings()
    data: Annotated[DataSettings, BeforeValidator(_named)] = DataSettings()
    model: Annotated[ModelSettings, BeforeValidator(_named)] = ModelSettings()
    training: Training = Training()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: Annotated[EngineSettings, BeforeValidator(_named)] = EngineSettings()
    storage: StorageSettings = StorageSettings()
    seed: int = Field(0, ge=0)
    out: Path | None = Field(None, description="run folder; default: a new one under runs/")

    @model_validator(mode="after")
    def _engine_exists(self) -> "Recipe":
        if self.engine.name not in ENGINES:
            raise UserError(f"engine.name = '{self.engine.name}' is unknown: {nearest(self.engine.name, ENGINES)}")
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Recipe":
        """Checks; a mistake becomes one sentence that names the field, the value and the nearest valid choice."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError("\n".join(_sentence(e) for e in error.errors())) from None

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
        method = self.method.make()
        values["method"] |= {name: getattr(method, name) for name in methods.hyperparameters(type(method))}
        return values

    def to_yaml(self) -> str:
        """The whole resolved recipe."""
        return str(yaml.safe_dump(_plain(self.resolved()), sort_keys=False, allow_unicode=True, width=100))


def read_yaml(source: str | Path) -> dict[str, Any]:
    """A recipe's raw values."""
    path = Path(source)
    shipped = files("fedloom") / "recipes" / f"{source}.yaml"
    if not path.exists() and shipped.is_file():
        text = shipped.read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            names = sorted(p.name.removesuffix(".yaml") for p in (files("fedloom") / "recipes").iterdir())
            raise UserError(f"recipe '{source}' cannot be read: {reason}; shipped: {', '.join(names)}") from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"recipe '{source}' is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe '{source}' must be a mapping of sections, not {type(values).__name__}")
    return values


def read_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` → the path and the value, read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UserError(f"--set {text}: write field=value, for example --set training.rounds=5")
    return path.strip(), yaml.safe_load(value)


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets `a.b.c` in nested mappings."""
    *sections, last = path.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if isinstance(inner, str):  # the short form, `method: fedavg`
            inner = values[section] = {"name": inner}
        if not isinstance(inner, dict):
            raise UserError(f"{path}: '{section}' has no fields of its own")
        values = inner
    values[last] = value


def _sentence(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        choices = nearest(error["loc"][-1], _siblings(error["loc"]))
        return f"{field} = {error['input']!r}: there is no such field; {choices}"
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        message = str(cause)
        return message if message.startswith(f"{field}") or " = " in message else f"{field}: {message}"
    return f"{field} = {error['input']!r}: {error['msg']}"


def _siblings(path: Iterable[Any]) -> list[str]:
    section: Any = Recipe
    *parents, _ = path
    for name in parents:
        section = section.model_fields[name].annotation
    return list(section.model_fields)


def _plain(value: Any) -> Any:
    """What YAML can write."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
