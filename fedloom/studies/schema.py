"""Schema of a table's file: columns, rows with the published figures, pictures, and what they have in common."""

from typing import Any, Literal

from pydantic import Field, model_validator

from fedloom.core.checking import Section, refusal

BEST = "@best"
"""Ending of a metric that is taken at its best evaluated round, by test accuracy, as leaderboards do."""
NO_CELL = "-"
"""Placeholder in a row's figures for a cell that the paper's table does not have."""

Axis = str | list[str] | dict[str, dict[str, Any]]
Figure = float | Literal["-"] | None


class Column(Section):
    """A column of the paper's table."""

    at: dict[str, str | int | float] = Field(
        description="the column's value on each axis: {dataset: cifar10, beta: 0.5}"
    )
    measure: str | None = Field(None, description="the metric to compare; by default the table's")
    round: int | None = Field(None, ge=1, description="the round of the figure; by default the last")
    first: bool = Field(False, description="whether to run this column before the others")


class Row(Section):
    """A row of the paper's table: a method with its figures in the order of the columns (null: not printed)."""

    name: str
    method: str | dict[str, Any]
    each: dict[str, list[Any]] = Field({}, description="hyperparameters that differ from column to column")
    recipe: dict[str, Any] = Field({}, description="fields that differ for this method, by path")
    measure: str | None = Field(None, description="the metric to compare; by default the column's")
    first: bool = Field(True, description="whether to run this row first, in columns that are run first")
    ours: bool = Field(False, description="a variant that is not in the paper, to show the effect of a choice")
    figures: list[Figure]


class Picture(Section):
    """A picture of a table's stored results."""

    name: str = Field(description="name of the file, without suffix")
    title: str
    kind: Literal["rounds", "axis", "bytes"] = Field(
        "rounds",
        description="rounds: curves by round; bytes: curves by transferred bytes; axis: final figures along `axis`",
    )
    at: dict[str, str | int | float | None] = Field(
        {}, description="only columns with these values on the axes (null: columns without a value on this axis)"
    )
    measures: list[str] = Field([], description="metrics of the curves, one panel each; default: the table's")
    lines: Literal["rows", "columns"] = Field("rows", description="what the lines of a panel are; the other has panels")
    axis: str | None = Field(None, description="with kind axis: the axis from left to right")
    x: str = Field("round", description="label of the horizontal axis")
    note: str = Field("", description="remark below the picture: how it differs from the paper's")


class Table(Section):
    """A table or figure of a paper."""

    title: str
    setting: str = Field(description="the setting in words")
    recipe: dict[str, Any] = Field({}, description="fields that override the paper's setting.yaml, by path")
    ours: bool = Field(False, description="the setting differs from the paper's; figures are still compared with it")
    reduced: dict[str, Any] = Field({}, description="a smaller, faster setting, by path; named in the report")
    pretrain: dict[str, Any] = Field(
        {}, description="fields of another run, by path, whose final model is the initial model of all cells"
    )
    axes: dict[str, Axis] = Field(description="what a value on an axis sets: a template, or fields for each value")
    measure: str = Field("global_accuracy", description=f"the metric to compare; with {BEST}, at its best round")
    unit: Literal["percent", "share"] = "percent"
    columns: list[Column] = Field(min_length=1)
    rows: dict[str, Row] = Field(min_length=1, description="rows by key, or the name of a table with the same rows")
    deviations: list[str] = Field([], description="what the paper does not state or is not available, and what is done")
    notes: list[str] = Field([], description="findings, shown in the report")
    pictures: list[Picture] = Field([], description="pictures that are drawn from the stored results")
    source: str = Field("", description="address of the page that the published figures come from")
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="seeds of a board that is run without a queue")

    @model_validator(mode="after")
    def _whole(self) -> "Table":
        for key, row in self.rows.items():
            for name, values in {"figures": row.figures, **row.each}.items():
                if len(values) != len(self.columns):
                    raise refusal(f"rows.{key}.{name}: {len(values)} values for {len(self.columns)} columns")
        for column in self.columns:
            if stray := set(column.at) - set(self.axes):
                raise refusal(f"columns.at: the axis '{min(stray)}' is not defined in axes")
        for picture in self.pictures:
            if stray := {*picture.at, *([picture.axis] if picture.axis else [])} - set(self.axes):
                raise refusal(f"pictures.{picture.name}: the axis '{min(stray)}' is not defined in axes")
            if (picture.kind == "axis") != (picture.axis is not None):
                raise refusal(f"pictures.{picture.name}.axis: must be given for kind axis, and only for it")
        return self
