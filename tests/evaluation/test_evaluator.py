"""What an evaluation records, against what is known otherwise."""

import pytest
from tiny import tiny_run


def test_the_mean_over_clients_of_one_model_for_all_is_their_personal_accuracy() -> None:
    record = tiny_run("fedavg").history[-1]
    assert record["global_mean_accuracy"] == pytest.approx(record["personal_accuracy"])
    assert record["global_mean_accuracy"] != pytest.approx(record["global_accuracy"])  # that one weighs by samples
