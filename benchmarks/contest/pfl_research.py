"""pfl-research (apple/pfl-research, `pip install pfl`) on workload P, used as in its own CIFAR-10 benchmark.

Its users' images are stored on the device as normalised floats; users are sampled at random; updates have equal weights
(`WeightByUser`). Batches have the same order each time, since its Dataset does not shuffle. Evaluation is off in
the measured rounds.

The folder (`--pfl`) is created by `pip install --target FOLDER --no-deps pfl multiprocess dill`, for another Python
with `--python-version 3.12 --only-binary=:all:`. Its packages for privacy accounting are replaced by empty modules.
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.contest.peers import MissingError
from benchmarks.contest.plain import client_tensors, network
from benchmarks.contest.works import Clock, Work, steps_and_images

UNUSED = ("dp_accounting", "dp_accounting.pld", "dp_accounting.rdp", "prv_accountant")


class Empty(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Trained(nn.Module):
    """The network with the two functions that pfl requires of a model; it stores the losses of its training steps."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images."""
        return self.inner(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        """Return the training loss of a batch."""
        self.train(not eval)
        loss = cross_entropy(self(x), y)
        self.losses.append(loss.detach())
        return loss

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        """Return loss and accuracy, which pfl sums over batches."""
        from pfl.metrics import Weighted

        self.train(not eval)
        logits = self(x)
        loss = cross_entropy(logits, y, reduction="sum").item()
        right = (logits.argmax(1) == y).sum().item()
        return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(right, len(y))}


def find(folder: str | None, device: str) -> None:
    """Make `import pfl` possible, and set its device."""
    if folder is None:
        raise MissingError("--pfl FOLDER is not given")
    if not (Path(folder) / "pfl" / "algorithm").is_dir():
        raise MissingError(f"{folder} does not contain pfl")
    sys.path.append(str(Path(folder).resolve()))  # last, so that it cannot replace torch or numpy
    sys.modules.update({name: Empty(name) for name in UNUSED})
    os.environ["PFL_PYTORCH_DEVICE"] = device


def run(work: Work, device: str, warmup: int, rounds: int, folder: str | None) -> dict[str, Any]:
    """Run all rounds, timed by a callback after each."""
    find(folder, device)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    task = work.task()
    np.random.seed(0)
    clock = Clock(device)
    users = {c: tuple(part.to(device) for part in client_tensors(task, c)) for c in range(work.clients)}
    module = Trained(network(work)).to(device)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset.from_slices(users, get_user_sampler("random", list(users)))
    ends: list[float] = []
    losses: list[float] = []

    class Watch(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> Any:
            ends.append(clock.now())
            if len(ends) == warmup + rounds:
                losses.append(float(torch.stack(module.losses).mean()))
            module.losses.clear()
            return False, Metrics()

    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=warmup + rounds,
            evaluation_frequency=10**6,  # only the first round evaluates, which is not counted
            train_cohort_size=work.taking_part,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=work.lr, local_num_epochs=1, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Watch()],
    )
    steps, images = steps_and_images(task, [list(range(work.taking_part))], work.batch, drop_last=False)
    return {
        "seconds": np.diff(ends)[warmup - 1 :].tolist(),
        "warmup": ends[warmup - 1] - clock.begin,
        "steps": steps,
        "images": images,
        "memory": clock.memory(),
        "loss": losses[-1],
        "version": version(),
    }


def version() -> str:
    from importlib.metadata import version

    return version("pfl")
