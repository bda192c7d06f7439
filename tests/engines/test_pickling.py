import socket
from threading import Thread

import numpy as np
import pytest
import torch

from fedloom.engines.pickling import receive, send, to_array, to_new_tensor, to_tensor

TENSORS = {
    "larger than a socket's buffer": torch.arange(1_000_000.0),
    "bfloat16": torch.tensor([1.5, 2], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 2),
    "truth": torch.tensor([True, False]),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "view": torch.arange(20_000.0).view(100, 200)[:, 3:90],
}


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_what_is_received_is_what_was_sent(ends):
    here, there = ends
    sender = Thread(target=lambda: [send(here, TENSORS), send(here, "next")])
    sender.start()
    received, following = receive(there), receive(there)
    sender.join()
    assert following == "next"
    assert list(received) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)
        received[name].zero_()  # it is the receiver's memory


def test_the_end_of_a_closed_socket_is_an_error(ends):
    here, there = ends
    here.sendall(b"123")
    here.close()
    with pytest.raises(EOFError):
        receive(there)


def test_read_only_memory_is_mapped_or_copied():
    array, _ = to_array(torch.arange(5.0))
    array.flags.writeable = False
    assert np.shares_memory(to_tensor((array, False)).numpy(), array)
    to_new_tensor((array, False)).zero_()
    assert array.sum() == 10
