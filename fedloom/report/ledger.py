"""The ledger of a run as text: what clients sent, what they received, and what never left them."""

from collections.abc import Iterable, Iterator
from typing import Any

TITLES = {
    ("up", "training"): "left a client",
    ("down", "training"): "sent to a client",
    ("up", "evaluation"): "left a client, for evaluation",
    ("down", "evaluation"): "sent to a client, for evaluation",
    ("up", "error"): "left a client, as error and refusal messages",
    ("up", "secure"): "left a client, as keys and encrypted shares of secure aggregation",
    ("down", "secure"): "sent to a client, as keys and encrypted shares of secure aggregation",
}
WITHOUT_TENSORS = ("error", "secure")
"""Purposes of messages that have no tensors."""


def ledger_lines(ledger: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a ledger's text form.

    Args:
        ledger: The content of `ledger.json`, as `Ledger.to_json` returns it.

    Returns:
        An iterator over lines without line breaks.
    """
    if ledger["pooled"]:
        yield f"{ledger['method']} trains on all data in one place: there are no clients, and no messages are sent."
        return
    for kind, title in TITLES.items():
        entries = [entry for entry in ledger["messages"] if (entry["direction"], entry["purpose"]) == kind]
        if kind[1] == "training" and not any(entry["tensors"] for entry in entries):
            yield f"{title}: no tensors"
        for entry in entries:
            if entry["tensors"] or kind[1] in WITHOUT_TENSORS:
                yield from _entry(title, entry)
    if (secure := ledger.get("secure")) is not None:
        yield from _secure(secure)
    if ledger["reveals"]:
        yield "what these reveal about a client's data, beyond what model weights always reveal:"
        yield from _aligned(list(ledger["reveals"].items()))
    yield "left a client in addition to tensors:"
    yield from (f"  {what}" for what in ledger["numbers"])
    if ledger["models"]:
        yield "  at the end: personal models, saved in this run folder (storage.personal_models: false disables this)"
    yield "never left a client:"
    rows = [
        (
            row["part"],
            f"{row['tensors']:,}{'' if row['why'] == 'data' else ' tensors'}",
            _size(row["bytes"]),
            row["why"],
        )
        for row in ledger["never"]
    ]
    yield from _aligned(rows)
    if "counts" in ledger["reveals"]:
        yield "  (labels left only as counts per class: see above)"
    if ledger["privacy"] is not None:
        yield from _privacy(ledger["privacy"])


def _privacy(privacy: dict[str, Any]) -> Iterator[str]:
    """Yield lines about clipping and noise, and who added it."""
    if privacy.get("distributed"):
        yield (
            f"each client clipped its update to {privacy['clip']:g} and added its share of noise of "
            f"{privacy['noise']:g} × that to the masked sum: the sum that the server received is private"
        )
    else:
        yield (
            f"the server clipped each update to {privacy['clip']:g} and added noise of {privacy['noise']:g} × that to "
            "their sum: the result is private (docs/explanation/trust.md), the messages that the server received are "
            "not"
        )
    if privacy["simulated"]:
        yield ("this was a simulation: the noise follows from the seed, so anyone who knows the seed can subtract it")


def _secure(secure: dict[str, Any]) -> Iterator[str]:
    """Yield lines about masked messages, and the tensors whose sum the server got."""
    yield (
        f"'masked' is a contribution to a sum, of {secure['bits']} bits per number: alone it looks random, and the "
        "server got only the sum over at least three clients, and at least "
        f"{secure['threshold']:.0%} of a round's clients. In the sum:"
    )
    yield from (f"  {name}" for name in secure["tensors"])


def _entry(title: str, entry: dict[str, Any]) -> Iterator[str]:
    tensors = entry["tensors"]
    rounds = ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in entry["rounds"])
    yield (
        f"{title}: {entry['bytes']:,} bytes in {_count(entry['messages'], 'message')}, "
        f"{_count(entry['clients'], 'client')}, rounds {rounds}"
        + (f"; each {sum(t['bytes'] for t in tensors):,} bytes:" if tensors else "")
    )
    yield from _aligned(
        (t["name"], "×".join(map(str, t["shape"])) or "a number", t["dtype"], _size(t["bytes"])) for t in tensors
    )


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(count: int) -> str:
    return f"{count:,} bytes"
