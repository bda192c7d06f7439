"""Tables as data: a setting, columns, rows of methods and published figures; each cell is a recipe.

The files are `fedloom/studies/recipes/<paper>/<table>.yaml`. The file `setting.yaml` in the same folder is the recipe
that all tables of the paper have in common. Leaderboards are tables, too; a board of one's own is a single file.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.config.loading import assign, flat, is_free, parse_yaml, read_assignment, read_yaml, section_name
from fedloom.core.checking import checked
from fedloom.core.errors import UserError, nearest
from fedloom.studies.schema import BEST, NO_CELL, Axis, Column, Figure, Row, Table

if TYPE_CHECKING:
    from fedloom.config.recipe import Recipe

PAPERS = ("fedintr", "fedcrc", "fedcrl", "repper", "fedstyle")
"""The papers in the order in which they are run: the cheapest first."""
BOARDS = ("pfllib", "digits")
"""Leaderboards, which `fedloom board` shows."""
RUNS = Path("runs") / "reproduce"
"""Folder of run folders, with a folder for each paper."""

SUFFIX = ".yaml"


@dataclass(frozen=True, eq=False)
class Cell:
    """One figure of a table: its position, its recipe, the metric and the paper's figure in percent."""

    table: str
    column: Column
    row: str
    name: str
    values: Mapping[str, Any]
    """The recipe before validation."""
    measure: str
    printed: float | None
    """The paper's figure; None if the paper prints none."""
    first: bool
    ours: bool
    """Whether the setting differs from the paper's."""
    start: Mapping[str, Any] | None = None
    """The recipe of the run whose final model is the initial model (`Table.pretrain`); it has seed 0."""

    @property
    def paper(self) -> str:
        """The paper's name, such as `fedintr`."""
        return study_of(self.table)

    @property
    def place(self) -> str:
        """The column's name, such as `cifar10-beta0.5`."""
        return place(self.column)

    @property
    def title(self) -> str:
        """The column's values for people: `cifar10, beta = 0.5`."""
        return ", ".join(v if isinstance(v, str) else f"{axis} = {v:g}" for axis, v in self.column.at.items())

    @cached_property
    def key(self) -> str:
        """Key of the recipe; cells with the same key are figures of the same run, also across tables."""
        return recipe_key(self.values)

    @property
    def rounds(self) -> int:
        """Number of rounds of the cell's run."""
        return int(self.values["training"]["rounds"])

    def changed(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the recipe's values with fields changed by path; a step schedule is scaled to the rounds."""
        values = deepcopy(dict(self.values))
        for path, value in changes.items():
            assign(values, path, deepcopy(value))
        training = values["training"]
        if "training.schedule" not in changes and "schedule" in training:
            training["schedule"] = _scaled(training["schedule"], training["rounds"] / self.rounds)
        return values

    def recipe(self, changes: Mapping[str, Any] | None = None) -> "Recipe":
        """Return the validated recipe, with fields changed by path."""
        from fedloom.config.recipe import Recipe  # imports torch, which listing tables does not need

        return Recipe.parse(self.changed(changes or {}))


def place(column: Column) -> str:
    """Return a column's name: strings as they are, numbers with the name of their axis."""
    return "-".join(v if isinstance(v, str) else f"{axis}{v:g}" for axis, v in column.at.items())


def recipe_key(values: Mapping[str, Any]) -> str:
    """Return a hash of the given values, without the seed and fields about output and speed.

    Only fields that were set are hashed, so that fields added to fedloom later do not change the key.
    """
    settings = {path: value for path, value in sorted(flat(values)) if not is_free(path) and path != "seed"}
    return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def final_model(paper: str, start: Mapping[str, Any]) -> Path:
    """Return the file of the model that cells start from. Its path has the key of the pre-training's recipe."""
    return RUNS / paper / run_name(start, 0) / "models" / "server.safetensors"


def run_name(values: Mapping[str, Any], seed: int) -> str:
    """Return a readable name of a run, unique for each recipe and seed."""
    return f"{values['data']['name']}-{values['method']['name']}-{recipe_key(values)}-s{seed}".replace("/", "-")


def _scaled(schedule: str, factor: float) -> str:
    """Scale a step schedule to the rounds: at a tenth of the rounds, `step:50=0.2` becomes `step:5=0.2`."""
    kind, _, rest = schedule.partition(":")
    if kind != "step" or factor == 1:
        return schedule
    pairs = (pair.split("=") for pair in rest.split(","))
    return "step:" + ",".join(f"{max(1, round(int(start) * factor))}={value}" for start, value in pairs)


def study_of(table: str) -> str:
    """Return the paper or board that a table belongs to; for a file, its name without `.yaml`."""
    return Path(table).stem if table.endswith(SUFFIX) else table.partition("/")[0]


def table_names(studies: Sequence[str] = PAPERS) -> list[str]:
    """Return the names of all tables of some papers (`fedintr/table1`, …), with a paper's figures after its tables."""
    in_order = lambda name: (not name.startswith("table"), name)  # noqa: E731
    return [f"{paper}/{name}" for paper in studies for name in sorted(_files(paper), key=in_order)]


@cache
def load_table(name: str) -> Table:
    """Load a table.

    Args:
        name: Name of the table, such as `fedintr/table1`, or the path of a board, a YAML file.

    Raises:
        UserError: If the table is unknown or invalid.
    """
    if name.endswith(SUFFIX):
        try:
            return checked(Table, expanded({"measure": f"personal_weighted{BEST}"} | read_yaml(Path(name))))
        except UserError as error:
            raise UserError(f"board '{name}': {error}") from None
    known = table_names((*PAPERS, *BOARDS))
    if name not in known:
        raise UserError(f"table '{name}' is unknown: {nearest(name, known)}; `fedloom reproduce --list` shows all")
    paper, _, table = name.partition("/")
    try:
        return checked(Table, _with_rows(expanded(parse_yaml(_files(paper)[table].read_text(encoding="utf-8")))))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Expand the short forms of a board.

    `columns: {dataset: [a, b], division: [c]}` means every combination of the values. `methods: [fedavg, {name: ditto,
    lam: 1}]` means rows with these methods. A row without `figures` has none in any column.
    """
    found = dict(values)
    if isinstance(columns := found.get("columns"), Mapping):
        found["columns"] = [{"at": dict(zip(columns, at, strict=True))} for at in product(*columns.values())]
    for method in found.pop("methods", ()):
        name = section_name(method)
        rows = found.setdefault("rows", {})
        if name in rows:
            raise UserError(f"methods: {name} is given twice; write rows with different keys instead")
        rows[name] = {"name": name, "method": method}
    if isinstance(rows := found.get("rows"), Mapping) and isinstance(found.get("columns"), list):
        empty: dict[str, Any] = {"figures": [None] * len(found["columns"])}
        found["rows"] = {key: empty | dict(row) if isinstance(row, Mapping) else row for key, row in rows.items()}
    return found


def _with_rows(values: dict[str, Any]) -> dict[str, Any]:
    """Replace `rows: fedcrl/table2` by that table's rows, with the figures of the same columns."""
    if not isinstance(values.get("rows"), str):
        return values
    other = load_table(values["rows"])
    places = [column.at for column in other.columns]
    index = [places.index(column["at"]) for column in values["columns"]]
    rows = {}
    for key, row in other.rows.items():
        each = {name: [given[i] for i in index] for name, given in row.each.items()}
        figures = [row.figures[i] for i in index]
        rows[key] = row.model_dump(exclude_unset=True) | {"figures": figures, **({"each": each} if each else {})}
    return values | {"rows": rows}


def cells_of(name: str, table: Table) -> list[Cell]:
    """Return the cells of a table, column by column."""
    setting = {} if name.endswith(SUFFIX) else _setting(study_of(name))
    found = []
    for index, column in enumerate(table.columns):
        start = _start(setting, table, column)
        for key, row in table.rows.items():
            if row.figures[index] == NO_CELL:
                continue
            values = _values(setting, table, column, row, index)
            if start is not None:
                values["model"]["weights"] = final_model(study_of(name), start).as_posix()
            found.append(
                Cell(
                    table=name,
                    column=column,
                    row=key,
                    name=row.name,
                    values=values,
                    measure=row.measure or column.measure or table.measure,
                    printed=_percent(row.figures[index], table.unit),
                    first=column.first and row.first,
                    ours=table.ours or row.ours,
                    start=start,
                )
            )
    return found


@cache
def _setting(paper: str) -> dict[str, Any]:
    return parse_yaml((_folder(paper) / "setting.yaml").read_text(encoding="utf-8"))


def _values(setting: Mapping[str, Any], table: Table, column: Column, row: Row, index: int) -> dict[str, Any]:
    each = {f"method.{name}": values[index] for name, values in row.each.items()}
    return _assigned(setting, row.method, _column_fields(table, column) | each | row.recipe)


def _start(setting: Mapping[str, Any], table: Table, column: Column) -> dict[str, Any] | None:
    """Return the recipe of the run whose final model a column's runs start from; None without."""
    if not table.pretrain:
        return None
    fields = _column_fields(table, column) | table.pretrain
    return _assigned(setting, fields.pop("method"), fields)


def _column_fields(table: Table, column: Column) -> dict[str, Any]:
    fields = dict(table.recipe)
    for axis, at in column.at.items():
        fields |= _fields(axis, table.axes[axis], at)
    return fields


def _assigned(setting: Mapping[str, Any], method: str | Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values: a setting with a method, and with fields assigned by path."""
    values: dict[str, Any] = deepcopy(dict(setting))
    values["method"] = {"name": method} if isinstance(method, str) else deepcopy(dict(method))
    for path, value in fields.items():
        assign(values, path, deepcopy(value))
    for section in ("model", "objective"):  # the short form, `model: cnn4`, must give the same key
        if isinstance(values.get(section), str):
            values[section] = {"name": values[section]}
    return values


def _fields(axis: str, rule: Axis, at: str | float) -> dict[str, Any]:
    """Return the fields that a value on an axis sets."""
    if isinstance(rule, dict):
        if str(at) not in rule:
            raise UserError(f"axes.{axis}: has no entry for '{at}'; {nearest(str(at), rule)}")
        return rule[str(at)]
    templates = [rule] if isinstance(rule, str) else rule
    return dict(_assignment(template.format(at)) for template in templates)


_assignment = cache(read_assignment)  # the values are copied before they are used


def _files(paper: str) -> dict[str, Traversable]:
    found = (
        entry for entry in _folder(paper).iterdir() if entry.name.endswith(".yaml") and entry.name != "setting.yaml"
    )
    return {entry.name.removesuffix(".yaml"): entry for entry in found}


def _folder(paper: str) -> Traversable:
    return files("fedloom") / "studies" / "recipes" / paper


def _percent(figure: Figure, unit: str) -> float | None:
    if figure is None or isinstance(figure, str):
        return None
    return round(100 * figure, 4) if unit == "share" else figure
