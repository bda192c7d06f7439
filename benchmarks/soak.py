"""Soak test: a run with faults is ended at random moments and resumed; nothing may be lost, and memory may not grow.

    python benchmarks/soak.py [--rounds 500] [--ends 20] [--engines inline processes] [--method ditto]

For each engine there is one undisturbed run, and one that is ended `--ends` times and resumed (by SIGKILL, SIGTERM, or
Ctrl-C to the process group; signals and moments are drawn from `--seed`). Clients drop out, crash (with their worker,
if they have one), send NaN and are slow; their memory spills to disk. At the end both folders must contain the same
files with the same contents, apart from timings, and no worker may be left. The exit code is 1 if anything differs or
memory grew.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
WAYS = [signal.SIGKILL] * 3 + [signal.SIGTERM, signal.SIGINT]
FIELDS = {
    "data.name": "digits", "data.clients": 10, "data.limit": 300, "training.fraction": 0.5, "evaluation.every": 50,
    "faults.drop": 0.05, "faults.nan": 0.05, "faults.crash": 0.02, "faults.slow": 0.05, "faults.slow_seconds": 0.01,
    "storage.memory_mb": 1, "engine.workers": 2,
}  # fmt: skip
GROWTH = 16
"""Megabytes by which a process may grow from the second to the last tenth of a run, to allow for allocator noise."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--ends", type=int, default=20, help="number of times that the run is killed or stopped")
    parser.add_argument("--engines", nargs="+", default=["inline", "processes"])
    parser.add_argument("--method", default="ditto")
    parser.add_argument("--every", type=int, default=10, help="storage.checkpoint_every")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and signals that end the run")
    parser.add_argument(
        "--fork", action="store_true", help="fork processes instead of starting Python each time: faster"
    )
    options = parser.parse_args()
    if options.fork:
        sys.path.insert(0, str(ROOT))
        import fedloom.cli  # noqa: F401 (before forking, so that forked processes need not import it)
    print(f"{options.method}, {options.rounds} rounds, a checkpoint every {options.every}, ended {options.ends} times")
    head = ("engine", "KILL/TERM/INT", "redone", "failed", "differ", "left", "RSS MB", "peak MB", "seconds")
    print("{:<11}{:>13}{:>8}{:>8}{:>8}{:>6}{:>16}{:>16}{:>9}".format(*head))
    with tempfile.TemporaryDirectory(prefix="fedloom-soak-") as folder:
        good = [soak(engine, Path(folder) / engine, options) for engine in options.engines]
    print(
        "redone: rounds repeated after a kill; failed: clients left out of a round; differ: files that differ from\n"
        "the undisturbed run's, apart from timings; left: leftover files and workers; RSS: largest process of the\n"
        "undisturbed run, second tenth → last tenth (medians); peak: of the first segment → of the last segment"
    )
    sys.exit(not all(good))


def soak(engine: str, folder: Path, options: argparse.Namespace) -> bool:
    """Print one row of the table, and return whether the engine passed."""
    begun = time.monotonic()
    fields = FIELDS | {"method.name": options.method, "engine.name": engine, "training.rounds": options.rounds}
    fields |= {"storage.checkpoint_every": options.every, "storage.final_checkpoint": False}
    recipe = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    whole, run = folder / "whole", folder / "run"
    sizes = Segment(whole, recipe, options.fork).finish()
    draw = random.Random(f"{options.seed} {engine}")
    peaks, left, redone, ways = [], 0, 0, Counter[int]()
    for moment in sorted(draw.sample(range(1, options.rounds), options.ends)):
        segment = Segment(run, recipe, options.fork)
        segment.watch(moment)
        time.sleep(draw.random() * 0.1)  # at any moment of a round, or while files are written after it
        way = draw.choice(WAYS)
        left += segment.end(way)
        peaks.append(max(segment.sizes, default=0))
        redone += lines(run) - newest(run)
        ways[way] += 1
    peaks.append(max(Segment(run, recipe, options.fork).finish(), default=0))
    expected, found = contents(whole), contents(run)
    differing = [name for name in expected if found.get(name) != expected[name]]
    stray = sorted(found.keys() - expected.keys())
    tenth = max(1, len(sizes) // 10)
    early, late = statistics.median(sizes[tenth : 2 * tenth] or sizes), statistics.median(sizes[-tenth:])
    failed = sum(json.loads((whole / "summary.json").read_text())["failed"].values())
    print(
        f"{engine:<11}{'/'.join(str(ways[way]) for way in CODES):>13}{redone:>8}{failed:>8}{len(differing):>8}"
        f"{left + len(stray):>6}{f'{early:.1f} → {late:.1f}':>16}{f'{peaks[0]:.1f} → {peaks[-1]:.1f}':>16}"
        f"{time.monotonic() - begun:>9.0f}",
        *(f"  {name}" for name in [*differing, *stray]),
        sep="\n",
    )
    return not (differing or stray or left) and late - early < GROWTH and peaks[-1] - peaks[0] < GROWTH


class Segment:
    """A process that starts or resumes the run in a folder; `sizes` has its memory in megabytes for each round."""

    def __init__(self, run: Path, recipe: list[str], fork: bool):
        self.run, self.sizes = run, list[float]()
        self._before = identity(run / "metrics.jsonl")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        arguments = ["run", *recipe, "--out", str(run), "--resume"]
        self._process = Forked(arguments, self._output) if fork else subprocess.Popen(
            [sys.executable, "-m", "fedloom", *arguments], stdout=subprocess.DEVNULL, stderr=self._output,
            start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def watch(self, rounds: int | None = None) -> None:
        """Wait until the process has taken over the folder and finished `rounds` rounds, or until it ends."""
        seen = -1
        while self._process.poll() is None:
            begun = identity(self.run / "metrics.jsonl") not in (None, self._before)
            now = lines(self.run) if begun else -1
            if rounds is not None and now >= rounds:
                return
            if now > seen:
                seen = now
                self.sizes.append(max(map(resident, [self._process.pid, *workers(self._process.pid)])))
            time.sleep(0.005)

    def end(self, way: signal.Signals) -> int:
        """End the process with a signal, if it is still running, and return the number of surviving workers."""
        left = workers(self._process.pid)
        if self._process.poll() is not None:  # the run had already finished
            self._check({0})
            return 0
        if way == signal.SIGINT:
            os.killpg(self._process.pid, way)  # like a terminal, which signals the workers too
        else:
            self._process.send_signal(way)
        self._check({0, CODES[way], -way})  # −way: its signal handlers were not installed yet
        deadline = time.monotonic() + 10
        while (left := [pid for pid in left if resident(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return len(left)

    def finish(self) -> list[float]:
        """Wait until the run has finished."""
        self.watch()
        self._check({0})
        return self.sizes

    def _check(self, codes: set[int]) -> None:
        code = self._process.wait(timeout=300)
        self._output.seek(0)
        output = self._output.read().decode()
        self._output.close()
        if code not in codes or "Traceback" in output or (code > 0 and "resume with: fedloom resume" not in output):
            sys.exit(f"exit code {code}:\n{output[-4000:]}")


class Forked:
    """The command in a fork of this process, with the methods of Popen that are used here."""

    def __init__(self, arguments: list[str], output: IO[bytes]):
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code: object = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = ["fedloom", *arguments]
            from fedloom.cli import main as command

            command()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def identity(path: Path) -> int | None:
    """Return the inode of a file, which changes when the file is rewritten, as a resumed run does with its metrics."""
    return path.stat().st_ino if path.exists() else None


def newest(run: Path) -> int:
    """Return the round of the last checkpoint."""
    return max((int(path.stem[6:]) for path in run.glob("checkpoints/round-*.json")), default=0)


def workers(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def resident(pid: int) -> float:
    """Return the current memory of a process in megabytes; 0 if it has ended."""
    try:
        found = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    except OSError:
        return 0.0
    return int(found[0].split()[1]) * 1024 / 1e6 if found else 0.0


def contents(run: Path) -> dict[str, object]:
    """Return the files of a run without timings, the path of its folder, and the log of handled failures."""
    paths = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "log.txt"]
    files: dict[str, object] = {str(path.relative_to(run)): path.read_bytes() for path in paths}
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    files["metrics.jsonl"] = [{k: v for k, v in record.items() if "seconds" not in k} for record in rounds]
    summary = json.loads((run / "summary.json").read_text())
    return files | {"summary.json": {k: v for k, v in summary.items() if k not in ("seconds", "run_dir")}}


if __name__ == "__main__":
    main()
