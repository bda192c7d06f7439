"""A report of many methods and clients: time to build it, its size, and how soon Chromium shows it.

    python -m benchmarks.report [--methods 26] [--clients 100] [--seeds 3] [--repeats 7] [--out report.html]

Nothing is trained: run folders are written with made-up results, as `fedloom run` writes them, and t-SNE maps are made
up too. The page is opened in a new headless Chromium tab each time. `load event`: the table and the navigation are
there. `first figure`: Plotly has been evaluated and has drawn. On a busy machine, compare the minimum.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedloom import Recipe
from fedloom.cli.catalogue import catalogue
from fedloom.experiment.records import ClientRow, RoundRecord
from fedloom.experiment.run_folder import CLIENTS, SUMMARY, RunFolder
from fedloom.report.page.insight import Holdings, Insight
from fedloom.report.page.maps import Map
from fedloom.report.page.page import page_of, write
from fedloom.report.page.runs import Entry, entries_of, read_runs

CLASSES, ROUNDS, EVERY, POINTS = 10, 100, 5, 400
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=int, default=26)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Keep the report in this file.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        write_runs(runs, options.methods, options.clients, options.seeds)
        report = options.out or Path(folder, "report.html")
        began = time.perf_counter()
        entries = entries_of(read_runs([runs]))
        write(page_of(entries, made_up_insights(entries, options.clients)), report)
        print(f"{options.methods} methods, {options.clients} clients, {options.seeds} seeds")
        print(f"build           {time.perf_counter() - began:8.2f} s")
        print(f"file            {report.stat().st_size / 1e6:8.2f} MB")
        found = [measure(report) for _ in range(options.repeats)]
    for name, what in (("loaded", "load event"), ("drawn", "first figure")):
        each = sorted(one[name] for one in found)
        print(f"{what:<16}{statistics.median(each):8.2f} s median, {each[0]:.2f} s minimum of {len(each)}")
    print(f"page height     {found[0]['height']:8.0f} pixels at a width of 1280, all methods: {found[0]['whole']:.0f}")


def write_runs(folder: Path, methods: int, clients: int, seeds: int) -> None:
    """Write the folders of a comparison with made-up results."""
    names = [row["name"] for row in catalogue()["methods"]]
    names = [*names, *(f"{name}+ft" for name in names)][:methods]
    for name, skill in zip(names, np.random.default_rng(0).permutation(np.linspace(0, 1, len(names))), strict=True):
        for seed in range(seeds):
            _write_run(folder / f"{name}-{seed}", name, float(skill), clients, seed)


def _write_run(path: Path, method: str, skill: float, clients: int, seed: int) -> None:
    rng = np.random.default_rng([seed, int(1000 * skill)])
    recipe = Recipe.parse(
        {"method": method, "seed": seed, "data": {"name": "digits", "clients": clients}, "training": {"rounds": ROUNDS}}
    )
    rows = list(_clients(rng, skill, clients, seed))
    each = np.array([row["accuracy"] for row in rows], float)
    last = {
        "personal_accuracy": float(each.mean()), "personal_std": float(each.std()), "personal_weighted": each.mean(),
        "personal_worst": float(np.sort(each)[: max(1, clients // 10)].mean()), "global_accuracy": 0.9 * each.mean(),
    }  # fmt: skip
    folder = RunFolder(path)
    folder.describe(recipe.to_yaml(), recipe.method.name)
    pace = rng.uniform(2, 9)
    traffic = {"up_bytes": int(1e5 * (1 + skill)), "down_bytes": int(1e5 * (1 + skill))}
    for number in range(1, ROUNDS + 1):
        record: dict[str, Any] = {
            "round": number, "lr": 0.1, "clients": clients, "failed": {}, "loss": 2 / number ** (pace / 9),
            "seconds": 1.0, "train_seconds": 0.5 + 0.5 * skill + rng.uniform(0, 0.1), **traffic,
        }  # fmt: skip
        if number % EVERY == 0:
            grown = 1 - np.exp(-pace * number / ROUNDS) / 2
            record |= {"evaluated": clients} | {
                name: float(value * (grown + rng.normal(0, 0.004))) for name, value in last.items()
            }
        folder.record(RoundRecord(**record))
    folder.write_lines(CLIENTS, rows)
    facts = {"method": method, "rounds": ROUNDS, "seed": seed, "clients": clients, "summary": "last", **traffic}
    best = {"personal_accuracy": None, "global_accuracy": None}
    folder.write_json(SUMMARY, facts | last | {"best": best, "failed": {}, "notes": [], "seconds": 60.0 * (1 + skill)})
    folder.close()


def _clients(rng: np.random.Generator, skill: float, clients: int, seed: int) -> Iterator[ClientRow]:
    """Yield results of clients that are as easy or hard for every method."""
    shared = np.random.default_rng(seed)
    sizes, easy = shared.lognormal(5, 1, clients), shared.beta(6, 2, clients)
    for client, (size, ease) in enumerate(zip(sizes, easy, strict=True)):
        total = [int(n) for n in np.random.default_rng([seed, client]).multinomial(int(size), [1 / CLASSES] * CLASSES)]
        p = float(np.clip(0.35 + 0.3 * skill + 0.35 * ease + rng.normal(0, 0.03), 0.02, 0.99))
        right = [int(rng.binomial(n, p)) for n in total]
        yield ClientRow(
            client=client, name=f"hospital-{client:03}", newcomer=False, train=3 * int(size), right=right, total=total,
            accuracy=sum(right) / max(1, sum(total)), loss=float(sum(total) * (1.5 - p)),
        )  # fmt: skip


def made_up_insights(entries: Sequence[Entry], clients: int) -> dict[Path, Insight]:
    """Return data and t-SNE maps: per method one of the global network and one of personal networks."""
    rng = np.random.default_rng(0)
    names = [f"hospital-{client:03}" for client in range(clients)]
    counts = np.random.default_rng(0).negative_binomial(0.3, 0.005, (clients, CLASSES)).tolist()
    held = Holdings("digits", [str(c) for c in range(CLASSES)], counts, [], names=names)
    found = {}
    for place, entry in enumerate(entries):
        for run in entry.runs:
            found[run.path] = Insight(held)
        distance = 5 + 25 * place / len(entries)
        found[entry.first.path].maps = [_map(rng, what, distance) for what in ("global", "clients' own")]
    return found


def _map(rng: np.random.Generator, what: str, distance: float) -> Map:
    labels = rng.integers(0, CLASSES, POINTS)
    angle = 2 * np.pi * labels / CLASSES
    x, y = (distance * f(angle) + rng.normal(0, 4, POINTS) for f in (np.cos, np.sin))
    names = {c: str(c) for c in range(CLASSES)}
    return Map(what, x.tolist(), y.tolist(), labels.tolist(), names, distance / 60, distance / 50)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless Chromium, controlled by Playwright.

    Raises:
        SystemExit: Chromium is not installed.
    """
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def measure(report: Path) -> dict[str, float]:
    """Open a report in a new browser; return seconds until the load event and the first figure, and heights."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(report.as_uri())
        loaded = page.evaluate(LOADED)
        page.wait_for_selector(".plot .main-svg", timeout=60_000, state="attached")
        drawn = page.evaluate("performance.now()")
        height = page.evaluate("document.documentElement.scrollHeight")
        page.get_by_role("button", name="all", exact=True).click()
        whole = page.evaluate("document.documentElement.scrollHeight")
    return {"loaded": loaded / 1000, "drawn": drawn / 1000, "height": height, "whole": whole}


if __name__ == "__main__":
    main()
