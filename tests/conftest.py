"""Single-threaded tests, each in its own folder."""

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)

# No test loses power: without waiting for the disk, a run of some rounds takes a third of the time (35 calls of 3 ms).
os.fsync = lambda file: None


def pytest_collection_modifyitems(items):
    """Tests marked `cuda` are skipped without a CUDA device; `make gpu` runs them where there is one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test draws the same random numbers in any order of tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _consent_ends_with_the_test():
    from fedloom.core import trusted_code

    with trusted_code.scope():
        yield


@pytest.fixture(autouse=True)
def _registrations_end_with_the_test():
    """Other tests do not find the methods, networks and engines that a test defines."""
    from fedloom.engines import ENGINES
    from fedloom.methods import METHODS
    from fedloom.models import MODELS

    before = {registry.field: set(registry) for registry in (ENGINES, METHODS, MODELS)}
    yield
    for registry in (ENGINES, METHODS, MODELS):
        for name in set(registry) - before[registry.field]:
            if not registry.is_shipped(name):
                del registry[name]


@pytest.fixture(autouse=True)
def _log_level_ends_with_the_test():
    """Commands such as `deploy server` choose what their process logs."""
    logger = logging.getLogger("fedloom")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _references(tmp_path_factory):
    import references

    base = tmp_path_factory.getbasetemp()
    references.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    references.folder.mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of finished runs on digits, with two newcomers each."""
    import fedloom

    folder = tmp_path_factory.mktemp("runs")
    common = {"data": "digits", "clients": 8, "partition": "dirichlet:1", "model": "mlp", "rounds": 3, "lr": 0.1}
    more = {"data.limit": 900, "data.newcomers": 2, "data.normalise": "channels", "data.views": ["crop:1"]}
    for method in ("fedavg", "fedper", "repper", "lgfedavg"):
        fedloom.run(method=method, out=folder / method, **common, **more)
    return {path.name: path for path in folder.iterdir()}
