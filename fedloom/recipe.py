"""The recipe: the validated description of an experiment. YAML ⇄ pydantic; nothing runs before it is whole."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

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
from pydantic_core import PydanticCustomError

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
        try:
            parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


def _refusal(sentence: str) -> PydanticCustomError:
    """A complaint that names its field itself; pydantic collects it with the others."""
    return PydanticCustomError("refusal", "{sentence}", {"sentence": sentence})


class MethodSettings(BaseModel):
    """A method's name (`fedprox`, `fedavg+ft`) and its hyperparameters beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = "fedavg"

    @model_validator(mode="after")
    def _exists(self) -> "MethodSettings":
        try:
            methods.get(self.name, **self.parameters)
        except UserError as error:
            raise _refusal(str(error)) from None
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
        self._check("name", self.name, {})
        for option, value in self.options.items():
            self._check(option, value, {option: value})
        return self

    def _check(self, field: str, value: Any, options: dict[str, Any]) -> None:
        try:
            models.check(self.name, options)
        except UserError as error:
            problem = str(error).removeprefix(f"model '{value}' ")
            raise _refusal(f"model.{field} = {value!r}: {problem}") from None

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
        if self.newcomers >= 1 and self.newcomers != int(self.newcomers):
            raise _refusal(f"data.newcomers = {self.newcomers:g}: must be a whole number, or a share below 1")
        held_out = self.newcomers if self.newcomers >= 1 else round(self.newcomers * self.clients)
        if held_out >= self.clients and self.partition != "natural":
            raise _refusal(
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
        name = self.engine.name
        if name not in ENGINES:
            raise _refusal(f"engine.name = '{name}' is unknown: {nearest(name, ENGINES)}")
        if self.engine.device == "cuda" and not ENGINES[name].gpu:
            able = ", ".join(sorted(engine for engine in ENGINES if ENGINES[engine].gpu))
            raise _refusal(f"engine.device = 'cuda': the engine '{name}' works on CPUs; engine.name can be {able}")
        return self

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
        method = self.method.make()
        values["method"] |= {name: getattr(method, name) for name in methods.hyperparameters(type(method))}
        return values

    def to_yaml(self) -> str:
        """The whole resolved recipe."""
        return str(yaml.safe_dump(_plain(self.resolved()), sort_keys=False, allow_unicode=True, width=100))


_SECTIONS = tuple(name for name, field in Recipe.model_fields.items() if isinstance(field.default, BaseModel))

Checked = TypeVar("Checked", bound=BaseModel)


def checked(kind: type[Checked], values: Any, path: str = "") -> Checked:
    """The values as this part of a recipe, or all that is wrong with them, a sentence each."""
    try:
        section = kind.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_sentence(kind, e, path) for e in error.errors())) from None
    if misread := list(_misread(values, section, path)):
        raise UserError("\n".join(misread))
    return section


def shipped() -> dict[str, Traversable]:
    """Recipes that come with the package, by name (`demo`; in a folder, `folder/name`)."""
    return dict(sorted(_recipes(files("fedloom") / "recipes", "")))


def _recipes(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            yield from _recipes(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml"), entry


def read_yaml(source: str | Path) -> dict[str, Any]:
    """A recipe's raw values."""
    path: Path | Traversable = Path(source)
    known = shipped()
    if str(source) in known and not Path(source).is_file():
        path = known[str(source)]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"recipe '{source}' cannot be read: {reason}; shipped: {nearest(source, known)}") from None
    try:
        values = _load(text)
    except yaml.YAMLError as error:
        raise UserError(f"recipe '{source}' is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe '{source}' must be a mapping of sections, not {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number it is; PyYAML asks for 1.0e-3."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def read_assignment(text: str) -> tuple[str, Any]:
    """`a.b=c` → the path and the value, read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise UserError(f"--set {text}: write field=value, for example --set training.rounds=5")
    try:
        return path.strip(), _load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UserError(f"--set {text}: the value is not YAML ({problem}); write it as in a recipe") from None


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets `a.b.c` in nested mappings."""
    *sections, last = path.split(".")
    for depth, section in enumerate(sections, 1):
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        elif isinstance(inner, str):  # the short form, `method: fedavg`
            inner = values[section] = {"name": inner}
        if not isinstance(inner, dict):
            raise UserError(f"{path} = {value!r}: '{'.'.join(sections[:depth])}' is {inner!r}, which has no fields")
        values = inner
    values[last] = value


def _sentence(kind: type[BaseModel], error: Any, path: str) -> str:
    """What pydantic found, in our words: field, value, remedy."""
    if error["type"] == "refusal":
        return str(error["msg"])
    field = ".".join(str(part) for part in (path, *error["loc"]) if part != "")
    if error["type"] in ("extra_forbidden", "invalid_key"):
        if error["loc"] == ("compare",):
            return "compare: this recipe describes a comparison of methods; run it with `fedloom compare`"
        value = "" if error["type"] == "invalid_key" else f" = {error['input']!r}"
        return f"{field}{value}: there is no such field; {nearest(error['loc'][-1], _fields(kind, error['loc'][:-1]))}"
    cause = error.get("ctx", {}).get("error")
    if cause is None:
        return f"{field} = {error['input']!r}: {_remedy(kind, error)}"
    message = str(cause).removeprefix(f"{error['loc'][-1]} '{error['input']}': ")
    return f"{field}: {message}" if f"'{error['input']}'" in message else f"{field} = {error['input']!r}: {message}"


_BOUNDS = {"greater_than_equal": "at least {ge:g}", "greater_than": "above {gt:g}",
           "less_than_equal": "at most {le:g}", "less_than": "below {lt:g}"}  # fmt: skip
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "path": "a path",
          "tuple": "a list, such as [a, b]"}  # fmt: skip


def _remedy(kind: type[BaseModel], error: Any) -> str:
    """What a value should have been, by pydantic's name of the error."""
    what, context = error["type"], error.get("ctx", {})
    if what in _BOUNDS:
        return f"must be {_BOUNDS[what].format(**context)}"
    if what == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        return f"is unknown; {nearest(error['input'], choices)}"
    if what == "model_type":
        fields = _fields(kind, error["loc"])
        return f"must be {'a name or ' if 'name' in fields else ''}a section with the fields {', '.join(fields)}"
    if what in ("too_short", "too_long"):
        return f"must have {context.get('min_length', context.get('max_length'))} entries"
    word = _KINDS.get(what.split("_")[0])
    return f"must be {word}" if word else str(error["msg"])


def _misread(values: Any, section: Any, path: str) -> Iterator[str]:
    """Values that pydantic takes and nobody means: true as the number 1, infinity, not a number."""
    for name, value in values.items() if isinstance(values, Mapping) else ():
        field, read = f"{path}.{name}".lstrip("."), getattr(section, str(name), None)
        if isinstance(value, Mapping):
            yield from _misread(value, read, field)
        elif isinstance(value, bool) and not isinstance(read, bool):
            yield f"{field} = {value!r}: must be a number, not a switch"
        elif isinstance(read, float) and not math.isfinite(read):
            yield f"{field} = {value!r}: must be a finite number"


def _fields(kind: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Names of the fields of a section."""
    section: Any = kind
    for name in path:
        section = section.model_fields[name].annotation
    return list(section.model_fields)


def _plain(value: Any) -> Any:
    """What YAML can write."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
