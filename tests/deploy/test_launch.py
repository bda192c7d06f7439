"""Processes: what is visible of them, and how they end."""

import subprocess
import sys
from types import SimpleNamespace

from fedloom.deploy import launch, superlink

CHILD = """
import signal, time
from fedloom.deploy.launch import end_with_parent
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as deaf as a ServerApp that waits for answers
end_with_parent(0.1)
print("ready", flush=True)
time.sleep(30)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
"""


def test_a_process_ends_soon_after_its_parent_even_if_it_waits():
    # returns when stderr is closed, which the child has inherited
    done = subprocess.run([sys.executable, "-c", PARENT], stderr=subprocess.PIPE, timeout=15, check=True)
    assert done.stderr == b""


def test_a_secret_reaches_a_process_and_is_not_on_its_command_line(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text("import sys; print(sys.stdin.read(), *sys.argv[2:])")
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    child = launch.start("echo", "open", folder=tmp_path, secret="hidden")
    assert child.wait(30) == 0 and "hidden" not in child.args
    assert (tmp_path / "echo.log").read_text() == "hidden open\n"


def test_each_run_gets_one_process_with_its_token_and_all_are_ended_together(tmp_path, monkeypatch):
    tokens, begun = ["one", "", "two"], []

    def start(script, *arguments, folder, secret):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        begun.append((script, arguments, secret, child))
        return child

    monkeypatch.setattr(superlink, "acquire_task", lambda *_: SimpleNamespace(token=tokens.pop(0)))
    monkeypatch.setattr(superlink, "start", start)
    apps = superlink.Apps(tmp_path, "127.0.0.1:1", lambda: None)
    for _ in range(3):
        apps.tick()
    arguments = ("127.0.0.1:1", str(tmp_path / "ca.pem"))
    assert [one[:-1] for one in begun] == [("serverapp", arguments, "one"), ("serverapp", arguments, "two")]
    apps.stop()
    assert all(child.poll() is not None for *_, child in begun)
