"""Selects cells of the papers' tables, for the command line and for entries of a queue."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.core.errors import UserError, nearest
from fedloom.studies.table import PAPERS, Cell, Table, cells_of, load_table, table_names


@dataclass(frozen=True)
class Selection:
    """Which cells: all conditions must hold, and None means no condition."""

    tables: Sequence[str]
    """names; a paper's name stands for all its tables, `all` for all papers"""
    only: Collection[str] | None = None
    """columns that have one of these values on any axis"""
    at: Mapping[str, Collection[str]] = field(default_factory=dict)
    """values of an axis, one of which a column must have"""
    methods: Collection[str] | None = None
    """rows"""
    first: bool = False
    """only what is to be run before everything else"""
    dashes: str = "--"
    """what precedes a field's name in messages"""

    def load(self) -> dict[str, Table]:
        """Load the tables.

        Raises:
            UserError: One of them is unknown.
        """
        known = table_names()
        found: dict[str, Table] = {}
        for name in self.tables:
            of_it = known if name == "all" else [k for k in known if k == name or k.startswith(f"{name}/")]
            if not of_it:
                raise UserError(f"table '{name}' is unknown: {nearest(name, [*PAPERS, *known])}")
            found |= {k: load_table(k) for k in of_it}
        return found

    def cells(self) -> list[Cell]:
        """Select the cells, in the order of the tables.

        Raises:
            UserError: A table or a method is unknown, or no cell meets all conditions.
        """
        every = [cell for name, table in self.load().items() for cell in cells_of(name, table)]
        rows = {cell.row for cell in every}
        if unknown := [row for row in self.methods or () if row not in rows]:
            raise UserError(f"{self.dashes}methods {unknown[0]}: {nearest(unknown[0], rows)}")
        if found := [cell for cell in every if self._has(cell)]:
            return found
        columns = "; ".join(dict.fromkeys(cell.place for cell in every[:200]))
        fields = ", ".join(f"{self.dashes}{name}" for name in ("only", "at", "methods"))
        raise UserError(f"{fields}: no cell has all of that; columns are {columns}")

    def _has(self, cell: Cell) -> bool:
        at = {axis: str(value) for axis, value in cell.column.at.items()}
        return (
            (self.methods is None or cell.row in self.methods)
            and (self.only is None or not set(self.only).isdisjoint(at.values()))
            and all(at.get(axis) in values for axis, values in self.at.items())
            and (cell.first or not self.first)
        )
