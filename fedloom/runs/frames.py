"""Records of runs as pandas frames. pandas is optional and imported on first use."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.config.loading import flat
from fedloom.experiment.records import ClientRow, RoundRecord, Summary, client_name

if TYPE_CHECKING:
    from pandas import DataFrame


def history_frame(records: Sequence[RoundRecord]) -> "DataFrame":
    """Return a row per round, indexed by `round`; nested values become columns such as `styles.mnist`."""
    from pandas import DataFrame  # takes 0.3 s, and most runs need no frames

    lines = [dict(flat(record)) for record in records]
    return DataFrame(lines, columns=_columns(records, "round")).set_index("round")


def clients_frame(rows: Sequence[ClientRow]) -> "DataFrame":
    """Return a row per client, indexed by its number `client`: name, samples, accuracy, mean loss, further metrics."""
    found = []
    for row in rows:
        test = sum(row["total"])
        line: dict[str, Any] = {
            "client": row["client"], "name": client_name(row), "newcomer": row["newcomer"], "train": row["train"],
            "test": test, "accuracy": row["accuracy"],
            "loss": None if row["loss"] is None or not test else row["loss"] / test,
        }  # fmt: skip
        line |= row.get("metrics", {})
        if "validation_accuracy" in row:
            line["validation_accuracy"] = row["validation_accuracy"]
        line |= {f"validation_{name}": value for name, value in row.get("validation_metrics", {}).items()}
        found.append(line)
    from pandas import DataFrame

    first = ["client", "name", "newcomer", "train", "test", "accuracy", "loss"]
    return DataFrame(found, columns=_columns(found, *first)).set_index("client")


def runs_frame(summaries: Sequence[Summary]) -> "DataFrame":
    """Return a row per run of a comparison or sweep: label, seed, settings, figures."""
    from pandas import DataFrame

    lines = [dict(flat(summary)) for summary in summaries]
    return DataFrame(lines, columns=_columns(lines, "label", "method", "seed"))


def table_frame(records: Sequence[Mapping[str, Any]], caption: str) -> "DataFrame":
    """Return a row per cell and measure of a results table; `attrs["caption"]` says how they were computed."""
    from pandas import DataFrame

    frame = DataFrame(list(records))
    frame.attrs["caption"] = caption
    return frame


def _columns(rows: Sequence[Mapping[str, Any]], *first: str) -> list[str]:
    """Return the names of all values, in order of appearance, after `first`."""
    return list(dict.fromkeys([*first, *(name for row in rows for name, _ in flat(row))]))
