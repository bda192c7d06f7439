"""Every benchmark at its smallest, and who takes part in one."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from benchmarks import (
    board,
    cpu,
    frozen,
    fuzz,
    gpu,
    gpu_suite,
    hostile,
    kills,
    layout,
    memory,
    net,
    overhead,
    report,
    scale,
    secure,
    soak,
    wire,
)
from benchmarks.contest import crowd, ours, whole
from benchmarks.contest.part import measure
from benchmarks.contest.peers import MissingError
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
    assert "B is not one of --works A" in capsys.readouterr().err


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


@pytest.mark.slow
def test_cpu_compares_the_engines(monkeypatch, capfd):
    words = "--images 60 --clients 2 --rounds 1 --workers 1 --only inline processes"
    lines = printed(monkeypatch, capfd, cpu, words)
    assert float(row(lines, "inline")[0]) >= 0
    assert lines[-1] == "final weights of inline and processes: bit-identical"


@pytest.mark.slow
def test_cpu_has_a_plain_loop(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, cpu, "--images 60 --clients 2 --rounds 1 --only 'plain loop'")
    seconds, _steps, _images, ratio, *_ = row(lines, "plain", "loop")
    assert float(seconds) >= 0 and float(ratio) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_kills_loses_no_client_and_no_round():
    root = Path(kills.__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "1", "--expired", "0", "--rounds", "2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, cwd=root)
    assert done.returncode == 0, done.stdout
    times, _, longest, lost, rounds, equal = row(done.stdout.splitlines(), "server")
    assert (times, lost, rounds, equal) == ("1", "0", "0", "1") and float(longest) < 60


@pytest.mark.slow
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


def in_this_process(spec, folder, limit, module="part", variables=None):
    if module == "whole":
        return whole.run(spec)
    return {"skipped": "not here"} if spec["kind"] == "floor" else measure(spec)


def test_gpu_measures_on_a_cpu_and_shows_its_file_again(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(gpu, "in_process", in_this_process)
    words = f"--device cpu --scale 0.001 --rounds 1 --works A --only plain lanes-tf32 --json {tmp_path}/found.json"
    lines = printed(monkeypatch, capfd, gpu, words)
    assert float(row(lines, "plain")[1]) == 1
    assert float(row(lines, "lanes-tf32")[0]) > 0
    assert printed(monkeypatch, capfd, gpu, f"--show {tmp_path}/found.json") == lines


@pytest.mark.parametrize(
    ("letter", "parameters"), [("P", 1_626_442), pytest.param("Q", 1_206_590, marks=pytest.mark.slow)]
)
def test_gpu_samples_clients_in_works_p_and_q(monkeypatch, capfd, letter, parameters):
    work = WORKS[letter]
    assert sum(p.numel() for p in work.network().parameters()) == parameters
    assert abs(sum(work.sizes()) / work.clients / (work.images / work.per_round) - 1) < 0.02
    monkeypatch.setattr(gpu, "in_process", in_this_process)
    monkeypatch.setattr(gpu, "SHORT", 1)
    words = f"--device cpu --scale 0.001 --rounds 1 --warmup 1 --works {letter} --only plain auto lanes-tf32-cohort7"
    lines = printed(monkeypatch, capfd, gpu, words)
    assert all(float(row(lines, name)[0]) > 0 for name in ("plain", "auto", "lanes-tf32-cohort7"))


def test_the_clients_of_work_q_are_uneven_and_always_the_same():
    sizes = WORKS["Q"].sizes()
    assert len(sizes) == 3400 and 100 < sum(sizes) / 3400 < 200
    assert max(sizes) > 3 * min(sizes) and sizes == WORKS["Q"].sizes()


def test_a_variant_is_an_engine_section():
    assert ours.engine("auto", "cuda", None) == {"name": "auto"}
    tuned = {"name": "lanes", "device": "cuda", "precision": "tf32", "compile": True, "cohort": 50, "workers": 2}
    assert ours.engine("lanes-tf32-compile-cohort50@2", "cuda", None) == tuned


def test_gpu_resumes_contestant_by_contestant(monkeypatch, capfd, tmp_path):
    measured = []

    def result(spec, folder, limit):
        measured.append(spec.get("name", spec["kind"]))
        if spec["kind"] == "floor" or spec["name"] == "auto":
            return {"failed": "out of memory"}
        return {"seconds": [1.0], "steps": 1, "images": 1, "memory": None, "warmup": 1.0, "loss": None}

    monkeypatch.setattr(gpu, "in_process", result)
    words = f"--works P --pfl somewhere --json {tmp_path}/found.json --resume --only plain"
    printed(monkeypatch, capfd, gpu, words)
    lines = printed(monkeypatch, capfd, gpu, f"{words} pfl auto")
    assert measured == ["floor", "plain", "pfl", "auto"]  # none of them twice
    assert row(lines, "pfl")[:3] == ["1.000", "1.00", "1.00"]  # × plain, × pfl
    printed(monkeypatch, capfd, gpu, f"{words} pfl auto --retry")
    assert measured[4:] == ["floor", "auto"]
    with pytest.raises(SystemExit) as stopped:
        printed(monkeypatch, capfd, gpu, f"{words} lanes-tf32 --time 1")
    assert stopped.value.code == gpu.UNFINISHED and measured[6:] == []
    assert "not measured, continue with --resume: P lanes-tf32" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="was measured with {'scale': 1}"):
        printed(monkeypatch, capfd, gpu, f"{words} --scale 0.1")


@pytest.mark.slow
def test_gpu_times_a_whole_training(monkeypatch, capfd):
    monkeypatch.setattr(gpu, "in_process", in_this_process)
    words = "--device cpu --scale 0.002 --works --whole auto lanes-bf16-compile"
    lines = printed(monkeypatch, capfd, gpu, words)
    assert "3 rounds, evaluation of 20 test images every 10 rounds" in "".join(lines)
    names = ["auto"], ["lanes-bf16-compile,", "cold", "cache"], ["lanes-bf16-compile,", "warm", "cache"]
    for name in names:
        seconds, *_, accuracy = row(lines, *name)
        assert float(seconds) > 0 and 0 <= float(accuracy) <= 1


def test_gpu_skips_pfl_research_where_it_is_not(tmp_path):
    spec = {"kind": "work", "work": "P", "name": "pfl", "scale": 0.001, "device": "cpu", "warmup": 1, "rounds": 1}
    for folder, why in ((None, "--pfl FOLDER is not given"), (str(tmp_path), "does not contain pfl")):
        with pytest.raises(MissingError, match=why):
            measure(spec | {"pfl": folder})


@pytest.mark.skipif("FEDLOOM_PFL" not in os.environ, reason="needs pfl-research in the folder $FEDLOOM_PFL")
def test_gpu_has_pfl_research_train_work_p(tmp_path):
    spec = {"kind": "work", "work": "P", "name": "pfl", "scale": 0.001, "device": "cpu", "warmup": 1, "rounds": 2}
    found = gpu.in_process(spec | {"pfl": os.environ["FEDLOOM_PFL"], "lanes": None}, tmp_path, limit=60)
    assert len(found["seconds"]) == 2 and found["steps"] == 10 and 0 < found["loss"] < 5


@pytest.mark.slow
def test_gpu_suite_keeps_tests_and_benchmarks_of_a_commit(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(gpu, "in_process", lambda spec, folder, limit: {"skipped": "not here"})
    words = f"--commit 0123456789abcdef --results {tmp_path} --mark 'not cuda' --tests tests/losses/test_cosines.py"
    lines = printed(monkeypatch, capfd, gpu_suite, f"{words} -- --device cpu --works P --only plain")
    assert lines[1].startswith("tests: ") and " passed, in " in lines[1] and "failed" not in lines[1]
    assert row(lines, "plain") == ["skipped:", "not", "here"]
    found = json.loads((tmp_path / "0123456789ab.json").read_text())
    assert found["machine"]["torch"] == torch.__version__ and len(found["calls"]) == 1
    assert {test["outcome"] for test in found["tests"].values()} == {"passed"}


def test_gpu_suite_says_what_is_left(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(gpu_suite, "collected", lambda options: (["tests/test_a.py::test_a"], []))
    words = f"--commit 0123456789abcdef --results {tmp_path} --time 1"
    with pytest.raises(SystemExit) as stopped:
        printed(monkeypatch, capfd, gpu_suite, words)
    assert stopped.value.code == gpu.UNFINISHED
    assert "unfinished, run the same command again: 1 tests" in capfd.readouterr().err


@pytest.mark.slow
def test_overhead_holds_an_engine_against_a_plain_loop(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, overhead, "--clients 4 --rounds 1 --workers 1 --engines processes")
    assert row(lines, "plain")[3:] == ["1.00", "0"]
    assert float(row(lines, "processes")[1]) > 0


def test_gpu_counts_the_clients_of_a_crowd(monkeypatch):
    monkeypatch.setattr(crowd, "PER_ROUND", 2)
    monkeypatch.setattr(crowd, "ROUNDS", 1)
    found = crowd.run("fedavg", 4, "lanes-tf32", "cpu", None, 0.001)
    assert (found["clients"], found["seen"], len(found["seconds"])) == (4, 2, 1)
    assert row(crowd_table({"few": found}), "few")[:2] == ["4", "2"]


def test_gpu_tells_why_a_contestant_failed(tmp_path):
    found = gpu.in_process({"kind": "none", "device": "cpu"}, tmp_path, limit=60)
    assert found["failed"] == "KeyError: 'scale'"


@pytest.mark.slow
def test_hostile_compares_defences_and_continues_with_missing_runs(monkeypatch, capfd, tmp_path):
    words = f"--methods fedavg --rounds 1 --defences median --store {tmp_path}/cells.jsonl --attacks none"
    assert printed(monkeypatch, capfd, hostile, f"{words} backdoor --seeds 0 --status")[0].startswith("0 of 2 runs")
    printed(monkeypatch, capfd, hostile, f"{words} --seeds 0")
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"method": "fed')  # the benchmark was killed while it wrote
    file_before = (tmp_path / "cells.jsonl").read_text()
    assert printed(monkeypatch, capfd, hostile, f"{words} backdoor --seeds 0 --status")[0].startswith("1 of 2 runs")
    assert (tmp_path / "cells.jsonl").read_text() == file_before


def test_hostile_shows_sample_deviations_and_failed_runs():
    assert hostile.shown([0.1, 0.3]) == "20.0 ± 14.1"  # n − 1: the population deviation would be 10.0
    assert hostile.shown([0.5]) == "50.0"
    assert hostile.shown([0.5, None]) == "1 of 2 failed"
    assert hostile.shown([]) == "–"


@pytest.mark.slow
def test_memory_has_a_row_for_each_number_of_clients(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, memory, "--clients 4 --rounds 1 --methods local")
    assert row(lines, "local", "4")[0] == "4"


@pytest.mark.slow
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


@pytest.mark.slow
def test_soak_ends_a_run_and_finds_nothing_different():
    words = "--rounds 4 --ends 1 --every 2 --engines inline --method fedavg --fork"
    command = [sys.executable, soak.__file__, *shlex.split(words)]  # not here: it forks
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    _ended, _redone, _failed, differing, left, *_ = row(done.stdout.splitlines(), "inline")
    assert (differing, left) == ("0", "0")


def test_frozen_counts_bytes_and_seconds(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, frozen, "--models mlp --rounds 1 --limit 60 --size 8")
    extractor, head, adapters = 4 * (65 * 128 + 129 * 64), 4 * (64 + 1) * 10, 4 * 8 * (64 + 128 + 128 + 64)
    sent = {kind: int(row(lines, "mlp", *kind.split())[0].replace(",", "")) for kind in frozen.KINDS}
    assert sent["trained"] == extractor + head
    assert sent["LoRA, rank 8"] == adapters + head
    assert sent["frozen, cached"] == sent["frozen, recomputed"] == sent["frozen, augmented"] == head
    assert [row(lines, "mlp", "frozen,", kind)[-1] for kind in ("cached", "recomputed", "augmented")] == [
        "cached", "recomputed", "recomputed"
    ]  # fmt: skip


def test_layouts_are_compared_and_our_pooling_keeps_the_weights(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, layout, "--models cnn2 mlp --batches 2 --steps 1 --repeats 1")
    assert row(lines, "cnn2", "2")[3] in ("yes", "no")
    assert row(lines, "mlp", "2")[3] == "yes"
    monkeypatch.setattr(layout.MaxPool2d, "forward", lambda self, x: x[..., ::2, ::2])
    with pytest.raises(SystemExit, match="MaxPool2d changes the weights"):
        printed(monkeypatch, capfd, layout, "--models cnn2 --batches 2 --steps 1 --repeats 1")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed (apt-get install chromium)")
def test_report_measures_a_page_in_a_browser(monkeypatch, capfd, tmp_path):
    words = f"--methods 2 --clients 4 --seeds 1 --repeats 1 --out {tmp_path}/report.html"
    lines = printed(monkeypatch, capfd, report, words)
    assert lines[0] == "2 methods, 4 clients, 1 seeds"
    assert 0 < float(row(lines, "load", "event")[0]) <= float(row(lines, "first", "figure")[0])
    assert float(row(lines, "file")[0]) == pytest.approx((tmp_path / "report.html").stat().st_size / 1e6, abs=0.01)


def test_wire_counts_bytes(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, wire, "--methods fedavg --seeds 0 --rounds 1 --forms none/none int8/int8")
    assert row(lines, "fedavg", "none", "none")[2] == "1.0"
    assert float(row(lines, "fedavg", "int8", "int8")[2]) > 3


def test_secure_counts_bytes_beside_plain(monkeypatch, capfd):
    lines = printed(monkeypatch, capfd, secure, "--members 4 --parameters 1000 --dropouts")
    assert row(lines, "4", "0", "plain")[0] == "4,000"
    assert 4000 < int(row(lines, "4", "1", "32", "bits")[0].replace(",", "")) < 6000
    assert 8000 < int(row(lines, "4", "1", "64", "bits")[0].replace(",", "")) < 10_000


def test_the_net_records_runs_and_compares_them(tmp_path, monkeypatch):
    monkeypatch.setattr(net.logging, "disable", lambda level: None)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    recorded = net.record(("inline",), "inline fedavg resume")
    assert [len(value) for value in recorded.values()] == [16]  # a run, not a refusal
    for file, value in ((first, recorded), (second, dict.fromkeys(recorded, "0" * 16))):
        file.write_text(json.dumps(value))
    assert net.main(["compare", str(first), str(first)]) == 0
    assert net.main(["compare", str(first), str(second)]) == 1


def test_a_case_of_the_net_does_not_change_others(tmp_path):
    case, before = dict(net.cases(("inline",)))["inline table simclr"], deepcopy(net.BASE)
    assert len(net.outcome(case, tmp_path / "run")) == 16
    assert before == net.BASE
    assert "arrays" in case


@pytest.mark.slow
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


def test_board_extrapolates_to_2000_rounds_and_says_what_is_missing():
    found = {"fedloom": {"seconds": [1.0, 3.0, 2.0]}, "pfllib": {"seconds": [18.0]}}
    assert board.row("fedavg", found).split() == ["fedavg", "2.000", "1.11", "18.000", "10.00", "9.0"]
    assert board.row("ditto", found | {"pfllib": {"skipped": "no"}}).endswith("pfllib: no")


@pytest.mark.slow
def test_board_measures_fedloom_and_skips_pfllib_where_it_is_not(monkeypatch, capsys):
    words = ["--dataset", "fashion-mnist", "--samples", "1500", "--rounds", "1", "--engine", "inline"]
    monkeypatch.setattr(sys, "argv", ["board", *words, "--methods", "fedavg"])
    board.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("fedavg")
    assert "--pfllib PATH is not given" in line
