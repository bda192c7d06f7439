"""One process per run folder: the second is refused, and a dead one's lock is taken over."""

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedloom.core.errors import UserError
from fedloom.experiment import lock
from fedloom.experiment.lock import NAME, STALE, RunLock, holder
from fedloom.experiment.run_folder import RunFolder, run_state

HOLD = "import sys, time; from pathlib import Path; from fedloom.experiment.lock import RunLock; "
DEAD = 2**22 - 1  # above the largest pid that Linux gives out by default; checked below


@pytest.fixture
def elsewhere(tmp_path: Path):
    """Starts Python in another process, and waits until it says something."""
    started = []

    def start(code: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD + code, str(tmp_path)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(lock.__file__).parents[2])},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_process_is_refused_and_told_who_has_it(tmp_path: Path, elsewhere) -> None:
    process, _ = elsewhere("held = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)")
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(UserError, match="another process is using this folder") as refused:
        RunLock(tmp_path)
    assert f"process {process.pid} on {socket.gethostname()}" in str(refused.value)
    assert str(tmp_path / NAME) in str(refused.value)
    assert (tmp_path / NAME).read_bytes() == before


def test_a_lock_file_with_text_that_cannot_be_printed_is_reported_escaped(tmp_path: Path, caplog) -> None:
    (tmp_path / NAME).write_text('{"pid": 1, "host": "\\ud800\\u001b[2J", "since": ""}')
    with caplog.at_level(logging.WARNING):
        RunLock(tmp_path).release()
    assert r"process 1 on \ud800\x1b[2J" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")
def test_a_killed_process_counts_as_dead_before_its_parent_has_noticed(tmp_path: Path, elsewhere) -> None:
    process, _ = elsewhere("held = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)")
    assert holder(tmp_path) == "alive"
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it remains a zombie
    assert holder(tmp_path) == "dead"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, elsewhere, caplog) -> None:
    process, _ = elsewhere("held = RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)")
    process.send_signal(signal.SIGKILL)
    process.wait()
    with caplog.at_level(logging.WARNING):
        held = RunLock(tmp_path)
    assert f"process {process.pid}" in caplog.text and "taken over" in caplog.text
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    held.release()


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_lock(tmp_path: Path, elsewhere) -> None:
    process, orphan = elsewhere(
        "import os; held = RunLock(Path(sys.argv[1])); child = os.fork(); "
        "print(child, flush=True) if child else None; time.sleep(60)"
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        os.kill(int(orphan), 0)
        RunLock(tmp_path).release()
    finally:
        os.kill(int(orphan), signal.SIGKILL)


def test_one_process_cannot_have_it_twice_but_again(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    (tmp_path / "way").symlink_to(tmp_path)
    for same in (tmp_path, tmp_path / "way", tmp_path / "way" / ".." / tmp_path.name):
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            RunLock(same)
    held.release()
    held.release()
    assert not (tmp_path / NAME).exists()
    RunLock(tmp_path).release()


def test_a_lock_that_is_released_while_another_waits_to_look_is_found_anew(tmp_path: Path, monkeypatch) -> None:
    taken, real = [], fcntl.lockf

    def meanwhile(file, how):
        if not taken:
            (tmp_path / NAME).unlink()
        taken.append(file)
        return real(file, how)

    monkeypatch.setattr(lock.fcntl, "lockf", meanwhile)
    held = RunLock(tmp_path)
    assert len(taken) == 2
    assert (tmp_path / NAME).exists()
    held.release()


def test_a_half_written_lock_file_is_no_owner(tmp_path: Path) -> None:
    for text in ('{"pid": 1', "", "[]", "\0\0"):
        (tmp_path / NAME).write_text(text)
        RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lock.os, "open", refuse)
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        RunLock(tmp_path)


class TestWhereTheFileSystemHasNoLocks:
    @pytest.fixture(autouse=True)
    def without_locks(self, monkeypatch) -> None:
        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(lock.fcntl, "lockf", refuse)

    def owner(self, folder: Path, **values) -> None:
        (folder / NAME).write_text(json.dumps(lock._me() | values))

    def test_an_owner_that_runs_is_respected(self, tmp_path: Path) -> None:
        self.owner(tmp_path, pid=os.getppid(), began=lock._began(os.getppid()))
        with pytest.raises(UserError, match=f"process {os.getppid()}"):
            RunLock(tmp_path)

    def test_a_dead_owner_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(ProcessLookupError):
            os.kill(DEAD, 0)
        self.owner(tmp_path, pid=DEAD)
        RunLock(tmp_path).release()

    @pytest.mark.skipif(lock._began(os.getpid()) is None, reason="start times are Linux's")
    def test_nor_is_one_whose_number_has_gone_to_another_process(self, tmp_path: Path) -> None:
        self.owner(tmp_path, pid=os.getppid(), began="1")
        RunLock(tmp_path).release()

    def test_an_owner_on_another_machine_is_respected_and_the_file_named(self, tmp_path: Path) -> None:
        self.owner(tmp_path, pid=DEAD, host="elsewhere")
        with pytest.raises(
            UserError, match=f"on elsewhere.*If you are sure that it has ended, remove {tmp_path / NAME}"
        ):
            RunLock(tmp_path)

    def test_one_that_gave_no_sign_of_life_is_not(self, tmp_path: Path, caplog) -> None:
        self.owner(tmp_path, pid=DEAD, host="elsewhere")
        aged(tmp_path, 240)
        with pytest.raises(UserError, match=r"on elsewhere, since .*, last sign of life 4 minutes ago\)"):
            RunLock(tmp_path)
        aged(tmp_path, STALE + 1)
        with caplog.at_level(logging.WARNING):
            RunLock(tmp_path).release()
        assert "on elsewhere" in caplog.text
        assert "taken over" in caplog.text

    def test_a_run_that_was_suspended_ends_when_it_finds_its_folder_taken_over(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path / "run")
        folder.begin()
        held = folder._lock
        held.beat()
        folder.record({"round": 1})
        self.owner(tmp_path / "run", pid=1, host="elsewhere")
        held.beat()
        taken = pytest.raises(UserError, match="another process has taken this folder over .process 1 on elsewhere")
        with taken, folder.noting_failure():
            folder.record({"round": 2})
        folder.close()
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [NAME, "metrics.jsonl"]


def aged(folder: Path, seconds: float) -> None:
    """Let a lock file look as if its time was set so long ago."""
    when = time.time() - seconds
    os.utime(folder / NAME, (when, when))


def of_another_machine(folder: Path, **values) -> None:
    (folder / NAME).write_text(json.dumps(lock._me() | {"host": "elsewhere", "pid": DEAD} | values))


def test_a_lock_of_another_machine_is_alive_while_its_time_is_renewed(tmp_path: Path) -> None:
    of_another_machine(tmp_path)
    assert holder(tmp_path) == "alive"
    aged(tmp_path, STALE - 30)
    assert holder(tmp_path) == "alive"
    aged(tmp_path, STALE + 1)
    assert holder(tmp_path) == "dead"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    (tmp_path / "recipe.yaml").touch()
    assert run_state(tmp_path) == "killed"


def test_a_lock_that_is_never_renewed_counts_as_alive(tmp_path: Path) -> None:
    entry = lock._me() | {"host": "elsewhere"}
    del entry["renewed"]  # as fedloom 0.1 writes it
    (tmp_path / NAME).write_text(json.dumps(entry))
    aged(tmp_path, 1e6)
    assert holder(tmp_path) == "alive"


@pytest.mark.parametrize("wrong", [-7200, 7200])
def test_the_clock_of_the_file_system_decides(tmp_path: Path, monkeypatch, wrong: float) -> None:
    """This machine's clock is two hours wrong, either way."""
    monkeypatch.setattr(lock, "_ahead", {})
    monkeypatch.setattr(lock, "time", lambda: time.time() + wrong)
    of_another_machine(tmp_path)
    assert holder(tmp_path) == "alive"
    aged(tmp_path, STALE + 1)
    assert holder(tmp_path) == "dead"


def test_a_folder_that_can_only_be_read_is_judged_by_this_machines_clock(tmp_path: Path, monkeypatch) -> None:
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lock, "_ahead", {})
    monkeypatch.setattr(lock.tempfile, "NamedTemporaryFile", refuse)
    of_another_machine(tmp_path)
    aged(tmp_path, STALE + 1)
    assert holder(tmp_path) == "dead"


def test_a_held_lock_is_renewed_until_it_is_released(tmp_path: Path, monkeypatch) -> None:
    beaten = threading.Event()
    monkeypatch.setattr(lock, "BEAT", 0.0)
    monkeypatch.setattr(RunLock, "beat", lambda self: beaten.set())
    held = RunLock(tmp_path)
    assert beaten.wait(5)
    held.release()
    assert not held._thread.is_alive()
    monkeypatch.undo()
    held = RunLock(tmp_path)
    aged(tmp_path, 1000)
    held.beat()
    assert time.time() - (tmp_path / NAME).stat().st_mtime < 100
    held.release()
