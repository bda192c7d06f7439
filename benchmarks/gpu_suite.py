"""All tests and benchmarks that need a GPU: the tests marked `cuda`, then `benchmarks.gpu`; called by `make gpu`.

    python -m benchmarks.gpu_suite                                      run everything
    python -m benchmarks.gpu_suite --time 560                           stop after 560 s; exit code 3 if unfinished
    python -m benchmarks.gpu_suite --skip tests -- --works P --whole    arguments after -- are options of benchmarks.gpu

Results are stored per commit in benchmarks/results/COMMIT.json. The same command continues where the last one stopped:
tests in groups, benchmarks by contestant. Tests run with the same Python as this command and without installation, so
a machine with torch and pytest is sufficient. `--show` prints the results of a commit.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import gpu
from benchmarks.contest.table import report

RESULTS = gpu.ROOT / "benchmarks" / "results"
MARK = "cuda and not slow"
HOUR = 3600
GROUP = 40
"""Number of tests per pytest process; after an interruption at most this many are repeated."""


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time", type=float, default=float("inf"), help="time limit of this call in seconds")
    parser.add_argument("--skip", choices=("tests", "benchmarks"), help="skip the tests or the benchmarks")
    parser.add_argument("--commit", help="the commit, needed in a copy without .git")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="files or folders with tests")
    parser.add_argument("--mark", default=MARK, help="expression for pytest -m that selects tests")
    parser.add_argument(
        "--parallel", type=int, metavar="N", help="number of parallel tests (pytest-xdist); best with CUDA MPS"
    )
    parser.add_argument("--again", action="store_true", help="discard the stored results of this commit")
    parser.add_argument("--show", action="store_true", help="print the stored results of this commit and exit")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:split]), words[split + 1 :]


def main() -> None:
    options, words = arguments()
    end = perf_counter() + options.time
    known = git("rev-parse", "HEAD")
    commit = options.commit or known
    if not commit:
        raise SystemExit("--commit: needed, since git does not know the current commit")
    file = options.results / f"{commit[:12]}.json"
    found: dict[str, Any] = {}
    if file.exists() and not options.again:
        found = json.loads(file.read_text())
    if options.show:
        print(shown(found))
        return
    changed = bool(git("status", "--porcelain", "--untracked-files=no")) if known else None
    found |= {"commit": commit, "changed": changed, "machine": machine()}
    found.setdefault("calls", []).append({"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "command": sys.argv[1:]})

    def save() -> None:
        options.results.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")

    left: list[str] = []
    if options.skip != "tests":
        names, found["not collected"] = collected(options)
        left += run_tests(names, options.parallel, found.setdefault("tests", {}), end, save)
    if options.skip != "benchmarks" and not left:
        contest = gpu.arguments(words or ["--whole"])
        contest.time = end - perf_counter()
        left += gpu.contest(found.setdefault("benchmarks", {}), contest, save)
    save()
    print(shown(found))
    print(f"stored in {file}", file=sys.stderr)
    if left:
        print(f"unfinished, run the same command again: {', '.join(left)}", file=sys.stderr)
        raise SystemExit(gpu.UNFINISHED)
    if failed(found.get("tests", {})):
        raise SystemExit(1)


def git(*words: str) -> str:
    """Return the output of a git command; empty without git or outside a repository."""
    try:
        done = subprocess.run(["git", *words], cwd=gpu.ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """Describe the hardware and software that the figures depend on."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }


def run_tests(
    names: list[str], parallel: int | None, outcomes: dict[str, Any], end: float, save: Callable[[], object]
) -> list[str]:
    """Run the tests without a stored outcome, and those that were skipped; report how many are left."""
    many = GROUP * (parallel or 1)
    waiting = [name for name in names if outcomes.get(name, {"outcome": "skipped"})["outcome"] == "skipped"]
    while waiting and end - perf_counter() > gpu.LEAST:
        group, start = waiting[:many], perf_counter()
        done = run_group(group, parallel, end - perf_counter())
        if done is None:
            break
        outcomes |= done
        save()
        counts = Counter(outcome["outcome"] for outcome in done.values())
        words = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"[{perf_counter() - start:6.1f} s] tests: {words}", file=sys.stderr, flush=True)
        waiting = waiting[many:]
    return [f"{len(waiting)} tests"] if waiting else []


def pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-q", *words]


def collected(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return pytest's names of the tests, and the files that cannot be imported (because a package is missing)."""
    command = pytest("--collect-only", "-m", options.mark, *options.tests)
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    broken = [line.split()[1] for line in lines if line.startswith("ERROR tests")]
    if done.returncode not in (0, 5) and not broken:  # 5: no tests were found
        raise SystemExit(f"pytest cannot collect the tests:\n{done.stdout}{done.stderr}")
    return [line for line in lines if line.startswith("tests") and "::" in line], broken


def run_group(names: list[str], parallel: int | None, limit: float) -> dict[str, Any] | None:
    """Return the outcome and seconds of each test; None if there was not enough time."""
    with tempfile.TemporaryDirectory(prefix="fedloom-suite-") as folder:
        file = Path(folder) / "found.xml"
        words = ["-o", "junit_family=xunit1", f"--junitxml={file}", *names]
        words += ["-n", str(parallel)] if parallel else []
        try:
            done = subprocess.run(
                pytest(*words), cwd=gpu.ROOT, capture_output=True, text=True, timeout=min(limit, HOUR)
            )
        except subprocess.TimeoutExpired:
            return None
        if not file.exists():
            why = f"pytest ended with exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            return {name: {"outcome": "error", "why": why} for name in names}
        cases = list(ElementTree.parse(file).iter("testcase"))
    found = {name: {"outcome": "missing"} for name in names}
    by_case = {case_of(name): name for name in names}
    for case in cases:
        key = (case.get("file", ""), case.get("name", ""))
        found[by_case.get(key, "::".join(key))] = outcome(case)
    return found


def case_of(name: str) -> tuple[str, str]:
    """Return the file and the function, with its parameters, of a test's name."""
    file, _, rest = name.partition("::")
    return file, rest.rpartition("::")[2] if "[" not in rest else rest[rest.rfind("::", 0, rest.index("[")) + 2 :]


def outcome(case: ElementTree.Element) -> dict[str, Any]:
    seconds = round(float(case.get("time", 0)), 2)
    for kind, word in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
        if (element := case.find(kind)) is not None:
            why = element.get("message", "") if kind == "skipped" else (element.text or "")[-2000:]
            return {"outcome": word, "seconds": seconds, "why": why}
    return {"outcome": "passed", "seconds": seconds}


def failed(tests: dict[str, Any]) -> list[str]:
    return [name for name, test in tests.items() if test["outcome"] not in ("passed", "skipped")]


def shown(found: dict[str, Any]) -> str:
    """Return a text with the counts of tests, the names of failed tests, and the tables of the benchmarks."""
    if not found:
        return "no results are stored for this commit"
    on = found["machine"]
    changed = ", with uncommitted changes" if found["changed"] else ""
    lines = [f"commit {found['commit']}{changed}; {on['gpu'] or 'no GPU'}, torch {on['torch']}, Python {on['python']}"]
    if tests := found.get("tests"):
        counts = Counter(test["outcome"] for test in tests.values())
        seconds = sum(test.get("seconds", 0) for test in tests.values())
        lines.append(f"tests: {', '.join(f'{n} {word}' for word, n in counts.items())}, in {seconds:.0f} s")
        lines += [f"  {tests[name]['outcome']}: {name}" for name in failed(tests)]
        if broken := found.get("not collected"):
            lines.append(f"  cannot be imported here: {', '.join(broken)}")
    if found.get("benchmarks"):
        lines += ["", report(found["benchmarks"])]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
