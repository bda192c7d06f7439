"""A round counts every client that answered, whatever `combine` does with the messages."""

from itertools import islice

import pytest
from tiny import tiny_experiment

from fedloom.core.method import METHODS, Method


@pytest.fixture
def picky():
    class Picky(Method):
        """Reads the first message alone."""

        keeps = ("model.head",)

        def combine(self, server, messages):
            for message in islice(messages, 1):
                server.move(dict(message))

    return "picky"


@pytest.mark.parametrize("needed", [1, 3])
def test_answers_that_combine_does_not_read_count_too(picky, needed):
    memories = []
    fields = {"training__fraction": 1.0, "training__rounds": 1, "training__min_clients": needed}
    experiment = tiny_experiment(picky, on_round=lambda record: memories.append(sorted(experiment.memory)), **fields)
    experiment.run()
    record = experiment.history[0]
    assert memories == [[0, 1, 2, 3, 4, 5]]
    assert record["clients"] == 6
    assert record["up_bytes"] == sum(t.numel() * t.element_size() for t in experiment.server.state.values())


def test_what_a_method_puts_on_the_server_itself_is_refused(picky):
    """It would not be in a checkpoint."""

    class Counting(METHODS["fedavg"], abstract=True):
        def combine(self, server, messages):
            server.rounds = 1

    METHODS["counting"] = Counting
    with pytest.raises(AttributeError, match=r"server\.rounds = … would be lost when the run is resumed"):
        tiny_experiment("counting").run()
    (done := tiny_experiment("fedavg")).run()
    with pytest.raises(AttributeError, match=r"server.model: there is no such attribute.*server\.parts"):
        done.server.model  # noqa: B018
