import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.losses import enqueue, moco

TAU = 0.07


def sample(n=5, d=4, length=6):
    q, k = torch.randn(2, n, d, dtype=torch.float64)
    return q, k, F.normalize(torch.randn(length, d, dtype=torch.float64), dim=1)


def test_equals_a_numpy_loop():
    q, k, queue = sample()
    total = 0.0
    for query, key in zip(q.numpy(), k.numpy(), strict=True):
        query, key = query / np.linalg.norm(query), key / np.linalg.norm(key)
        own = math.exp(query @ key / TAU)
        total -= math.log(own / (own + sum(math.exp(query @ old / TAU) for old in queue.numpy())))
    assert moco(q, k, queue, TAU).item() == pytest.approx(total / len(q), rel=1e-9)


def test_gradients_check_for_the_queries():
    q, k, queue = sample()
    assert torch.autograd.gradcheck(lambda q: moco(q, k, queue, TAU), q.requires_grad_())


def test_the_gradient_stops_at_keys_and_queue():
    q, k, queue = (t.requires_grad_() for t in sample())
    moco(q, k, queue, TAU).backward()
    assert k.grad is None
    assert queue.grad is None


def test_the_queue_is_a_ring_of_the_latest_keys():
    queue, pointer = torch.zeros(5, 2, dtype=torch.float64), torch.tensor(0)
    address = queue.data_ptr()
    latest = []
    for start in (0, 3, 6, 9):
        keys = torch.tensor([[1.0, start + i] for i in range(3)], dtype=torch.float64)
        enqueue(queue, pointer, keys)
        latest = [*latest, *keys.tolist()][-5:]
        assert pointer.item() == (start + 3) % 5
    oldest_first = queue.roll(-int(pointer), 0).numpy()
    np.testing.assert_allclose(oldest_first, [v / np.linalg.norm(v) for v in map(np.array, latest)], rtol=1e-12)
    assert queue.data_ptr() == address


def test_of_more_keys_than_the_queue_holds_the_last_ones_stay():
    queue, pointer = torch.zeros(2, 2, dtype=torch.float64), torch.tensor(1)
    enqueue(queue, pointer, torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    np.testing.assert_allclose(queue.roll(-int(pointer), 0).numpy(), [[0, 1], [0.6, 0.8]], rtol=1e-12)
