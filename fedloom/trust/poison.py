"""Data attacks, for studies: hostile clients train honestly on falsified data (label flip, backdoor)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.rng import numpy_generator
from fedloom.core.task import Task
from fedloom.core.trigger import Trigger


@dataclass(frozen=True)
class Poison:
    """The falsification of hostile clients' training data.

    Without a trigger, class y becomes class C − 1 − y of C classes (label flip). With a trigger, samples get the
    trigger and its class (backdoor; Gu et al., 2017).
    """

    portion: float
    """Share of each hostile client's training samples that are falsified, drawn by the seed."""
    seed: int
    trigger: Trigger | None = None

    def applied(self, task: Task, hostile: Iterable[int]) -> Task:
        """Return the task in which hostile clients have falsified copies of their training samples.

        The original samples stay in the dataset, because clients may have samples in common. Test and validation
        samples do not change.

        Raises:
            UserError: A sample can have several labels, or labels are flipped that the objective does not read.
        """
        dataset, train = task.dataset, list(task.federation.train)
        if dataset.multilabel:
            raise UserError(
                f"attack.kind: dataset '{dataset.name}' has several labels per sample, but labelflip and backdoor need "
                "one class per sample; choose another attack or dataset"
            )
        if self.trigger is None and not task.objective.supervised:
            raise UserError(
                f"attack.kind = 'labelflip': has no effect, because the objective '{task.objective.name}' trains "
                "without labels; choose another attack (such as signflip or noise), or a supervised objective"
            )
        copied: list[np.ndarray] = []
        inputs, labels, start = [dataset.inputs], [dataset.labels], len(dataset)
        for client in sorted(hostile):
            samples = train[client]
            x, y = self._falsified(dataset.inputs[samples], dataset.labels[samples], task.classes, client)
            inputs.append(x)
            labels.append(y)
            copied.append(samples)
            train[client] = np.arange(start, start + len(samples))
            start += len(samples)
        origin = torch.from_numpy(np.concatenate([np.arange(len(dataset)), *copied]))
        falsified = replace(
            dataset,
            inputs=torch.cat(inputs),
            labels=torch.cat(labels),
            test=dataset.test[origin],
            groups=None if dataset.groups is None else dataset.groups[origin],
        )
        return replace(task, dataset=falsified, federation=replace(task.federation, train=train))

    def _falsified(self, inputs: Tensor, labels: Tensor, classes: int, client: int) -> tuple[Tensor, Tensor]:
        count = round(self.portion * len(labels))
        drawn = numpy_generator(self.seed, client, "poison").choice(len(labels), count, replace=False)
        chosen = torch.from_numpy(np.sort(drawn))
        labels = labels.clone()
        if self.trigger is None:
            labels[chosen] = classes - 1 - labels[chosen]
            return inputs, labels
        inputs = inputs.clone()
        inputs[chosen], labels[chosen] = self.trigger.stamp(inputs[chosen]), self.trigger.target
        return inputs, labels


def make_trigger(task: Task, target: int, size: int) -> Trigger:
    """Return the trigger of a backdoor for a task's images.

    Args:
        task: The task.
        target: The class that triggered images are to be predicted as.
        size: Side of the square in pixels.

    Raises:
        UserError: The inputs are not images, are too small, or the class does not exist.
    """
    inputs = task.dataset.inputs
    if inputs.dim() != 4:
        raise UserError(
            f"attack.kind = 'backdoor': needs images, but inputs of dataset '{task.dataset.name}' have shape "
            f"{list(task.shape)}; choose another attack or dataset"
        )
    if target >= task.classes:
        raise UserError(f"attack.target = {target}: must be below {task.classes}, the number of classes")
    if size >= min(task.shape[1:]):
        pixels = "×".join(map(str, task.shape[1:]))
        raise UserError(f"attack.patch = {size}: must be smaller than the images, which have {pixels} pixels")
    return Trigger(target, size, 1.0 if task.dataset.bytes else float(inputs.max()))
