"""Tracing without the Python stack, which torch reads for every tensor of a trace."""

from types import SimpleNamespace

import pytest
from torch._subclasses import fake_tensor


@pytest.fixture(autouse=True)
def _no_stacks_in_traces(monkeypatch):
    """Halves the time of a trace: below pytest a stack has about 60 more frames. Only torch's messages show it."""
    monkeypatch.setattr(fake_tensor, "traceback", SimpleNamespace(extract_stack=list))
