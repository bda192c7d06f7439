"""Tables of a comparison: one row per method, means over seeds."""

from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from fedloom.experiment.records import NewcomerRow, Summary, measure
from fedloom.report.significance import sample_std


def comparison_table(summaries: Iterable[Summary], title: str = "") -> Table:
    """Return a table that compares methods.

    Columns: the mean accuracy over clients, its standard deviation over clients, the mean of the worst tenth of the
    clients, the accuracy of the global model (all in percent), MB that a client sends per round, and seconds per run.
    Values are means over runs with the same label or method; ± is the sample standard deviation over them (seeds).

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
    summaries = list(summaries)
    caption = "accuracies in % · clients: mean over clients · spread: std over clients · MB up: per client and round"
    if len({summary.get("seed") for summary in summaries}) > 1:
        caption += " · ±: sample std over seeds"
    table = Table(title=title or None, caption=caption)
    table.add_column("method", style="bold", overflow="fold")
    for name in ("clients", "spread", "worst\ntenth", "global", "MB up", "seconds"):
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


def newcomers_table(rows: Sequence[NewcomerRow], title: str = "") -> Table:
    """Return a table of the models that newcomers get: mean accuracy over newcomers, and that of the worst.

    Args:
        rows: Rows of newcomers.json: `label`, `seed`, `labelled`, `mean`, `worst`.
        title: Title above the table; empty for none.
    """
    counts = sorted({row["labelled"] for row in rows})
    several = len({row["seed"] for row in rows}) > 1
    caption = "mean accuracy over newcomers (and of the worst), in %"
    table = Table(title=title or None, caption=caption + (" · ±: sample std over seeds" if several else ""))
    table.add_column("representation", style="bold", overflow="fold")
    for count in counts:
        table.add_column(labelled_column(count), justify="right")
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = []
        for count in counts:
            cells.append(mean_and_worst([row for row in rows if (row["label"], row["labelled"]) == (label, count)]))
        table.add_row(NO_REPRESENTATION if label == "alone" else label, *cells)
    return table


NO_REPRESENTATION = "none: trained alone"


def labelled_column(count: int) -> str:
    """Return the title of the column of newcomers with this many labelled samples."""
    return f"{count} labelled" if count else "global model as it is"


def mean_and_worst(rows: Sequence[NewcomerRow]) -> str:
    """Format the mean accuracy over newcomers, and in brackets that of the worst; one row per seed."""
    worst = percent([row["worst"] for row in rows], spread=False)
    return f"{percent([row['mean'] for row in rows])} ({worst})" if rows else "–"


FIGURES = {
    "accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "f1": "F1", "macro_f1": "macro F1",
    "micro_f1": "micro F1", "exact_match": "exact match", "auc": "AUC", "ece": "ECE", "loss": "loss",
}  # fmt: skip
"""Names of figures for people."""
STATISTICS = ("mean", "weighted", "std", "worst")
MODELS = {"personal": "clients", "global_mean": "global"}


def field_of(figure: str, which: str, models: str = "personal") -> str:
    """Return the field of a record or summary that holds a statistic of a figure over clients.

    Args:
        figure: `accuracy`, `loss`, or one of `evaluation.metrics`.
        which: `mean`, `weighted`, `std`, `worst` or `clients`, their number.
        models: `personal`, `global_mean` or `validation_personal`.
    """
    if figure == "accuracy":
        return f"{models}_{'accuracy' if which == 'mean' else which}"
    ending = {"mean": "_unweighted" if figure == "loss" else ""}.get(which, f"_{which}")
    return f"{models}_{figure}{ending}"


def figures_table(summaries: Iterable[Summary]) -> Table | None:
    """Return a table of accuracy and the figures that `evaluation.metrics` asks for, in percent, means over seeds.

    Without any such figures, return None. The loss has its own unit and is not scaled.
    """
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.get("label", summary["method"]), []).append(summary)
    table = Table(caption="in %, except the loss · on clients' test samples · n: clients for which it is defined")
    if len(groups) > 1:  # a narrow terminal has no room for it otherwise
        table.add_column("method", style="bold", overflow="fold", min_width=8)
    table.add_column("figure")
    for column in ("mean", "weighted", "spread", "worst tenth", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    for method, runs in groups.items():
        for prefix, models in MODELS.items():
            asked = [f for f in FIGURES if any(measure(run, field_of(f, "clients", prefix)) for run in runs)]
            for figure in ["accuracy", *asked] if asked and prefix == "personal" else asked:
                form, scale = (".4g", 1) if figure == "loss" else (".1f", 100)
                shown = [_mean(runs, field_of(figure, which, prefix), form, scale) for which in STATISTICS]
                number = _mean(runs, field_of(figure, "clients", prefix), ".0f")
                named = [method] if len(groups) > 1 else []
                table.add_row(*named, f"{models}: {FIGURES[figure]}", *shown, number)
    return table if table.rows else None


def _mean(runs: Iterable[Summary], field: str, form: str, scale: float = 1) -> str:
    """Format the mean of a field over runs; return a dash if no run has it."""
    known = [scale * value for run in runs if (value := measure(run, field)) is not None]
    return format(np.mean(known), form) if known else "–"


def percent(values: list[float | None], *, spread: bool = True) -> str:
    """Format fractions as percent, such as `87.3 ± 0.4` with the sample deviation; return a dash if none is known."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{np.mean(known):.1f}"
    return f"{mean} ± {sample_std(known):.1f}" if spread and len(known) > 1 else mean
