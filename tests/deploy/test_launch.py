"""Processes that end with their parent."""

import subprocess
import sys

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
