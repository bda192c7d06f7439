"""Who takes part in a benchmark."""

import sys

import pytest

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
