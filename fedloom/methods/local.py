"""Local training without communication: a reference for the accuracy that clients reach alone."""

from fedloom.core.method import Method


class Local(Method):
    """A separate model per client, trained on its own data without any messages."""

    shares = ()
    keeps = ("model",)
    has_global = False
