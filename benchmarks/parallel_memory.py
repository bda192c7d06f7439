"""Memory of parallel runs of one comparison, which share the data: proportional set sizes while all of them train.

    python -m benchmarks.parallel_memory [--images 260000] [--runs 2]

Images are random, 3×32×32 bytes each. A page that several processes map counts in equal parts for each of them (PSS),
so that the sum is the memory that they take together. Linux only.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SETTLED = 3
"""Seconds between the first rounds and the measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=260_000)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "images.npz"), Path(folder, "compared")
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (options.images, 3, 32, 32), dtype=np.uint8)
        np.savez(data, x=images, y=rng.integers(0, 10, options.images))
        print(f"data {images.nbytes / 2**20:.0f} MiB, {options.runs} runs")
        print(f"{'process':<12}{'PSS, MiB':>10}{'RSS, MiB':>10}")
        process = start(data, out, options.runs)
        try:
            sizes = measure(process, out, options.runs)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    for name, (pss, rss) in sizes.items():
        print(f"{name:<12}{pss:>10.0f}{rss:>10.0f}")
    print(f"{'sum':<12}{sum(pss for pss, _ in sizes.values()):>10.0f}")


def start(data: Path, out: Path, runs: int) -> subprocess.Popen[bytes]:
    """Start a comparison of several seeds that trains until it is stopped."""
    flags = {
        "methods": "fedavg", "seeds": ",".join(map(str, range(runs))), "parallel": str(runs), "data": str(data),
        "clients": "50", "partition": "iid", "rounds": "100000", "fraction": "0.02", "out": str(out),
        "set": "evaluation.every=100000",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "fedloom", "compare", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(process: subprocess.Popen[bytes], out: Path, runs: int) -> dict[str, tuple[float, float]]:
    """Return PSS and RSS of the comparison's process and of each run, when all runs have finished a round."""
    while sum(os.path.getsize(file) > 0 for file in out.glob("*/metrics.jsonl")) < runs:
        if process.poll() is not None:
            raise SystemExit(f"the comparison ended with exit code {process.returncode}")
        time.sleep(0.5)
    time.sleep(SETTLED)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return {"compare": sizes(process.pid)} | {f"run {i}": sizes(int(pid)) for i, pid in enumerate(children)}


def sizes(pid: int) -> tuple[float, float]:
    """Return PSS and RSS of a process in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    pss, rss = (re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("Pss", "Rss"))
    assert pss is not None
    assert rss is not None
    return int(pss[1]) / 1024, int(rss[1]) / 1024


if __name__ == "__main__":
    main()
