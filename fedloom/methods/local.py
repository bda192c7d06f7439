"""No communication: what a client reaches alone."""

from fedloom.core.method import Method


class Local(Method):
    """Every client trains its own model on its own data; nothing ever leaves it."""

    shares = ()
    keeps = ("model",)
    has_global = False
