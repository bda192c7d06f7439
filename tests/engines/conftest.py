"""Fixtures of engines with recorded steps."""

import warnings
from types import SimpleNamespace

import pytest
from torch._subclasses import fake_tensor


@pytest.fixture(autouse=True)
def _no_stacks_in_traces(monkeypatch):
    """Halves the time of a trace: below pytest a stack has about 60 more frames. Only torch's messages show it."""
    monkeypatch.setattr(fake_tensor, "traceback", SimpleNamespace(extract_stack=list))


@pytest.fixture
def _no_fallback():
    """Nothing is taken one by one or eagerly unless a test says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a training step|training steps|engine.co")
        yield
