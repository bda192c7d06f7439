import json

import numpy as np
import pytest
import safetensors.torch
import torch

from fedloom.core.job import Job, Result
from fedloom.core.message import Message, MessageError, pack, unpack
from fedloom.core.scores import Scores


def tensors():
    return {
        "model.weight": torch.randn(3, 2),
        "counts": torch.tensor([1, 2, 3]),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 4),
        "nhwc": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }


def test_a_message_survives_the_wire_bit_for_bit():
    sent = Message(tensors(), client=7, samples=123)
    got = Message.from_bytes(sent.to_bytes())
    assert (got.client, got.samples) == (7, 123)
    assert list(got) == list(sent) or set(got) == set(sent)
    for name, value in sent.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value)


def test_bytes_are_those_of_the_contents():
    assert Message({"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int64)}).nbytes == 10 * 4 + 3 * 8


def test_what_crosses_is_no_pickle():
    data = pack({"a": torch.ones(2)}, {"x": 1})
    assert data[8:9] == b"{"
    assert unpack(data)[1] == {"x": 1}


def test_a_channels_last_tensor_crosses_as_a_contiguous_one():
    sent = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert not sent.is_contiguous()
    assert pack({"a": sent}, {}) == pack({"a": sent.contiguous()}, {})
    got = unpack(pack({"a": sent}, {}))[0]["a"]
    assert got.is_contiguous() and torch.equal(got, sent)


def test_a_job_survives_the_wire_and_a_known_message_is_not_sent_twice():
    message = Message({"model.w": torch.randn(1000)})
    job = Job("update", 4, message, client=2, memory={"model.head": torch.ones(3)})
    again = Job.from_bytes(job.to_bytes())
    assert (again.kind, again.round, again.client) == ("update", 4, 2)
    assert torch.equal(again.message["model.w"], message["model.w"])
    assert torch.equal(again.memory["model.head"], torch.ones(3))
    short = job.to_bytes(with_message=False)
    assert len(short) < 1000
    assert Job.from_bytes(short, known=message).message is message


def test_no_memory_and_empty_memory_stay_apart():
    message = Message({})
    assert Job.from_bytes(Job("update", 1, message, memory=None).to_bytes()).memory is None
    assert Job.from_bytes(Job("update", 1, message, memory={}).to_bytes()).memory == {}


def test_a_result_survives_the_wire():
    result = Result(3, Message({"w": torch.ones(2)}, client=3, samples=9), memory={}, loss=0.5, seconds=1.5)
    result.scores = [Scores(3, [1, 2], [2, 2], 0.25)]
    result.validation = [Scores(3, [0, 1], [1, 1], 0.5, {"auc": None, "ece": 0.25})]
    again = Result.from_bytes(result.to_bytes())
    assert again.message.samples == 9
    assert again.memory == {}
    assert (again.scores, again.validation) == (result.scores, result.validation)
    assert again.personal is None
    assert again.scores == result.scores
    assert np.isclose(again.scores[0].accuracy, 0.75)


def test_tensors_come_back_in_their_order() -> None:
    """Sums and draws over a message follow its order; safetensors gives tensors back in any."""
    names = [f"part.{i}" for i in (7, 3, 9, 1, 8, 2, 5)]
    for _ in range(5):
        message = Message({name: torch.zeros(2) for name in names}, client=1, samples=2)
        assert list(Message.from_bytes(message.to_bytes())) == names


@pytest.mark.parametrize("names", [["a"], ["a", "b", "b"], ["a", "c"], "ab", [1, 2], None])
def test_a_header_with_other_names_is_refused(names: object) -> None:
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    header = json.dumps({"client": 0, "samples": 1, "names": names})
    with pytest.raises(MessageError, match="its names (are|differ)"):
        Message.from_bytes(safetensors.torch.save(tensors, {"fedloom": header}))
