"""Recipes: validated descriptions of experiments, read from YAML into pydantic models and written back."""

from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from fedloom import methods, objectives
from fedloom.config.loading import ELSEWHERE, SHORT, assign, read_assignment, read_yaml, section_name
from fedloom.config.sections import EvaluationSettings, StorageSettings
from fedloom.core import trusted_code
from fedloom.core.checking import Named, Section, checked, expand_name, refusal
from fedloom.core.compression import WireSettings
from fedloom.core.errors import UserError, nearest, shown
from fedloom.core.method import METHODS
from fedloom.core.options import hyperparameters
from fedloom.core.registry import absolute, short
from fedloom.core.training import Training
from fedloom.data import parts
from fedloom.data.settings import DataSettings
from fedloom.engines import EngineSettings, engine_class
from fedloom.models.settings import Model, ModelSettings
from fedloom.trust.attack import AttackSettings
from fedloom.trust.faults import Faults
from fedloom.trust.privacy import PrivacySettings
from fedloom.trust.robust import RobustSettings
from fedloom.trust.secure.settings import SecureSettings


class Recipe(Section):
    """The validated description of an experiment; immutable.

    A section that has a name may be written as the name alone: `method: fedavg` means `method: {name: fedavg}`.

    Example:
        >>> recipe = fedloom.Recipe.load("fedcrc/setting").with_("method.name=fedprox", "method.mu=0.1", seed=1)
        >>> recipe.method.name, recipe.seed
        ('fedprox', 1)
    """

    method: Annotated[Named, BeforeValidator(expand_name("fedavg"))] = Field(
        Named(name="fedavg"), description="the federated method, and its hyperparameters"
    )
    data: Annotated[DataSettings, BeforeValidator(expand_name())] = Field(
        DataSettings(), description="the dataset, and how it is divided among clients"
    )
    model: Model = Field(
        ModelSettings(name="mlp"), description="the network, and its options; or a list of networks, dealt to clients"
    )
    objective: Annotated[Named | None, BeforeValidator(expand_name("labels"))] = Field(
        None,
        description="the training objective (labels, binary, multilabel, simclr, simsiam, byol, moco or barlow), and "
        "its options; default: the method's objective",
    )
    training: Training = Field(Training(), description="rounds, participation, local epochs and the optimizer")
    evaluation: EvaluationSettings = Field(
        EvaluationSettings(), description="when models are tested, on which clients, and which figures are reported"
    )
    engine: Annotated[EngineSettings, BeforeValidator(expand_name())] = Field(
        EngineSettings(), description="where clients run: in this process, worker processes, GPU lanes or Ray"
    )
    storage: StorageSettings = Field(
        StorageSettings(), description="RAM for clients' memory, saved models and checkpoints"
    )
    faults: Faults = Field(Faults(), description="probabilities of injected client failures, for studies")
    robust: RobustSettings | None = Field(
        None, description="a robust aggregation rule that replaces the weighted mean; default: none"
    )
    attack: AttackSettings | None = Field(None, description="simulated hostile clients, for studies; default: none")
    privacy: PrivacySettings | None = Field(None, description="client-level differential privacy; default: none")
    secure: SecureSettings | None = Field(
        None, description="secure aggregation: the server gets only the sum of clients' messages; default: none"
    )
    wire: WireSettings = Field(WireSettings(), description="compression of messages to the server and to clients")
    log: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...],
        BeforeValidator(lambda names: names.split(",") if isinstance(names, str) else names),
    ] = Field((), description="experiment trackers: tensorboard, wandb, mlflow (each needs the extra of the same name)")
    seed: int = Field(0, ge=0, description="seed of every random draw")
    out: Path | None = Field(None, description="run folder; default: a new folder under runs/")

    @model_validator(mode="after")
    def _sections_go_together(self) -> "Recipe":
        if self.robust is not None and self.privacy is not None:
            raise refusal(
                f"robust.rule = '{self.robust.rule}': cannot be combined with privacy, whose noise is calibrated for "
                "the mean of clipped updates; remove one of the sections (privacy.clip also bounds each client's "
                "influence)"
            )
        if self.secure is not None and self.robust is not None:
            raise refusal(
                f"robust.rule = '{self.robust.rule}': cannot be combined with secure, because a robust rule compares "
                "single messages and secure aggregation reveals only their sum; remove one of the sections"
            )
        if self.secure is not None and self.wire.up != "none":
            raise refusal(
                f"wire.up = '{self.wire.up}': cannot be combined with secure, because compressed messages cannot be "
                "added up under masks; remove it (secure.bits = 32 sends as many bytes as float32)"
            )
        if self.secure is not None and self.privacy is not None and self.privacy.sampling == "poisson":
            raise refusal(
                "privacy.sampling = 'poisson': cannot be combined with secure, because a sample can have fewer than "
                "three clients, whose sum clients refuse to unmask; use fixed"
            )
        if self.attack is not None and self.attack.falsifies_messages and self.wire != WireSettings():
            encoded = f"wire.up = '{self.wire.up}'" if self.wire.up != "none" else f"wire.down = '{self.wire.down}'"
            raise refusal(
                f"{encoded}: cannot be combined with attack, which falsifies uncompressed messages; remove one of them"
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
        """Create the training objective.

        Returns:
            The recipe's objective, or the method's default if the recipe names none.

        Raises:
            UserError: The objective or one of its options is unknown.
        """
        if self.objective is None:
            return objectives.get(methods.method_class(self.method.name).objective)
        return objectives.get(self.objective.name, **self.objective.options)

    def make_method(self) -> methods.Method:
        """Create the method, with linear probes for evaluation if the objective uses no labels.

        Raises:
            UserError: The method or one of its hyperparameters is unknown, or it cannot be trained on the objective.
        """
        name, objective = self.method.name, self.make_objective()
        found = methods.method_class(name)
        if objective.kind() not in found.learns_from:
            able = [o for o, kind in objectives.OBJECTIVES.items() if kind.kind() in found.learns_from]
            why = ", because it needs one class per sample" if objective.multilabel else ""
            raise UserError(
                f"objective.name = '{objective.name}': the method {found.name} cannot be trained on it{why}; "
                f"{nearest(objective.name, able)}"
            )
        if not objective.supervised and not issubclass(found, methods.Probed):
            name += "+probe"
        return methods.get(name, **self.method.options)

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, trust_code: bool = False) -> "Recipe":
        """Validate a recipe's values.

        The values may come from an untrusted source. Importing a Python file runs it, so a file that the values name
        (`method.name: mine.py:Mine`) is refused unless the user has named it or `trust_code` is set.

        Args:
            values: Sections and fields, as read from YAML.
            trust_code: Allow the Python files that the values name to be imported.

        Returns:
            The validated recipe.

        Raises:
            UserError: Values are invalid. There is one line per mistake, with the field, the value and the remedy.

        Example:
            >>> fedloom.Recipe.parse({"method": "fedprox", "training": {"rounds": 5}}).training.rounds
            5
        """
        if trust_code:
            trusted_code.trust(values)
        _refuse_misplaced(values)
        return checked(
            cls, {name: {} if value is None and name in _SECTIONS else value for name, value in values.items()}
        )

    @classmethod
    def load(cls, source: str | Path, *, trust_code: bool = False) -> "Recipe":
        """Read and validate a recipe file.

        Args:
            source: Path of a YAML file, or the name of a shipped recipe (`fedcrc/setting`).
            trust_code: Allow the Python files that the recipe names to be imported, see `parse`.

        Returns:
            The validated recipe.

        Raises:
            UserError: The file cannot be read, is not YAML, or has invalid values. A recipe with a `compare` or
                `sweep` section describes several runs: pass it to `fedloom.compare` or `fedloom.sweep`.

        Example:
            >>> fedloom.Recipe.load("fedcrc/setting").data.name
            'cifar10'
        """
        return cls.parse(read_yaml(source), trust_code=trust_code)

    def with_(self, *assignments: str, **values: Any) -> "Recipe":
        """Return a copy with changed fields.

        Args:
            *assignments: Fields by path, as `path=value`; the value is parsed as YAML.
            **values: Fields by name, or by path if passed as `**{"training.rounds": 5}`.

        Returns:
            The changed copy, validated.

        Raises:
            UserError: An assignment cannot be parsed, or a value is invalid.

        Example:
            >>> recipe = fedloom.Recipe().with_("training.rounds=5", seed=1)
            >>> recipe.training.rounds, recipe.seed
            (5, 1)
        """
        changes = dict(map(read_assignment, assignments)) | values
        trusted_code.allow_fields(changes)
        changed = self.model_dump(mode="json", exclude_unset=True)
        for path, value in changes.items():
            assign(changed, path, value)
        return Recipe.parse(changed)

    def resolved(self) -> dict[str, Any]:
        """Return the values of all fields, including defaults and the method's hyperparameters.

        Paths of Python files are absolute, so that the result does not depend on the current folder.
        """
        values = self.model_dump(mode="json")
        method, objective = self.make_method(), self.make_objective()
        name = objective.name if self.objective is None else self.objective.name
        values["objective"] = {"name": name} | asdict(objective)
        values["method"] |= {name: getattr(method, name) for name in hyperparameters(type(method))}
        for section in ("method", "objective", "engine"):
            values[section]["name"] = absolute(values[section]["name"])
        several = values["model"]["networks"] or list(values["model"]["by_client"].values())
        for network in (values["model"], *several):
            network["name"] = absolute(network["name"])
            if network["weights"]:
                network["weights"] = str(Path(network["weights"]).expanduser().resolve())
        values["data"]["partition"] = absolute(self.data.partition)
        values["data"]["name"] = "+".join(map(absolute, parts(self.data.name)))
        return values

    @property
    def label(self) -> str:
        """Name for the run's folder: method, data and seed, such as `fedavg-digits-s0`."""
        return f"{self.make_method().name}-{Path(short(self.data.name)).stem}-s{self.seed}"

    def to_yaml(self) -> str:
        """Return `resolved` as YAML; `fedloom run` on this text repeats the run."""
        return str(yaml.safe_dump(_plain(self.resolved()), sort_keys=False, allow_unicode=True, width=100))


_SECTIONS = tuple(name for name, field in Recipe.model_fields.items() if isinstance(field.default, BaseModel))


def _plain(value: Any) -> Any:
    """Convert tuples to lists and paths to strings, recursively, so that YAML can represent them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _refuse_misplaced(values: Mapping[str, Any]) -> None:
    """Raise a UserError for a field that belongs to another place: `mu` for `method.mu`, `training.lr`, `batchsize`."""
    found = {name: value for name, value in values.items() if name not in Recipe.model_fields}
    for section in _CLOSED:
        inner = values.get(section)
        fields = type(Recipe.model_fields[section].default).model_fields
        strays = {name: value for name, value in inner.items() if name not in fields} if isinstance(inner, dict) else {}
        found |= {f"{section}.{name}": value for name, value in strays.items()}
    for field, value in found.items():
        name = str(field).rpartition(".")[2]
        known = sorted(SHORT.keys() - Recipe.model_fields.keys())
        similar = get_close_matches(name, known, 1, 0.75) if field == name else []
        if name in ELSEWHERE:
            similar = [ELSEWHERE[name]]
        if (path := _place_of(name, values) or next((SHORT[one] for one in similar), None)) is not None:
            python = f" In Python: {ELSEWHERE[name]}=…" if SHORT.get(ELSEWHERE.get(name, "")) == path else ""
            raise UserError(f"{field} = {shown(value)}: there is no such field; did you mean '{path}'?{python}")


_CLOSED = ("data", "training", "evaluation", "engine", "storage")
"""Sections whose fields are all known here: others have options of methods, networks or objectives."""


def _place_of(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the path of the field that has this name in a section or among the method's hyperparameters."""
    for section in _SECTIONS:
        if name != "name" and (path := _path_in(Recipe.model_fields[section].default, name)) is not None:
            return f"{section}.{path}"
    method = section_name(values.get("method", Recipe.model_fields["method"].default.name))
    try:
        known = methods.hyperparameters(methods.method_class(method)) if isinstance(method, str) else {}
    except UserError:  # validation reports the unknown method
        return None
    return f"method.{name}" if name in known else None


def path_of_field(name: str) -> str | None:
    """Return the path of the field that has this name in a section: `momentum` → `training.optimizer.momentum`."""
    return SHORT.get(name) or _place_of(name, {})


def methods_with(option: str) -> list[str]:
    """Return the shipped methods that have this option: `mu` → [`fedprox`, …]."""
    return [name for name in METHODS.names() if METHODS.is_shipped(name) and option in hyperparameters(METHODS[name])]


def _path_in(section: BaseModel, name: str) -> str | None:
    """Return the path of a field in a section or a section inside it."""
    fields = type(section).model_fields
    if name in fields:
        return name
    inner = ((one, field.default) for one, field in fields.items() if isinstance(field.default, BaseModel))
    return next((f"{one}.{path}" for one, default in inner if (path := _path_in(default, name)) is not None), None)
