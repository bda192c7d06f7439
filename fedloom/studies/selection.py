"""Selection of cells of the papers' tables, for the command line and for queue entries."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.core.errors import UserError, nearest
from fedloom.studies.schema import Table
from fedloom.studies.table import BOARDS, PAPERS, SUFFIX, Cell, cells_of, load_table, table_names


@dataclass(frozen=True)
class Selection:
    """Conditions that select cells; all must hold, and None means no condition."""

    tables: Sequence[str]
    """Names of tables, or files of boards; a paper's name selects all its tables, `all` selects all papers."""
    only: Collection[str] | None = None
    """Values of which a column must have one, on any axis."""
    at: Mapping[str, Collection[str]] = field(default_factory=dict)
    """For each axis, the values of which a column must have one."""
    methods: Collection[str] | None = None
    """Names of rows, such as methods."""
    first: bool = False
    """Whether to select only cells that are marked to be run first."""

    def load(self) -> dict[str, Table]:
        """Load the tables.

        Raises:
            UserError: If a table is unknown.
        """
        known = table_names((*PAPERS, *BOARDS))
        found: dict[str, Table] = {}
        for name in self.tables:
            of_it = [k for k in known if k == name or k.startswith(f"{name}/")]
            of_it = table_names() if name == "all" else [name] if name.endswith(SUFFIX) else of_it
            if not of_it:
                raise UserError(f"table '{name}' is unknown: {nearest(name, [*PAPERS, *BOARDS, *known])}")
            found |= {k: load_table(k) for k in of_it}
        return found

    def cells(self) -> list[Cell]:
        """Select the cells, in the order of the tables.

        Raises:
            UserError: If a table or a method is unknown, or no cell meets all conditions.
        """
        every = [cell for name, table in self.load().items() for cell in cells_of(name, table)]
        rows = {cell.row for cell in every}
        if unknown := [row for row in self.methods or () if row not in rows]:
            raise UserError(f"methods: there is no '{unknown[0]}'; {nearest(unknown[0], rows)}")
        if found := [cell for cell in every if self._has(cell)]:
            return found
        columns = "; ".join(dict.fromkeys(cell.place for cell in every[:200]))
        raise UserError(f"only, at, methods: no cell meets all these conditions; columns are {columns}")

    def _has(self, cell: Cell) -> bool:
        at = {axis: str(value) for axis, value in cell.column.at.items()}
        return (
            (self.methods is None or cell.row in self.methods)
            and (self.only is None or not set(self.only).isdisjoint(at.values()))
            and all(at.get(axis) in values for axis, values in self.at.items())
            and (cell.first or not self.first)
        )
