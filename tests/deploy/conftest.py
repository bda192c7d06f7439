import pytest
from federated import LocalFederation, make_experiment, small_recipe

from fedloom.deploy import fleet as fleet_module
from fedloom.deploy.terms import protocol_versions


@pytest.fixture
def impatient(monkeypatch):
    """A server that asks for answers more often."""
    monkeypatch.setattr(fleet_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module, "REFRESH_SECONDS", 0.05)


@pytest.fixture
def agreed(tmp_path, impatient):
    """A federation whose organisations have agreed to a recipe."""
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg"))
    federation.fleet.wait_for(3, 3, 1)
    experiment = make_experiment(federation.fleet, federation.recipe)
    with experiment._make_engine(experiment.setup, federation.recipe.engine) as engine:
        federation.fleet_state = engine.server_workspace.downward()
    federation.language = protocol_versions()
    return federation
