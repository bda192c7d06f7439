"""Fuzzing of every decoder with mutated inputs, within 2 GB: how many are refused with our errors or valid.

python -m benchmarks.fuzz --inputs 1000000
python -m benchmarks.fuzz --inputs 20000 --format npz 'checkpoint manifest' --seed 7

Any other outcome (another exception, a crash, a hang) is a finding: the input is saved, and the exit code is 1.
"""

import argparse
import logging
import multiprocessing
import os
import resource
import shutil
import sys
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import mkdtemp
from time import monotonic, perf_counter
from typing import Any

import torch

from tests.fuzz.targets import REFUSALS, Target, targets

MEMORY = 2 * 2**30
PIECE = 500
"""Number of inputs that a worker gets at a time."""
HANG = 60.0
"""Seconds after which an input counts as a hang."""
LEAST = 10_000
"""Smallest number of inputs per format for a million inputs; proportionally fewer otherwise."""


@dataclass
class Tally:
    """Outcomes of a format's inputs."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass
class Worker:
    """A decoding process; it writes the number of its current input into shared memory."""

    process: Any
    pipe: Connection
    at: Any
    piece: tuple[str, int, int] | None = None
    since: float = 0.0
    last: int = -1


def limit_memory() -> None:
    """Limit this process to 2 GB in total, including what it already uses."""
    pages = [int(part) for part in Path("/proc/self/statm").read_text().split()]
    page = os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (pages[5] * page + max(0, MEMORY - pages[1] * page), hard))


def work(pipe: Connection, at: Any, seed: int, findings: Path) -> None:
    """Decode pieces until there are none left."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    folder = Path(mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        known = targets(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C libraries print a message for every damaged image
        limit_memory()
        pipe.send(None)
        while (piece := pipe.recv()) is not None:
            name, start, stop = piece
            counts: Counter[str] = Counter()
            begun = perf_counter()
            for number in range(start, stop):
                at.value = number
                counts[outcome(known[name], seed, number, findings)] += 1
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            pipe.send((name, counts, perf_counter() - begun, peak))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outcome(target: Target, seed: int, number: int, findings: Path) -> str:
    """Decode one input and return its outcome."""
    data = target.input(seed, number)
    try:
        target.decode(data)
    except REFUSALS:
        return "refused"
    except (Exception, SystemExit, MemoryError):
        save(findings, target.name, number, data, traceback.format_exc())
        return "other"
    return "valid"


def save(findings: Path, name: str, number: int, data: bytes, why: str) -> None:
    """Save an input that was neither refused nor valid, with the traceback or reason."""
    findings.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace(' ', '-').replace('/', '-')}-{number}"
    (findings / f"{stem}.input").write_bytes(data)
    (findings / f"{stem}.txt").write_text(why, encoding="utf-8", errors="backslashreplace")


def shares(known: dict[str, Target], inputs: int) -> dict[str, int]:
    """Return the number of inputs of each format: a minimum, and the rest by weight."""
    least = min(LEAST * inputs // 10**6, inputs // len(known))
    rest, weights = inputs - least * len(known), sum(target.weight for target in known.values())
    found = {name: least + int(rest * target.weight / weights) for name, target in known.items()}
    found[max(found, key=lambda name: found[name])] += inputs - sum(found.values())
    return found


def start(context: Any, seed: int, findings: Path) -> Worker:
    """Start a worker, and wait until it is ready."""
    mine, theirs = context.Pipe()
    at = context.Value("q", -1, lock=False)
    process = context.Process(target=work, args=(theirs, at, seed, findings), daemon=True)
    process.start()
    theirs.close()
    mine.recv()
    return Worker(process, mine, at)


def fuzz(
    known: dict[str, Target], inputs: int, seed: int, workers: int, findings: Path
) -> tuple[dict[str, Tally], int]:
    """Decode all inputs, and return their outcomes by format and the peak memory of a worker."""
    context = multiprocessing.get_context("fork")
    wanted = shares(known, inputs)
    pieces = [(n, a, min(a + PIECE, count)) for n, count in wanted.items() for a in range(0, count, PIECE)]
    pieces.sort(key=lambda piece: (piece[1], piece[0]))  # interleave the formats
    pieces.reverse()
    tallies = {name: Tally() for name in known}
    pool = [start(context, seed, findings) for _ in range(workers)]
    begun, shown, done, peak = monotonic(), monotonic(), 0, 0
    while pieces or any(worker.piece for worker in pool):
        for worker in pool:
            if worker.piece is None and pieces:
                worker.piece, worker.since, worker.last = pieces.pop(), monotonic(), -1
                worker.pipe.send(worker.piece)
        ready = wait([worker.pipe for worker in pool if worker.piece], timeout=1)
        for index, worker in enumerate(pool):
            if worker.piece is None:
                continue
            name, _, stop = worker.piece
            answer = None
            if worker.pipe in ready:
                with suppress(EOFError, ConnectionError):
                    answer = worker.pipe.recv()
            if answer is not None:
                _, counts, seconds, size = answer
                tallies[name].counts += counts
                tallies[name].seconds += seconds
                peak, done, worker.piece = max(peak, size), done + counts.total(), None
                continue
            if worker.at.value != worker.last:
                worker.last, worker.since = worker.at.value, monotonic()
            dead = worker.pipe in ready or not worker.process.is_alive()
            if dead or monotonic() - worker.since > HANG:
                number = worker.at.value
                worker.process.kill()
                worker.process.join()
                why = f"the process ended with {worker.process.exitcode}" if dead else f"more than {HANG:.0f} s"
                save(findings, name, number, known[name].input(seed, number), why)
                tallies[name].counts["other"] += 1  # earlier inputs of the same piece are not counted
                if number + 1 < stop:
                    pieces.append((name, number + 1, stop))
                pool[index] = start(context, seed, findings)
        if monotonic() - shown > 15:
            shown = monotonic()
            other = sum(tally.counts["other"] for tally in tallies.values())
            rate = done / (shown - begun)
            print(
                f"{done:,} of {inputs:,} inputs, {rate:,.0f} per second, {other} findings", file=sys.stderr, flush=True
            )
    for worker in pool:
        worker.pipe.send(None)
        worker.process.join(10)
    return tallies, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--format", nargs="+", help="only these formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="folder for inputs with other outcomes"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(mkdtemp(prefix="fuzz-"))
    known = targets(folder)
    if unknown := set(options.format or ()) - known.keys():
        parser.error(f"--format {min(unknown)}: is unknown; choose from {', '.join(known)}")
    chosen = {name: target for name, target in known.items() if not options.format or name in options.format}
    begun = monotonic()
    tallies, peak = fuzz(chosen, options.inputs, options.seed, options.workers, options.findings.resolve())
    shutil.rmtree(folder, ignore_errors=True)
    took = monotonic() - begun
    width = max(map(len, [*chosen, "format"]))
    print(f"{'format':{width}}     inputs    refused      valid      other   ms/input")
    for name, tally in tallies.items():
        row(width, name, tally.counts, tally.seconds)
    whole = sum((tally.counts for tally in tallies.values()), Counter())
    row(width, "all", whole, sum(tally.seconds for tally in tallies.values()))
    print(f"seed {options.seed}, {took:,.0f} s, {options.workers} workers; peak memory of a worker {peak / 1e9:.2f} GB")
    if whole["other"]:
        print(f"findings: {options.findings}")
        sys.exit(1)


def row(width: int, name: str, counts: Counter[str], seconds: float) -> None:
    total = counts.total()
    cells = "".join(f"{value:>11,}" for value in (total, counts["refused"], counts["valid"], counts["other"]))
    print(f"{name:{width}}{cells}{1000 * seconds / max(1, total):>11.2f}")


if __name__ == "__main__":
    main()
