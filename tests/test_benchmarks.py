"""Every benchmark at its smallest, and who takes part in one."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cpu, fuzz, gpu, hostile, memory, net, overhead, scale, soak, wire
from benchmarks.contest import crowd
from benchmarks.contest.part import measure
from benchmarks.contest.table import crowd_table
from benchmarks.contest.works import WORKS
from benchmarks.gpu import arguments, contestants


def asked(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    return arguments()


def test_a_contestant_may_be_asked_for_in_one_work(monkeypatch):
    options = asked(monkeypatch, "--works", "A", "B", "--only", "plain", "lanes-tf32*", "B:lanes-bf16-cohort7@3")
    assert contestants(WORKS["A"], options) == ["plain", "lanes-tf32"]
    assert contestants(WORKS["B"], options) == ["plain", "lanes-tf32", "lanes-bf16-cohort7@3"]


def test_a_work_that_is_not_run_has_no_contestants(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        asked(monkeypatch, "--works", "A", "--only", "B:plain")
    assert "B is none of --works A" in capsys.readouterr().err


def printed(monkeypatch, capfd, script, words):
    """The lines that a benchmark prints, run in this process."""
    monkeypatch.setattr(sys, "argv", [script.__file__, *shlex.split(words)])
    threads = torch.get_num_threads()
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
    return capfd.readouterr().out.splitlines()


def row(lines, *beginning):
    """The cells of the only line that begins like this, after its beginning."""
    found = [cells for line in lines if tuple((cells := line.split())[: len(beginning)]) == beginning]
    assert len(found) == 1, lines
    return found[0][len(beginning) :]


def test_overhead_compares_processes_with_inline(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, overhead, "--methods fedavg --workers 1 --clients 3 --turns 1")
    assert float(row(lines, "fedavg", "inline,", "1")[0]) > 0
    assert float(row(lines, "fedavg", "processes,", "1")[0]) > 0


def test_cpu_compares_the_engines(monkeypatch, capfd):
    words = "--images 60 --clients 2 --rounds 1 --workers 1 --only inline processes"
    lines = printed(monkeypatch, capfd, cpu, words)
    assert float(row(lines, "inline")[0]) >= 0
    assert lines[-1] == "final weights of inline and processes: bit-identical"


def test_cpu_has_a_plain_loop(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, cpu, "--images 60 --clients 2 --rounds 1 --only 'plain loop'")
    seconds, _steps, _images, ratio, *_ = row(lines, "plain", "loop")
    assert float(seconds) >= 0 and float(ratio) == 1


def test_fuzz_has_a_row_for_each_format_and_finds_nothing(tmp_path):
    words = f"--inputs 300 --format npz jobs ledger --workers 2 --findings {tmp_path}/found"
    command = [sys.executable, "-m", "benchmarks.fuzz", *shlex.split(words)]  # not here: it forks, and limits memory
    root = Path(fuzz.__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, cwd=root)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [row(lines, name)[3] for name in ("npz", "jobs", "ledger")] == ["0", "0", "0"]
    assert row(lines, "all")[0] == "300"


def test_fuzz_saves_what_is_neither_refused_nor_valid(tmp_path):
    def fails(data):
        raise KeyError("x")

    target = fuzz.Target("a format", [b"abc"], fails)
    assert fuzz.outcome(target, 0, 3, tmp_path) == "other"
    assert (tmp_path / "a-format-3.input").read_bytes() == target.input(0, 3)
    assert "KeyError: 'x'" in (tmp_path / "a-format-3.txt").read_text()


def test_fuzz_gives_every_format_its_least_number(tmp_path):
    known = {n: fuzz.Target(n, [b""], len, weight=w) for n, w in (("a", 0), ("b", 3), ("c", 1))}
    found = fuzz.shares(known, 10**6)
    assert found["a"] == 10_000 and found["b"] > 2.5 * found["c"] and sum(found.values()) == 10**6


def test_gpu_measures_on_a_cpu_and_shows_its_file_again(monkeypatch, capfd, tmp_path):
    def here(spec, folder, limit):
        return {"skipped": "not here"} if spec["kind"] == "floor" else measure(spec)

    monkeypatch.setattr(gpu, "in_process", here)
    words = f"--device cpu --scale 0.001 --rounds 1 --works A --only plain lanes-tf32 --json {tmp_path}/found.json"
    lines = printed(monkeypatch, capfd, gpu, words)
    assert float(row(lines, "plain")[1]) == 1
    assert float(row(lines, "lanes-tf32")[0]) > 0
    assert printed(monkeypatch, capfd, gpu, f"--show {tmp_path}/found.json") == lines


def test_gpu_counts_the_clients_of_a_crowd(monkeypatch):
    monkeypatch.setattr(crowd, "PER_ROUND", 2)
    monkeypatch.setattr(crowd, "ROUNDS", 1)
    found = crowd.run("fedavg", 4, "lanes-tf32", "cpu", None, 0.001)
    assert (found["clients"], found["seen"], len(found["seconds"])) == (4, 2, 1)
    assert row(crowd_table({"few": found}), "few")[:2] == ["4", "2"]


def test_gpu_tells_why_a_contestant_failed(tmp_path):
    found = gpu.in_process({"kind": "none", "device": "cpu"}, tmp_path, limit=60)
    assert found["failed"] == "KeyError: 'scale'"


def test_hostile_compares_rules(monkeypatch, capfd):
    words = "--methods fedavg --seeds 0 --strengths 10 --rounds 1 --workers 1 --rules median"
    lines = printed(monkeypatch, capfd, hostile, words)
    assert len(row(lines, "median")) == 6  # mean ± std, without an attack and with it


def test_memory_has_a_row_for_each_number_of_clients(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, memory, "--clients 4 --rounds 1 --methods local")
    assert row(lines, "local", "4")[0] == "4"


def test_scale_clients(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, scale, "clients --clients 4 --rounds 1 --methods local")
    assert row(lines, "local", "4")[0] == "4"


def test_scale_engines(monkeypatch, capfd):
    monkeypatch.setattr(scale, "PER_ROUND", 2)
    lines = printed(monkeypatch, capfd, scale, "engines --engines inline processes --models mlp --turns 1")
    assert row(lines, "mlp")[-1] == "(1.00)"


def test_scale_bytes(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, scale, "bytes --methods fedavg fedproto")
    assert row(lines, "fedavg")[-1] == "0"
    assert row(lines, "fedproto")[-1] == "80"


def test_scale_server(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, scale, "server --megabytes 1 --messages 2")
    assert len(row(lines, "2")) == 3


def test_soak_ends_a_run_and_finds_nothing_different():
    words = "--rounds 4 --ends 1 --every 2 --engines inline --method fedavg --fork"
    command = [sys.executable, soak.__file__, *shlex.split(words)]  # not here: it forks
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    _ended, _redone, _failed, differing, left, *_ = row(done.stdout.splitlines(), "inline")
    assert (differing, left) == ("0", "0")


def test_wire_counts_bytes(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, wire, "--methods fedavg --seeds 0 --rounds 1 --forms none/none int8/int8")
    assert row(lines, "fedavg", "none", "none")[2] == "1.0"
    assert float(row(lines, "fedavg", "int8", "int8")[2]) > 3


def test_the_net_finds_two_recordings_of_this_tree_equal_and_others_different(tmp_path, capfd):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for file in (first, second):
        words = ["record", str(file), "--engines", "inline", "--only", "inline fedavg r", "--processes", "1"]
        assert net.main(words) == 0
    found = json.loads(first.read_text())
    assert {"inline fedavg resume", "inline fedavg robust median"} <= found.keys()
    assert all(len(value) == 16 for value in found.values())  # runs, none refused
    assert net.main(["compare", str(first), str(second)]) == 0
    second.write_text(json.dumps(found | {"inline fedavg resume": "0" * 16}))
    assert net.main(["compare", str(first), str(second)]) == 1
    assert "inline fedavg resume" in capfd.readouterr().out
