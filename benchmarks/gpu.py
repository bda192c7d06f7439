"""Many clients on one GPU: `lanes` beside a plain loop, other libraries and the floor, as ratios of one run.

    python -m benchmarks.gpu [--works A B C D E] [--only plain 'lanes*'] [--pfllib PATH] [--methods] [--clients1000]
    python -m benchmarks.gpu --device cpu --scale 0.01 --rounds 1        a trial: inline stands in for lanes

Each contestant is a process of its own, one after another; its first rounds do not count (captures, compilation) and
are told apart as `warm-up`, figures are medians of the others. Evaluation is not counted.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.contest.table import median, report
from benchmarks.contest.works import WORKS, Work

METHODS = ("fedavg", "fedcrl", "fedcrc", "repper", "ditto")
ROOT = Path(__file__).resolve().parents[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="*", choices=list(WORKS), default=list(WORKS), metavar="LETTER")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help="plain, pfllib, fluke, flower, inline, or patterns; "
        "lanes-PRECISION[-cl][-compile][-deterministic][-cohortK][@N]; B:NAME is for work B alone",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="that count; 3 at most for all but lanes")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them; 1 for all but lanes")
    parser.add_argument("--lanes", type=int, help="how many; the engine's own choice if not given")
    parser.add_argument("--scale", type=float, default=1, help="of every work's images, for a trial")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pfllib", metavar="PATH", help="a clone of github.com/TsingZ0/PFLlib")
    parser.add_argument("--methods", action="store_true", help="also: time per image of other methods beside FedAvg")
    parser.add_argument("--clients1000", action="store_true", help="also: GPU memory with 100 and 1,000 clients")
    parser.add_argument("--variant", default="lanes-tf32", metavar="NAME", help="of lanes, for those two")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one contestant may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after every contestant")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print such a file's tables and end")
    options = parser.parse_args()
    for only in options.only or ():
        if only[1:2] == ":" and only[0] not in options.works:
            parser.error(f"--only {only}: {only[0]} is none of --works {' '.join(options.works)}")
    return options


def main() -> None:
    options = arguments()
    if options.show:
        print(report(json.loads(options.show.read_text())))
        return
    shared = {name: getattr(options, name) for name in ("device", "scale", "lanes", "pfllib")}
    if shared["pfllib"]:
        shared["pfllib"] = str(Path(shared["pfllib"]).resolve())
    found: dict[str, Any] = {"command": sys.argv[1:], "scale": options.scale, "works": {}, "methods": {}, "crowd": {}}
    found["floor"] = part("floor", {"kind": "floor", "works": options.works, **shared}, options)
    for letter in options.works:
        results = found["works"][letter] = {}
        for name in contestants(WORKS[letter], options):
            spec = {"kind": "work", "work": letter, "name": name, **rounds(name, options), **shared}
            results[name] = part(f"{letter} {name}", spec, options)
            keep(found, options)
    for method in METHODS if options.methods else ():
        spec = {"kind": "work", "work": "A", "name": options.variant, "method": method, **shared}
        found["methods"][method] = part(method, spec | rounds(options.variant, options), options)
        keep(found, options)
    for method, clients in ((m, c) for m in ("fedavg", "local") for c in (100, 1000) if options.clients1000):
        spec = {"kind": "crowd", "method": method, "clients": clients, "name": options.variant, **shared}
        found["crowd"][f"{method}, {clients}"] = part(f"{method}, {clients} clients", spec, options)
        keep(found, options)
    print(report(found))


def contestants(work: Work, options: argparse.Namespace) -> list[str]:
    """Those of the work, or those that were asked for (a variant of lanes need not be one of the work's)."""
    usual = ["plain", *work.peers, "inline", *work.variants]
    if not options.only:
        return usual if options.pfllib else [name for name in usual if name != "pfllib"]
    here = [only.removeprefix(f"{work.letter}:") for only in options.only if only[1:2] != ":" or only[0] == work.letter]
    asked = [name for name in here if name.startswith("lanes-") and "*" not in name]
    return list(dict.fromkeys([n for n in usual if any(fnmatch(n, pattern) for pattern in here)] + asked))


def rounds(name: str, options: argparse.Namespace) -> dict[str, int]:
    """Lanes capture on several lanes as clients come to them; the others have nothing to prepare, and are slow."""
    if name.startswith("lanes"):
        return {"warmup": max(1, options.warmup), "rounds": options.rounds}
    return {"warmup": 1, "rounds": min(3, options.rounds)}


def keep(found: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def part(title: str, spec: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One measurement in its own process; whatever goes wrong there is its result."""
    start = perf_counter()
    with tempfile.TemporaryDirectory(prefix="fedloom-benchmark-") as folder:
        result = in_process(spec, Path(folder), options.limit)
    seconds = median(result)
    what = f"{seconds:.3f} s a round" if seconds else result.get("skipped") or result.get("failed") or "done"
    print(f"[{perf_counter() - start:6.1f} s] {title}: {what}", file=sys.stderr, flush=True)
    return result


def in_process(spec: dict[str, Any], folder: Path, limit: float) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if spec["device"] == "cpu":  # a trial: threads of several programs would wait for each other
        environment["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "benchmarks.contest.part", json.dumps(spec), str(folder / "result")]
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
    said = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    return {"failed": said[-1][:200] if said else f"exit code {process.returncode}", "log": said[-40:]}


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """The contestant and what it has started (Flower's actors), which are a process group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
