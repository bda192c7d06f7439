"""Secure aggregation in place of the weighted mean in `server.average`."""

from collections.abc import Iterable

from fedloom.core.errors import UserError
from fedloom.core.message import Message, Signature
from fedloom.core.method import Method
from fedloom.core.server import By, Server
from fedloom.core.state import State
from fedloom.trust.access import RestrictedMessages
from fedloom.trust.privacy import PrivacySettings
from fedloom.trust.secure.contribution import MASKED, Contribution, as_ring
from fedloom.trust.secure.coordinator import SecureSum
from fedloom.trust.secure.private import PrivateSum
from fedloom.trust.secure.settings import LEAST_MEMBERS, SecureSettings, refuse_unsummable
from fedloom.trust.secure.weighted import WeightedSum


class SecureAverage:
    """The mean of masked messages, computed from their sum, message by message in constant memory.

    `begin` must be called before each round.

    Args:
        settings: The recipe section `secure`.
        privacy: The recipe section `privacy`.
        method: The method whose messages are combined.
        participants: Planned number of clients per round.

    Raises:
        UserError: The method needs more than a sum, or too few clients take part in a round.
    """

    def __init__(self, settings: SecureSettings, privacy: PrivacySettings | None, method: Method, participants: int):
        self.settings, self.privacy, self.method, self.participants = settings, privacy, method, participants
        self._averaging = refuse_unsummable(method)
        if participants < LEAST_MEMBERS:
            raise UserError(
                f"secure: {participants} clients take part in a round, whose sum would reveal too much about each; use "
                f"at least {LEAST_MEMBERS} clients (training.fraction, data.clients), or remove the secure section"
            )
        self.refusal = (
            f"secure: method.name = '{method.name}' reads single clients' messages, but secure aggregation reveals "
            "only their sum; choose another method, or remove the secure section"
        )
        self.sum: SecureSum | None = None
        """The sum of the current round."""
        self.error = 0.0
        """Largest error of the last average by rounding to fixed-point numbers."""
        self._contribution: Contribution | None = None

    def contribution(self, sent: Signature) -> Contribution:
        """Return how clients add to the sum, given the tensors that they send."""
        if self._contribution is None:
            self._contribution = Contribution(self.settings, self.privacy, self.method, sent)
        return self._contribution

    def begin(self, secure_sum: SecureSum, sent: Signature) -> None:
        """Start a round, or another attempt at it.

        Args:
            secure_sum: The sum of the round.
            sent: Names, types and shapes of the tensors that clients send.

        Raises:
            UserError: Fixed-point numbers cannot represent clipped updates with noise.
        """
        self.sum = secure_sum
        if isinstance(content := self.contribution(sent).content, PrivateSum):
            content.check_range(secure_sum.fixed_point, secure_sum.needed)

    def average(
        self,
        server: Server,
        messages: Iterable[Message],
        paths: tuple[str, ...] | None,
        rows: By,
        sums: tuple[str, ...],
    ) -> State:
        """Return the result of `server.average`, once per round.

        Raises:
            UserError: The method reads messages directly, averages twice in a round, or otherwise than in advance.
            RoundError: Too few clients responded to unmask the sum.
        """
        if not isinstance(messages, RestrictedMessages):
            raise UserError(self.refusal)
        if (paths, sums) != (self._averaging.parts, self._averaging.sums) or bool(rows) != bool(self._averaging.rows):
            raise UserError(
                f"secure: method.name = '{self.method.name}' averages other parts than its combine announced, but "
                "clients must know in advance what to add up; remove the secure section"
            )
        total, self.sum = self.sum, None
        if total is None:
            raise UserError(
                f"secure: method.name = '{self.method.name}' averages twice in a round, but a round has one sum; "
                "remove the secure section"
            )
        weight, members = 0.0, 0
        for message in messages.readable:
            assert message.client is not None
            total.add(message.client, as_ring(message[MASKED]))
            weight += 1.0 if self._averaging.uniform else message.samples / total.largest
            members += 1
        values, error = total.unmask(), total.fixed_point.error(members)
        assert self._contribution is not None
        content = self._contribution.content
        if isinstance(content, WeightedSum):
            found, self.error = content.result(values, weight, total.largest, server.state, error)
        else:
            assert isinstance(content, PrivateSum)
            found, self.error = content.result(values, self.participants, server.state, error)
        return found
