"""The recipe: the validated description of an experiment. YAML ⇄ pydantic; nothing runs before it is whole."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedloom import methods, models, objectives
from fedloom.config.loading import assign, read_assignment, read_yaml
from fedloom.core import trusted_code
from fedloom.core.checking import Section, checked, refusal
from fedloom.core.compression import WireSettings
from fedloom.core.errors import UserError, nearest
from fedloom.core.optimizers import Training
from fedloom.core.options import hyperparameters
from fedloom.core.registry import absolute, short
from fedloom.data import parts
from fedloom.data.settings import DataSettings
from fedloom.engines import EngineSettings, engine_class
from fedloom.trust.attack import AttackSettings
from fedloom.trust.faults import Faults
from fedloom.trust.privacy import PrivacySettings
from fedloom.trust.robust import RobustSettings


def _named(default: str | None = None) -> Callable[[Any], Any]:
    """Reads the short form of a section, its name alone; a section without a name gets the default."""

    def read(value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        return {"name": default} | dict(value) if default and isinstance(value, Mapping) else value

    return read


class Named(BaseModel):
    """A name and, beside it, options of what it names: `{name: fedprox, mu: 0.1}`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """What was set."""
        return dict(self.model_extra or {})


def _model_exists(model: Named) -> Named:
    try:
        models.check(model.name, model.options)
    except UserError as error:
        raise refusal(str(error)) from None
    return model


def _summary_rule(rule: str) -> str:
    kind, _, count = rule.partition(":")
    if rule == "last" or (kind in ("median", "mean") and count.isdigit() and int(count) > 0):
        return rule
    raise ValueError(f"'{rule}' is no rule: write last, median:10 or mean:10 (of the last ten evaluations)")


class EvaluationSettings(Section):
    """When and on whom to test."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    clients: int | None = Field(
        None, ge=1, description="number of clients to evaluate, a fixed random sample; default: all"
    )
    summary: Annotated[str, AfterValidator(_summary_rule)] = Field(
        "last", description="a run's figure: last, median:10 or mean:10 of the last evaluations; never the best"
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

    method: Annotated[Named, BeforeValidator(_named("fedavg"))] = Named(name="fedavg")
    data: Annotated[DataSettings, BeforeValidator(_named())] = DataSettings()
    model: Annotated[Named, BeforeValidator(_named("mlp")), AfterValidator(_model_exists)] = Named(name="mlp")
    objective: Annotated[Named | None, BeforeValidator(_named("labels"))] = Field(
        None, description="labels, simclr, simsiam, byol, moco or barlow; the method's own by default"
    )
    training: Training = Training()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: Annotated[EngineSettings, BeforeValidator(_named())] = EngineSettings()
    storage: StorageSettings = StorageSettings()
    faults: Faults = Faults()
    robust: RobustSettings | None = Field(None, description="a robust rule in the place of the mean")
    attack: AttackSettings | None = Field(None, description="hostile clients, for study")
    privacy: PrivacySettings | None = Field(None, description="client-level differential privacy")
    wire: WireSettings = Field(WireSettings(), description="smaller messages")
    log: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...],
        BeforeValidator(lambda names: names.split(",") if isinstance(names, str) else names),
    ] = Field((), description="where else rounds are written: tensorboard, wandb (extras of these names)")
    seed: int = Field(0, ge=0)
    out: Path | None = Field(None, description="run folder; default: a new one under runs/")

    @model_validator(mode="after")
    def _sections_go_together(self) -> "Recipe":
        if self.robust is not None and self.privacy is not None:
            raise refusal(
                f"robust.rule = '{self.robust.rule}': cannot be combined with privacy, whose noise is measured for the "
                "mean of clipped updates; remove one of the sections (privacy.clip bounds what a client can do as well)"
            )
        if self.attack is not None and self.wire != WireSettings():
            encoded = f"wire.up = '{self.wire.up}'" if self.wire.up != "none" else f"wire.down = '{self.wire.down}'"
            raise refusal(
                f"{encoded}: cannot be combined with attack, which falsifies plain messages; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _engine_and_method_exist(self) -> "Recipe":
        try:
            engine_class(self.engine)
            self.make_method()
        except UserError as error:
            raise refusal(str(error)) from None
        return self

    def make_objective(self) -> objectives.Objective:
        """What the run trains on."""
        if self.objective is None:
            return objectives.get(methods.method_class(self.method.name).objective)
        return objectives.get(self.objective.name, **self.objective.options)

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
        return methods.get(name, **self.method.options)

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, trust_code: bool = False) -> "Recipe":
        """Checks; a mistake becomes one sentence that names the field, the value and the nearest valid choice.

        The values may be a stranger's: a Python file that they name is refused unless the user has named it or
        `trust_code` is set, since to import it is to run it.
        """
        if trust_code:
            trusted_code.trust(values)
        return checked(
            cls, {name: {} if value is None and name in _SECTIONS else value for name, value in values.items()}
        )

    @classmethod
    def load(cls, source: str | Path, *, trust_code: bool = False) -> "Recipe":
        """From a YAML file, or by the name of one that is shipped (`demo`). Files that it names: as in `parse`."""
        return cls.parse(read_yaml(source), trust_code=trust_code)

    def with_(self, *assignments: str, **values: Any) -> "Recipe":
        """A changed copy: `with_("training.rounds=5", "method.mu=0.1")`, or `with_(seed=1)`."""
        changes = dict(map(read_assignment, assignments)) | values
        trusted_code.allow_fields(changes)
        changed = self.model_dump(mode="json", exclude_unset=True)
        for path, value in changes.items():
            assign(changed, path, value)
        return Recipe.parse(changed)

    def resolved(self) -> dict[str, Any]:
        """Every field, defaults and the method's hyperparameters included."""
        values = self.model_dump(mode="json")
        method, objective = self.make_method(), self.make_objective()
        name = objective.name if self.objective is None else self.objective.name
        values["objective"] = {"name": name} | asdict(objective)
        values["method"] |= {name: getattr(method, name) for name in hyperparameters(type(method))}
        for section in ("method", "model", "objective", "engine"):
            values[section]["name"] = absolute(values[section]["name"])
        values["data"]["partition"] = absolute(self.data.partition)
        values["data"]["name"] = "+".join(map(absolute, parts(self.data.name)))
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
