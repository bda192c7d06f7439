"""docs/how-to/deploy.md, followed word for word in an empty folder."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deploy.md"
WAITED = "until grep -q ready server.out; do sleep 0.5; done"
"""What the reader does between joining and running: "When server.out says `ready`"."""
ENDED = "kill $(jobs -p) 2>/dev/null || true"
"""A command that fails ends the script, and what it has started would remain."""


def blocks() -> list[str]:
    """The commands of the numbered steps, without the installation."""
    steps = PAGE.read_text(encoding="utf-8").partition("## 1. ")[2].partition("## Run as a service")[0]
    found = re.findall(r"^```\n(.*?)^```", steps, flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if not block.startswith("hospitals/\n")]  # a list of files


def test_the_steps_are_found():
    found = blocks()
    assert found[0].startswith("python -c") and "kill %1" in found[-1]
    assert sum("fedloom deploy start" in block for block in found) == 1


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_the_page_can_be_followed_word_for_word(tmp_path):
    for port in (9092, 9093, 9094):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port}, which the page names, is in use")
    commands = "\n".join(
        f"{WAITED}\n{block}" if "fedloom deploy start" in block else block for block in blocks()
    ).replace("kill %1", "sleep 8; fedloom deploy status --folder hospitals/server; cat watch.out; kill %1")
    place = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = f"set -me\ntrap '{ENDED}' EXIT\n{commands}\nwait"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": place},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=550,
    )  # fmt: skip
    assert (tmp_path / "hospitals" / "server" / "runs" / "first" / "summary.json").exists(), done.stdout
    assert "run 'first': round 3 of 3" in done.stdout and "west: revoked" in done.stdout, done.stdout
    assert "status page: http://127.0.0.1:9094/" in done.stdout
    assert re.search(r"renewed: hospitals/server/server.pem is valid until \d{4}-", done.stdout)
    audit = (tmp_path / "hospitals" / "organisations" / "north" / "audit.jsonl").read_text().splitlines()
    assert next(json.loads(line)["decision"] for line in audit if '"request"' in line) == "answered"
