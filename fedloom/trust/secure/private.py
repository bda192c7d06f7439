"""Differential privacy under secure aggregation: each client clips its update and adds its share of the noise.

The sum is unmasked only if at least `needed` clients are in it. Each adds Gaussian noise of variance
(noise · clip)² / needed, so that the sum of any such group has at least the variance that the accountant assumes; more
clients add more noise. Update and noise are rounded to multiples of the fixed-point step separately, and the update is
clipped so far below `clip` that its rounded form does not exceed it.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.message import Message, Signature
from fedloom.core.state import State, under
from fedloom.trust.access import Averaging
from fedloom.trust.centres import clip_factor, joint_norm
from fedloom.trust.privacy import Draw, PrivacySettings, repaired
from fedloom.trust.secure.ring import FixedPoint, Ring

NOISE_STEPS = 10
"""Smallest standard deviation of a client's noise, in steps. ε is that of a Gaussian; of a Gaussian that is rounded to
coarser steps it would be another. Kairouz et al. (2021) prove ε for sums of discrete Gaussians, which this is not."""
TAIL = 10
"""Standard deviations of noise that must fit into the range; noise beyond it has a probability of 1e-23."""


class PrivateSum:
    """The updates of a private mean, one tensor after another in a vector.

    Args:
        settings: The recipe section `privacy`.
        averaging: How the method averages.
        sent: Names, types and shapes of the tensors that clients send.
    """

    def __init__(self, settings: PrivacySettings, averaging: Averaging, sent: Signature):
        self.settings = settings
        self._shapes = {
            name: shape
            for name, (dtype, shape) in sent.items()
            if dtype.is_floating_point and (averaging.parts is None or under(name, averaging.parts))
        }

    @property
    def size(self) -> int:
        """Number of elements of the vector."""
        return sum(map(math.prod, self._shapes.values()))

    def check_range(self, fixed_point: FixedPoint, needed: int) -> None:
        """Refuse numbers that cannot represent a clipped update with its noise.

        Raises:
            UserError: The range or the number of bits is too small.
        """
        largest = self.settings.clip + TAIL * self._deviation(needed)
        if largest > fixed_point.limit:
            raise UserError(
                f"secure.range = {fixed_point.limit:g}: clipped updates with noise reach {largest:.3g} (privacy.clip, "
                f"privacy.noise); set it to {2 ** math.ceil(math.log2(largest))} or more"
            )
        if (deviation := self._deviation(needed)) < NOISE_STEPS * fixed_point.step:
            raise UserError(
                f"secure.bits = {fixed_point.bits}: a client's noise has a standard deviation of {deviation:.3g} "
                f"(privacy.noise, privacy.clip), and rounding it to multiples of {fixed_point.step:.3g} would change "
                "its distribution; use 64 bits, or lower secure.range"
            )
        if self._bound(fixed_point) < 0.9 * self.settings.clip:
            raise UserError(
                f"secure.bits = {fixed_point.bits}: rounding {self.size:,} numbers to multiples of "
                f"{fixed_point.step:.3g} exceeds a tenth of privacy.clip = {self.settings.clip:g}; use 64 bits, or "
                "lower secure.range"
            )

    def _deviation(self, needed: int) -> float:
        """Return the standard deviation of one client's noise."""
        return self.settings.noise * self.settings.clip / math.sqrt(needed)

    def _bound(self, fixed_point: FixedPoint) -> float:
        """Return the norm to which updates are clipped, so that rounded ones have a norm of at most `clip`."""
        return self.settings.clip - fixed_point.step / 2 * math.sqrt(self.size)

    def vector(
        self, message: Message, received: Mapping[str, Tensor], fixed_point: FixedPoint, needed: int, normal: Draw
    ) -> Ring:
        """Return what a client adds to the sum.

        Args:
            message: The client's message.
            received: The server's message to the client.
            fixed_point: Representation of numbers.
            needed: Smallest number of clients whose sum can be unmasked.
            normal: Source of the noise.

        Raises:
            MessageError: A value is beyond the range.
            UserError: Fixed-point numbers cannot represent clipped updates with noise.
        """
        self.check_range(fixed_point, needed)
        updates = {name: message[name].double().cpu() - received[name].double().cpu() for name in self._shapes}
        factor = clip_factor(joint_norm(list(updates.values())), self._bound(fixed_point))
        vector, deviation = np.empty(self.size, fixed_point.unsigned), self._deviation(needed)
        for name, place in self._places():
            update = updates[name] * factor if factor > 0 else torch.zeros_like(updates[name])
            steps = (update / fixed_point.step).round() + (deviation / fixed_point.step * normal(update.shape)).round()
            vector[place] = fixed_point.encode(fixed_point.step * steps.numpy().reshape(-1), name)
        return vector

    def result(
        self, total: NDArray[np.float64], participants: float, old: Mapping[str, Tensor], error: float
    ) -> tuple[State, float]:
        """Return the old state plus the noisy mean of updates, and the largest error of its elements.

        Args:
            total: The sum of the clients' vectors.
            participants: Planned number of clients per round.
            old: The server's state.
            error: Largest error of the total, without the noise.
        """
        found: State = {}
        for name, place in self._places():
            update = torch.from_numpy(total[place].reshape(self._shapes[name]))
            found[name] = repaired(name, old[name], old[name] + update.to(old[name].device) / participants)
        return found, error / participants

    def _places(self) -> Iterator[tuple[str, slice]]:
        start = 0
        for name, shape in self._shapes.items():
            yield name, slice(start, start + math.prod(shape))
            start += math.prod(shape)
