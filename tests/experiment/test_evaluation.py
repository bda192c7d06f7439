"""What an evaluation records, against what is known otherwise."""

from itertools import combinations

import pytest
import torch
from tiny import tiny_run, tiny_run_with_memory


def test_the_mean_over_clients_of_one_model_for_all_is_their_personal_accuracy() -> None:
    record = tiny_run("fedavg").history[-1]
    assert record["global_mean_accuracy"] == pytest.approx(record["personal_accuracy"])
    assert record["global_mean_accuracy"] != pytest.approx(record["global_accuracy"])  # that one weighs by samples


def test_the_distance_between_clients_copies_of_a_part() -> None:
    run, kept = tiny_run_with_memory("fedper", evaluation__distance="model.head", training__rounds=2)
    heads = [torch.cat([s["model.head.weight"].flatten(), s["model.head.bias"]]).double() for s in kept.values()]
    pairs = [float((one - other).norm()) for one, other in combinations(heads, 2)]
    assert len(pairs) > 1
    assert run.history[-1]["distance"] == pytest.approx(sum(pairs) / len(pairs))
    assert "distance" not in tiny_run("fedper", training__rounds=1).history[-1]
