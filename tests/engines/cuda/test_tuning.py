"""What auto chooses: the same on every run, from shapes and memory alone; a user's numbers come first."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import tiny_dataset, tiny_experiment

from fedloom.data import Federation
from fedloom.engines import EngineSettings
from fedloom.engines.cuda.tuning import COHORT, LANES, LARGE, LARGE_LANES, SMALL_STEP, Tuning, faster, tune
from fedloom.methods import get

SMALL = 1_000_000
ROOMY = 100 * 2**30


def setup_of(sizes=(50,) * 100, fraction=1.0, batch_size=10, shape=(3, 32, 32), method="fedavg"):
    """Clients of these sizes; nobody looks at the samples."""
    setup = tiny_experiment("fedavg").setup
    parts = [np.zeros(size, np.int64) for size in sizes]
    task = replace(setup.task, dataset=tiny_dataset(shape=shape), federation=Federation(parts, parts))
    training = setup.training.model_copy(update={"fraction": fraction, "batch_size": batch_size})
    return replace(setup, task=task, training=training, method=get(method))


def chosen(setup=None, parameters=SMALL, free=ROOMY, **settings):
    return tune(setup or setup_of(), EngineSettings(**settings), parameters, free)


def test_the_same_is_chosen_every_time():
    assert len({chosen(setup_of(sizes=(50, 40, 60) * 30)) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("clients", "fraction", "expected"),
    [
        (1000, 0.05, Tuning(1, 50)),  # as many as a round has
        (1000, 0.03, Tuning(1, 30)),
        (1000, 0.5, Tuning(2, COHORT)),  # more than go together: two lanes take turns
        (3, 1.0, Tuning(1, 3)),
        (1, 1.0, Tuning(LANES, 1)),
        (1000, 0.0001, Tuning(LANES, 1)),
    ],
)
def test_small_even_clients_go_together(clients, fraction, expected):
    assert chosen(setup_of((50,) * clients, fraction)) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((50,) * 40, Tuning(1, 40)),
        ((50, 25) * 20, Tuning(1, 40)),
        ((50, 25) * 100, Tuning(2, COHORT)),
        ((0, *(50,) * 39), Tuning(1, 40)),
        ((100, 1, 1, 1) * 10, Tuning(LANES, 1)),  # most would wait for the large ones
        ((1000, *(10,) * 39), Tuning(LANES, 1)),
    ],
)
def test_clients_of_very_different_sizes_are_taken_one_at_a_time(sizes, expected):
    assert chosen(setup_of(sizes)) == expected


def test_large_steps_and_large_networks_fill_a_gpu_alone():
    assert chosen(parameters=LARGE) == Tuning(LARGE_LANES, 1)
    assert chosen(parameters=LARGE - 1).clients > 1
    side = 32
    least = SMALL_STEP // side**2
    assert chosen(setup_of(batch_size=least, shape=(3, side, side))).clients > 1
    assert chosen(setup_of(batch_size=least + 1, shape=(3, side, side))) == Tuning(LANES, 1)
    assert chosen(setup_of(batch_size=least + 1, shape=(3, side // 2, side // 2))).clients > 1


def test_a_method_that_pools_the_data_has_one_client():
    assert chosen(setup_of(method="centralized")).clients == 1


def test_memory_limits_how_many_go_together():
    found = [chosen(free=free).clients for free in (0, 2**20, 100 * 2**20, 2**30, 2 * 2**30, ROOMY)]
    assert found == sorted(found)
    assert found[0] == found[1] == 1
    assert 1 < found[3] < COHORT
    assert found[-1] == COHORT
    for free in (2**30, 2 * 2**30):  # parameters, received ones, gradients, what is sent, two moments
        assert chosen(free=free).clients * 6 * 4 * SMALL <= free


@pytest.mark.parametrize("setup", [setup_of(), setup_of((1000, *(10,) * 39)), setup_of((50,) * 3)])
def test_a_users_numbers_come_first(setup):
    assert chosen(setup, workers=3, cohort=7) == Tuning(3, 7)
    assert chosen(setup, cohort=7).clients == 7
    assert chosen(setup, workers=3).lanes == 3
    assert chosen(setup, workers=3).clients == chosen(setup).clients
    assert chosen(setup, workers=3, parameters=LARGE, free=0) == Tuning(3, 1)


def test_deterministic_means_one_client_at_a_time():
    assert chosen(deterministic=True) == Tuning(LANES, 1)
    assert chosen(deterministic=True, workers=2) == Tuning(2, 1)


def test_a_choice_in_words():
    assert str(Tuning(2, 50)) == "2 lanes of 50 clients"
    assert str(Tuning(8, 1)) == "8 lanes"


def test_what_would_be_faster_is_offered_never_chosen():
    (hint,) = faster(EngineSettings())
    assert "tf32" in hint
    assert "bf16" in hint
    assert faster(EngineSettings(precision="bf16")) == []
    assert faster(EngineSettings(deterministic=True)) == []


@pytest.mark.cuda
def test_free_memory_is_some_of_the_gpus():
    from fedloom.engines.cuda.tuning import free_memory

    device = torch.device("cuda", 0)
    assert 0 < free_memory(device) <= torch.cuda.get_device_properties(device).total_memory
