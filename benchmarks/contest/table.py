"""Tables of the measurements, as text."""

import statistics
from typing import Any

from benchmarks.contest.ours import precision
from benchmarks.contest.whole import EVERY
from benchmarks.contest.works import WORKS

Result = dict[str, Any]
PHASES = ("started", "imports", "loading", "building", "training", "evaluation")
"""Phases of a whole training; the remaining time is for checkpoints, records and the exit of the process."""
COLUMNS = {
    "s/round": 9, "× plain": 9, "× pfl": 9, "fastest–slowest": 17, "client steps/s": 16, "img/s": 10, "GPU GB": 8,
    "warm-up s": 11, "floor s": 9, "% floor": 9, "loss": 8,
}  # fmt: skip


def median(result: Result | None) -> float | None:
    return statistics.median(result["seconds"]) if result and result.get("seconds") else None


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def row(cells: list[str], widths: list[int]) -> str:
    first, *others = cells
    return first.ljust(widths[0]) + "".join(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))


def reason(result: Result) -> str:
    return f"skipped: {result['skipped']}" if "skipped" in result else f"failed: {result['failed']}"


def report(found: Result) -> str:
    """Return all tables."""
    lines = [heading(found)]
    for letter, contestants in found.get("works", {}).items():
        if contestants:
            lines += ["", *work_table(letter, contestants, found)]
    if found.get("methods"):
        lines += ["", *methods_table(found["methods"])]
    if found.get("crowd"):
        lines += ["", *crowd_table(found["crowd"])]
    if found.get("whole"):
        lines += ["", *whole_table(found)]
    return "\n".join(lines)


def heading(found: Result) -> str:
    floor = found.get("floor", {"skipped": "not measured yet"})
    if "rates" not in floor:
        return f"no floor (lower bound): {reason(floor)}"
    rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in floor["rates"].items())
    return f"{floor['device']}, torch {floor['torch']}; a large matrix product, TFLOP/s: {rates}"


def work_table(letter: str, contestants: dict[str, Result], found: Result) -> list[str]:
    work, floor = WORKS[letter].scaled(found["scale"]), found.get("floor", {})
    flops = floor.get("flops", {}).get(letter)
    title = f"{letter}: {work.title}; {work.images:,} images per round"
    if found["scale"] != 1:
        title += f" (scaled by {found['scale']:g}, batch {work.batch})"
    plain, pfl = (median(contestants.get(name)) for name in ("plain", "pfl"))
    columns = {name: width for name, width in COLUMNS.items() if name != "× pfl" or "pfl" in contestants}
    widths = [max([24, *(len(name) + 2 for name in contestants)]), *columns.values()]
    lines = [title, row(["", *columns], widths)]
    for name, result in contestants.items():
        seconds = median(result)
        if seconds is None:
            lines.append(name.ljust(widths[0]) + "  " + reason(result))
            continue
        floor_s = None if flops is None else flops * result["images"] / work.views / floor["rates"][precision(name)]
        digits = 4 if seconds < 0.1 else 3
        cells = {
            "s/round": number(seconds, digits),
            "× plain": number(plain and plain / seconds, 2),
            "× pfl": number(pfl and pfl / seconds, 2),
            "fastest–slowest": f"{min(result['seconds']):.{digits}f}–{max(result['seconds']):.{digits}f}",
            "client steps/s": number(result["steps"] / seconds),
            "img/s": number(result["images"] / seconds),
            "GPU GB": number(result["memory"], 2),
            "warm-up s": number(result["warmup"], 1),
            "floor s": number(floor_s, 4),
            "% floor": number(floor_s and 100 * floor_s / seconds, 1),
            "loss": number(result["loss"], 3),
        }
        lines.append(row([name, *(cells[column] for column in columns)], widths))
    lines += notes(contestants, plain)
    if flops is not None:
        each = ", ".join(f"{name} {flops * work.images / rate:.4f} s" for name, rate in floor["rates"].items())
        lines.append(f"floor (lower bound) of {flops * work.images / 1e12:,.2f} TFLOP per round: {each}")
    return lines


def notes(contestants: dict[str, Result], plain: float | None) -> list[str]:
    own = contestants.get("pfllib")
    seconds = median(own)
    if own is None or seconds is None:
        return []
    training = statistics.median(own["training"])
    line = f"PFLlib: {training:.3f} s per round by its clients' counters (without reading their files)"
    if plain:
        line += f"; the plain loop takes {plain / seconds:.2f} × its round and {plain / training:.2f} × that time"
    return [line]


def methods_table(methods: dict[str, Result]) -> list[str]:
    """Return a table of the time per processed image, counted once per view, fit, epoch and feature pass."""
    widths = [12, 9, 9, 11, 15, 11, 26]
    lines = [
        "Methods on workload A; passes: of each image through the extractor per round; backward: with a backward pass",
        row(["", "s/round", "passes", "backward", "µs per image", "× FedAvg", "× (forward only: 1/3)"], widths),
    ]
    base = {weighted: per_image(methods.get("fedavg"), weighted) for weighted in (False, True)}
    for name, result in methods.items():
        seconds = median(result)
        if seconds is None:
            lines.append(name.ljust(widths[0]) + reason(result))
            continue
        ratios = [seconds_per / of if (seconds_per := per_image(result, w)) and (of := base[w]) else None for w in base]
        cells = [
            name, number(seconds, 3), number(result["passes"], 2), number(result["backward"], 2),
            number(1e6 * seconds / (result["images"] * result["passes"]), 3), *(number(r, 2) for r in ratios),
        ]  # fmt: skip
        lines.append(row(cells, widths))
    return lines


def per_image(result: Result | None, weighted: bool) -> float | None:
    """Return the seconds per processed image; `weighted` counts a pass without backward as a third."""
    seconds = median(result)
    if seconds is None or result is None:
        return None
    passes = result["backward"] + (result["passes"] - result["backward"]) / 3 if weighted else result["passes"]
    return seconds / (result["images"] * passes)


def crowd_table(crowd: dict[str, Result]) -> list[str]:
    widths = [18, 9, 8, 12, 14, 14, 10]
    lines = [
        "ResNet-18, 20 clients per round, 3 rounds; `local` keeps a model per client seen, 512 MB of them in RAM",
        row(["", "clients", "seen", "s/round", "GPU reserved", "GPU allocated", "RAM GB"], widths),
    ]
    for name, result in crowd.items():
        if median(result) is None:
            lines.append(name.ljust(widths[0]) + reason(result))
            continue
        cells = [
            name, number(result["clients"]), number(result["seen"]), number(result["seconds"][-1], 2),
            number(result["memory"], 2), number(result["allocated"], 2), number(result["resident"], 2),
        ]  # fmt: skip
        lines.append(row(cells, widths))
    return lines


def whole_table(found: Result) -> list[str]:
    """Return a table of the seconds of a whole training by phase."""
    work = WORKS["P"].scaled(found["scale"])
    columns = {
        "whole s": 10, "imports": 9, "loading": 9, "building": 10, "first round at": 16, "training": 10,
        "evaluation": 12, "other": 8, "s/round": 9, "accuracy": 10,
    }  # fmt: skip
    names = {name: max(len(name) + 12, 24) for name in found["whole"]}
    widths = [max(names.values()), *columns.values()]
    lines = [
        f"P from start to end: {work.total_rounds:,} rounds, evaluation of {work.shared_test:,} test images every "
        f"{EVERY} rounds; seconds",
        row(["", *columns], widths),
    ]
    for name, runs in found["whole"].items():
        if "cold" not in runs:
            lines.append(name.ljust(widths[0]) + "  " + reason(runs))
            continue
        for cache, result in runs.items():
            cells = {
                "whole s": number(result["whole"], 1),
                **{phase: number(result[phase], 1) for phase in PHASES},
                "first round at": number(result["first round"], 1),
                "other": number(result["whole"] - sum(result[phase] for phase in PHASES), 1),
                "s/round": number(result["median"], 4),
                "accuracy": number(result["accuracy"], 3),
            }
            title = f"{name}, {cache} cache" if len(runs) > 1 else name
            lines.append(row([title, *(cells[column] for column in columns)], widths))
    pfl = median(found.get("works", {}).get("P", {}).get("pfl"))
    if pfl:
        lines.append(
            f"pfl-research was not run for the whole training: {work.total_rounds:,} of its rounds at their median "
            f"take {pfl * work.total_rounds:,.0f} s, without start and evaluation"
        )
    return lines
