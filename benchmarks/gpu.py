"""Many clients on one GPU: the engine `lanes` compared with a plain loop, other libraries and a lower bound.

    python -m benchmarks.gpu [--works A B C D E P Q] [--only plain 'lanes*'] [--pfllib PATH] [--pfl FOLDER] [--whole]
    python -m benchmarks.gpu --json found.json --resume --time 560     measure what the file does not contain yet
    python -m benchmarks.gpu --device cpu --scale 0.01 --rounds 1      a trial, with inline instead of lanes

The letters name workloads. The contestants run one after another, each in a separate process. Their first rounds
(graph captures, compilation) are reported as `warm-up`; figures are medians of the other rounds. Evaluation is not
counted, except with `--whole`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from time import perf_counter, time
from typing import Any

import numpy as np

from benchmarks.contest.ours import engine
from benchmarks.contest.table import median, report
from benchmarks.contest.whole import EVERY
from benchmarks.contest.works import WORKS, Work

METHODS = ("fedavg", "fedcrl", "fedcrc", "repper", "ditto")
WHOLE = ("auto", "lanes-bf16-compile")
SHORT = 10
"""Factor for the number of measured rounds if a round has a few clients out of many, since such rounds are short."""
LEAST = 20
"""Seconds that must be left to start another contestant."""
UNFINISHED = 3
"""Exit code if `--time` was over before all contestants were measured."""
ROOT = Path(__file__).resolve().parents[1]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="*", choices=list(WORKS), default=list(WORKS), metavar="LETTER")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="plain, pfllib, pfl, fluke, flower, inline, auto, or patterns; "
        "lanes-PRECISION[-cl][-compile][-deterministic][-cohortK][@N], ray-…@N; B:NAME only for workload B",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=5,
        help="measured rounds; at most 3 except for fedloom on a GPU; 10 times as many for P and Q, whose rounds are "
        "short",
    )  # fmt: skip
    parser.add_argument("--warmup", type=int, default=3, help="warm-up rounds; 1 except for fedloom on a GPU")
    parser.add_argument("--lanes", type=int, help="number of lanes; by default the engine chooses")
    parser.add_argument("--scale", type=float, default=1, help="scale of images or clients, for a trial")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pfllib", metavar="PATH", help="a clone of github.com/TsingZ0/PFLlib")
    parser.add_argument("--pfl", metavar="FOLDER", help="pfl-research, by pip install --target FOLDER --no-deps pfl …")
    parser.add_argument(
        "--whole", nargs="*", metavar="NAME", help="also measure a whole training of P with these variants"
    )
    parser.add_argument("--methods", action="store_true", help="also measure the time per image of other methods")
    parser.add_argument("--clients1000", action="store_true", help="also measure GPU memory with 100 and 1,000 clients")
    parser.add_argument("--variant", default="lanes-tf32", metavar="NAME", help="for --methods and --clients1000")
    parser.add_argument("--limit", type=float, default=240, help="seconds per contestant")
    parser.add_argument("--time", type=float, help="seconds in total; exit code 3 if contestants are left")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for results, written after every contestant")
    parser.add_argument("--resume", action="store_true", help="measure only what the file of --json does not contain")
    parser.add_argument("--retry", action="store_true", help="with --resume: repeat what failed or was skipped")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of a results file and exit")
    options = parser.parse_args(words)
    for only in options.only or ():
        if only[1:2] == ":" and only[0] not in options.works:
            parser.error(f"--only {only}: {only[0]} is not one of --works {' '.join(options.works)}")
    if options.whole == []:
        options.whole = list(WHOLE)
    if options.resume and not options.json:
        parser.error("--resume: needs a results file: --json FILE")
    return options


def main() -> None:
    options = arguments()
    if options.show:
        print(report(json.loads(options.show.read_text())))
        return
    found: dict[str, Any] = {}
    if options.resume and options.json.exists():
        found = json.loads(options.json.read_text())

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))

    left = contest(found, options, save)
    print(report(found))
    if left:
        print(f"not measured, continue with --resume: {', '.join(left)}", file=sys.stderr)
        raise SystemExit(UNFINISHED)


@dataclass
class Part:
    """One measurement: where to store its result, and a function that makes it within some seconds."""

    title: str
    results: dict[str, Any]
    name: str
    measure: Callable[[float], dict[str, Any]]
    runs: int = 1
    """Number of processes that it starts, each of which may take `--limit` seconds."""

    def missing(self, retry: bool) -> bool:
        result = self.results.get(self.name)
        return result is None or (retry and ("failed" in result or "skipped" in result))


def contest(found: dict[str, Any], options: argparse.Namespace, save: Callable[[], object]) -> list[str]:
    """Add missing measurements to `found`, and return the titles of those that there was no time for."""
    setting = {"scale": options.scale, "device": options.device}
    if other := {name: found[name] for name in setting if found.get(name, setting[name]) != setting[name]}:
        raise SystemExit(f"--resume: the file was measured with {other}, not with {setting}")
    found.setdefault("commands", []).append(sys.argv[1:])
    found |= setting
    deadline = perf_counter() + (options.time or float("inf"))
    waiting = [part for part in parts(found, options) if part.missing(options.retry)]
    while waiting:
        remaining = deadline - perf_counter()
        if remaining < LEAST:
            break
        part, start = waiting[0], perf_counter()
        limit = part.runs * options.limit
        result = part.measure(min(limit, remaining))
        if "failed" in result and remaining < limit and deadline - perf_counter() < 1:
            break  # not a failure: it had less time than --limit
        part.results[part.name] = result
        say(part.title, result, perf_counter() - start)
        save()
        waiting.pop(0)
    return [part.title for part in waiting]


def parts(found: dict[str, Any], options: argparse.Namespace) -> Iterator[Part]:
    """Yield all measurements that the options request, in order."""
    shared = {name: getattr(options, name) for name in ("device", "scale", "lanes", "pfllib", "pfl")}
    for library in ("pfllib", "pfl"):
        shared[library] = shared[library] and str(Path(shared[library]).resolve())

    def contestant(title: str, results: dict[str, Any], name: str, spec: dict[str, Any]) -> Part:
        return Part(title, results, name, lambda limit: in_folder(spec | shared, limit))

    yield contestant("floor", found, "floor", {"kind": "floor", "works": list(WORKS)})
    for letter in options.works:
        work, results = WORKS[letter], found.setdefault("works", {}).setdefault(letter, {})
        for name in contestants(work, options):
            spec = {"kind": "work", "work": letter, "name": name, **rounds(name, options, work)}
            yield contestant(f"{letter} {name}", results, name, spec)
    for method in METHODS if options.methods else ():
        spec = {"kind": "work", "work": "A", "name": options.variant, "method": method}
        spec |= rounds(options.variant, options, WORKS["A"])
        yield contestant(method, found.setdefault("methods", {}), method, spec)
    for method, clients in ((m, c) for m in ("fedavg", "local") for c in (100, 1000) if options.clients1000):
        spec = {"kind": "crowd", "method": method, "clients": clients, "name": options.variant}
        yield contestant(f"{method}, {clients} clients", found.setdefault("crowd", {}), f"{method}, {clients}", spec)
    for name in options.whole or ():
        results = found.setdefault("whole", {})
        measure = partial(whole, name, options)
        yield Part(f"P from start to end, {name}", results, name, measure, runs=2)


def contestants(work: Work, options: argparse.Namespace) -> list[str]:
    """Return the workload's contestants, or the requested ones (which may be other variants of lanes)."""
    usual = ["plain", *work.peers, "inline", *work.variants]
    if not options.only:
        return [name for name in usual if name not in ("pfllib", "pfl") or getattr(options, name)]
    here = [only.removeprefix(f"{work.letter}:") for only in options.only if only[1:2] != ":" or only[0] == work.letter]
    asked = [name for name in here if (name == "auto" or name.startswith(("lanes-", "ray-"))) and "*" not in name]
    return list(dict.fromkeys([n for n in usual if any(fnmatch(n, pattern) for pattern in here)] + asked))


def rounds(name: str, options: argparse.Namespace, work: Work) -> dict[str, int]:
    """Return the numbers of rounds: lanes need more warm-up rounds for captures; the others are slow."""
    many = SHORT if work.per_round else 1
    if name == "auto" or name.startswith(("lanes", "ray")):
        return {"warmup": max(1, options.warmup), "rounds": many * options.rounds}
    return {"warmup": 1, "rounds": many * min(3, options.rounds)}


def say(title: str, result: dict[str, Any], seconds: float) -> None:
    figure = median(result)
    what = f"{figure:.4f} s per round" if figure else result.get("skipped") or result.get("failed") or "done"
    print(f"[{seconds:6.1f} s] {title}: {what}", file=sys.stderr, flush=True)


def whole(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Measure a whole training of P in a process: with empty compile caches and, if it compiles, again with full ones.

    `limit` is for both runs together.
    """
    work = WORKS["P"].scaled(options.scale)
    deadline = perf_counter() + limit
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        images = Path(folder) / "images.npz"
        dataset, _ = work.federation()
        of = {"train": ~dataset.test, "test": dataset.test}
        arrays = {f"x_{part}": dataset.inputs[which].numpy() for part, which in of.items()}
        np.savez(images, **arrays, **{f"y_{part}": dataset.labels[which].numpy() for part, which in of.items()})
        values = {
            "data": {"name": str(images), "clients": work.clients, "partition": "iid", "split": "common"},
            "training": {"rounds": work.total_rounds},
            "evaluation": {"every": EVERY},
            "engine": engine(name, options.device, options.lanes),
        }
        caches = {
            variable: str(Path(folder) / "cache" / variable.lower())
            for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX")
        }
        for cache in ("cold", "warm") if "compile" in name else ("cold",):
            inside = Path(folder) / cache
            inside.mkdir()
            recipe = work.recipe(**values, out=str(inside / "run"))
            spec = {"recipe": recipe, "began": time(), "device": options.device}
            result = in_process(spec, inside, deadline - perf_counter(), "whole", caches)
            if "failed" in result:
                return result
            found[cache] = result | {"whole": time() - spec["began"]}
    return found


def in_folder(spec: dict[str, Any], limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        return in_process(spec, Path(folder), limit)


def in_process(
    spec: dict[str, Any], folder: Path, limit: float, module: str = "part", variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run one measurement in a separate process; an error there becomes its result."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if spec["device"] == "cpu":  # a trial, in which threads of several programs would block each other
        environment["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= variables or {}
    if variables and "PYTHONPYCACHEPREFIX" in variables:  # as on a usual installation, where bytecode is cached
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", f"benchmarks.contest.{module}", json.dumps(spec), str(folder / "result")]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {limit:g} s"}
        finally:
            end_group(process)
    if process.returncode == 0 and (folder / "result").exists():
        found: dict[str, Any] = json.loads((folder / "result").read_text())
        return found
    log_lines = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return {"failed": log_lines[-1][:200] if log_lines else f"exit code {process.returncode}", "log": log_lines[-40:]}


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process group of the contestant, which includes the processes it started (Flower's actors)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
