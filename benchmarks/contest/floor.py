"""Lower bound ("floor") of a round's time: the necessary FLOPs divided by the rate of a large matrix product."""

import statistics
from time import perf_counter
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.contest.plain import CLIENTS, network
from benchmarks.contest.works import Work


def training_flops(work: Work) -> float:
    """Count the FLOPs of training on one image (all its views, forward and backward), on a batch of the actual loss.

    Convolutions and matrix products are counted on the `meta` device, so nothing is computed.
    """
    client = CLIENTS[work.method](work, network(work).to("meta"), [], "meta")
    x = torch.empty(work.batch * work.views, *work.shape, device="meta")
    y = torch.zeros(work.batch, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        client.loss(x, y).backward()
    return counter.get_total_flops() / work.batch


def matrix_rates(device: str) -> dict[str, float]:
    """Measure the FLOP/s of a large matrix product of random values, by precision."""
    size = 8192 if device == "cuda" else 512
    rates = {}
    for name, precision, dtype in (
        ("float32", "highest", torch.float32),
        ("tf32", "high", torch.float32),
        ("bf16", "highest", torch.bfloat16),
    ):
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rates[name] = 2 * size**3 / statistics.median(product_seconds(a, b) for _ in range(10))
    return rates


def product_seconds(a: torch.Tensor, b: torch.Tensor, times: int = 5) -> float:
    """Return the seconds of one product, as the mean of several in a row on a GPU."""
    out = a @ b
    if not a.is_cuda:
        begin = perf_counter()
        torch.mm(a, b, out=out)
        return perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / times


def run(works: list[Work], device: str) -> dict[str, Any]:
    """Return the rates of this device and the FLOPs per training image of each workload."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "rates": matrix_rates(device),
        "flops": {work.letter: training_flops(work) for work in works},
    }
