"""The archive of a queue: a run that was stopped on one machine is finished on another."""

import tarfile
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedloom.cli import commands, study_data
from fedloom.core.errors import UserError
from fedloom.experiment.run_folder import read_rounds
from fedloom.studies.carry import newest, pack, unpack
from fedloom.studies.plan import StudyPlan
from fedloom.studies.queue import Entry, QueuedRun
from fedloom.studies.results import read
from fedloom.studies.running import run_cells

BOARD = """\
title: Small
setting: digits
recipe: {data.clients: 2, data.limit: 100, training.rounds: 4, model: mlp}
axes: {dataset: "data.name={}"}
columns: {dataset: [digits]}
methods: [fedper, local, fedavg]
"""


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two empty folders with a board; the first is the current folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "small.yaml").write_text(BOARD)
    monkeypatch.chdir(tmp_path / "one")
    return tmp_path / "one", tmp_path / "two"


def runs() -> list[QueuedRun]:
    return Entry(name="all", table=("small.yaml",)).runs(StudyPlan(results=Path("kept")))


def run(queued: QueuedRun, seconds: float | None = None) -> QueuedRun:
    deadline = None if seconds is None else monotonic() + seconds
    run_cells(list(queued.cells), StudyPlan(results=Path("kept"), deadline=deadline))
    return queued


def files_in(archive: Path) -> list[str]:
    with tarfile.open(archive) as opened:
        return sorted(opened.getnames())


def continued(*options: str) -> Result:
    Path("queue.yaml").write_text("- {name: all, table: small.yaml}\n")
    ask = ["reproduce", "--queue", "queue.yaml", "--results", "kept", "--json", *options]
    return CliRunner().invoke(commands.app, ask)


def test_a_stopped_run_is_finished_on_another_machine_with_the_same_result(
    machines: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, done, waiting = runs()
    run(stopped, seconds=0)
    run(done)
    assert (stopped.state, done.state, waiting.state) == ("stopped", "done", "waiting")
    size = pack(tmp_path / "back.tar", runs())
    assert size == (tmp_path / "back.tar").stat().st_size
    with tarfile.open(tmp_path / "back.tar") as archive:
        names = archive.getnames()
    assert len([name for name in names if name.startswith("results/small/")]) == 1
    assert not [name for name in names if "models" in name or ".lock" in name]

    monkeypatch.chdir(machines[1])
    assert unpack(tmp_path / "back.tar", Path("kept")) == (1, 1)
    assert [one.state for one in runs()] == ["stopped", "done", "waiting"]
    assert runs()[0].round == 1
    resumed = run(runs()[0]).result.read_text()
    assert "methods/fedper.py" in read(runs()[0].result).code, "hashes of the code that began the run"

    monkeypatch.chdir(machines[0])
    alone = run(runs()[0]).result.read_text()
    figures = [text.partition('"figures"')[2].partition("}")[0] for text in (resumed, alone)]
    assert figures[0] == figures[1] != ""


def test_only_the_newest_checkpoint_is_carried(machines: tuple[Path, Path], tmp_path: Path) -> None:
    stopped = runs()[0]
    for _ in range(2):
        run(stopped, seconds=0)
    assert stopped.recipe.out is not None
    assert len(list(stopped.recipe.out.glob("checkpoints/round-*.json"))) == 2
    pack(tmp_path / "back.tar", [stopped])
    with tarfile.open(tmp_path / "back.tar") as archive:
        assert {name.rpartition("/")[2][:12] for name in archive.getnames() if "checkpoints" in name} == {
            "round-000002"
        }


def test_what_is_further_here_is_kept(machines: tuple[Path, Path], tmp_path: Path) -> None:
    stopped = run(runs()[0], seconds=0)
    pack(tmp_path / "back.tar", [stopped])
    run(stopped, seconds=0)
    assert unpack(tmp_path / "back.tar", Path("kept")) == (0, 0)
    folder = stopped.recipe.out
    assert folder is not None
    assert newest(folder) == 2
    run(stopped)
    assert unpack(tmp_path / "back.tar", Path("kept")) == (0, 0), "finished: it has no checkpoint any more"
    assert len(read_rounds(folder)) == 4


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UserError, match="is not an archive of a queue"):
        unpack(tmp_path / "text", Path("kept"))
    with tarfile.open(tmp_path / "other.tar", "w") as archive:
        archive.add(tmp_path / "text", "results/../../evil")
    with pytest.raises(UserError, match=r"it has 'results/\.\./\.\./evil'"):
        unpack(tmp_path / "other.tar", Path("kept"))
    with pytest.raises(UserError, match="cannot be written"):
        pack(tmp_path / "text" / "back.tar", [])


def test_runs_whose_data_are_not_here_stay_in_the_file(
    machines: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, done, _ = runs()
    run(stopped, seconds=0)
    run(done)
    pack(tmp_path / "back.tar", runs())
    carried = files_in(tmp_path / "back.tar")
    monkeypatch.chdir(machines[1])
    there = []

    def split(waiting: list[Any]) -> tuple[list[Any], dict[str, int]]:
        there.extend(run.state for run in runs())
        return [], {"no data": len(waiting)}

    monkeypatch.setattr(study_data, "split", split)
    assert continued("--carry", str(tmp_path / "back.tar")).exit_code == 2
    assert files_in(tmp_path / "back.tar") == carried
    assert there == ["stopped", "done", "waiting"], "restored before the data are looked for: what is done needs none"


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(machines: tuple[Path, Path]) -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match=r"--carry file/back\.tar: cannot be written"):
        raise continued("--carry", "file/back.tar").exception or AssertionError
    assert not Path("runs").exists()
