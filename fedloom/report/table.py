"""The table of a comparison: methods in rows, means over seeds."""

from collections.abc import Iterable

import numpy as np
from rich.table import Table

from fedloom.experiment.records import Summary


def comparison_table(summaries: Iterable[Summary], title: str = "") -> Table:
    """Mean client accuracy, its spread over clients, global accuracy, MB sent, seconds. Percent; ± is over seeds."""
    caption = "clients: mean accuracy over clients · spread: std over clients · MB up: per client and round"
    table = Table(title=title or None, caption=caption)
    table.add_column("method", style="bold", overflow="fold")
    for name in ("clients %", "spread", "worst 10%", "global %", "MB up", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.get("label", summary["method"]), []).append(summary)
    for method, runs in groups.items():
        table.add_row(
            method,
            percent([r["personal_accuracy"] for r in runs]),
            percent([r["personal_std"] for r in runs], spread=False),
            percent([r["personal_worst"] for r in runs], spread=False),
            percent([r["global_accuracy"] for r in runs]),
            f"{np.mean([r['up_bytes'] for r in runs]) / 1e6:.3f}",
            f"{np.mean([r['seconds'] for r in runs]):.1f}",
        )
    return table


def percent(values: list[float | None], *, spread: bool = True) -> str:
    """`87.3 ± 0.4`, or a dash where there is nothing."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{np.mean(known):.1f}"
    return f"{mean} ± {np.std(known):.1f}" if spread and len(known) > 1 else mean
