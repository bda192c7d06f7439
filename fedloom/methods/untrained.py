"""No training: a floor that every trained representation must exceed, with a head fitted on it (`untrained+logreg`)."""

from fedloom.core.client import Client
from fedloom.core.method import Method


class Untrained(Method):
    """The network with its initial values, which are random or from `model.weights`; nothing is trained or sent."""

    shares = ()

    def update(self, client: Client) -> None:
        """Do nothing."""
