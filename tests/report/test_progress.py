"""Progress in notebooks: one output that is updated in place."""

import sys
from types import SimpleNamespace

import pytest

import fedloom
from fedloom.report import progress


class Display:
    """As much of IPython.display as is used."""

    def __init__(self):
        self.shown = []

    def display(self, shown, **options):
        assert options == {"raw": True, "display_id": True}
        self.shown.append([shown])
        return SimpleNamespace(update=lambda value, raw: self.shown[-1].append(value))


@pytest.fixture
def display(monkeypatch):
    display = Display()
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(progress, "REFRESH", 0)
    return display


FIELDS = {"data": "digits", "data.limit": 60, "clients": 3, "partition": "iid", "rounds": 3}


def test_a_notebook_shows_one_bar_for_all_runs_and_is_not_asked_for(display, capfd):
    fedloom.compare(methods=["local", "fedavg"], **FIELDS)
    (updates,) = display.shown
    assert len(updates) == 2 * (1 + 3)
    assert '<progress value="3" max="3">' in updates[3]["text/html"]
    assert "round 3/3  loss" in updates[-1]["text/plain"] and "run 2: " in updates[-1]["text/plain"]
    assert "round" not in capfd.readouterr().err


def test_a_script_shows_no_bar_unless_asked(display, monkeypatch, capfd):
    fedloom.run(**FIELDS, progress=False)
    monkeypatch.delitem(sys.modules, "IPython")
    fedloom.run(**FIELDS)
    assert not display.shown and "round" not in capfd.readouterr().err
    fedloom.run(**FIELDS, progress=True)
    assert "round 3/3" in capfd.readouterr().err
