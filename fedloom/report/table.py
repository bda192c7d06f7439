"""Table of a comparison: one row per method, means over seeds."""

from collections.abc import Iterable

import numpy as np
from rich.table import Table

from fedloom.experiment.records import Summary, measure


def comparison_table(summaries: Iterable[Summary], title: str = "") -> Table:
    """Return a table that compares methods.

    Columns: the mean accuracy over clients, its standard deviation over clients, the mean of the worst 10% of the
    clients, the accuracy of the global model (all in percent), MB that a client sends per round, and seconds per run.
    Values are means over runs with the same label or method; ± is the standard deviation over these runs (seeds).

    Args:
        summaries: Summaries of runs, as `run` and `compare` return them.
        title: Title above the table; empty for none.

    Returns:
        A `rich` table.

    Example:
        >>> import fedloom
        >>> from rich.console import Console
        >>> summaries = fedloom.compare("recipe.yaml", methods=["local", "fedavg"], seeds=[0, 1])
        >>> Console().print(comparison_table(summaries, title="Digits"))
    """
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


FIGURES = {
    "balanced_accuracy": "bal. acc.", "macro_f1": "macro F1", "auc": "AUC", "ece": "ECE", "loss": "loss",
}  # fmt: skip
MODELS = {"personal": "clients", "global_mean": "global"}


def figures_table(summaries: Iterable[Summary]) -> Table | None:
    """Return a table of the figures that `evaluation.metrics` asks for, means over seeds; None without any."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.get("label", summary["method"]), []).append(summary)
    table = Table(caption="each on the clients' test samples, over the n clients for which it is defined")
    table.add_column("method", style="bold", overflow="fold")
    for column in ("model", "figure"):
        table.add_column(column, no_wrap=True)
    for column in ("mean", "weighted", "spread", "worst 10%", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    for method, runs in groups.items():
        for prefix, models in MODELS.items():
            for name, title in FIGURES.items():
                field = f"{prefix}_{name}"
                if any(measure(run, f"{field}_clients") for run in runs):
                    mean = "_unweighted" if name == "loss" else ""
                    shown = [_decimals(runs, field + ending) for ending in (mean, "_weighted", "_std", "_worst")]
                    table.add_row(method, models, title, *shown, _decimals(runs, f"{field}_clients", ".0f"))
    return table if table.rows else None


def _decimals(runs: Iterable[Summary], field: str, form: str = ".4f") -> str:
    known = [value for run in runs if (value := measure(run, field)) is not None]
    return format(np.mean(known), form) if known else "–"


def percent(values: list[float | None], *, spread: bool = True) -> str:
    """Format fractions as percent, such as `87.3 ± 0.4`; return a dash if no value is known."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{np.mean(known):.1f}"
    return f"{mean} ± {np.std(known):.1f}" if spread and len(known) > 1 else mean
