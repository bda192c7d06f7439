"""The server's side of one round of secure aggregation; `protocol` lists the stages."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedloom.core.failures import Failure, RoundError
from fedloom.core.message import MessageError
from fedloom.trust.secure import shamir
from fedloom.trust.secure.masks import add_mask, public_key
from fedloom.trust.secure.party import commitment, pair_mask_key, self_mask_key
from fedloom.trust.secure.protocol import (
    Announcement,
    KeysRequest,
    Parties,
    Relay,
    SharesAnswer,
    SharesRequest,
    Stage,
    Terms,
    UnmaskAnswer,
    UnmaskRequest,
    read,
    roster_hash,
    written,
)
from fedloom.trust.secure.ring import FixedPoint, Ring
from fedloom.trust.secure.settings import LEAST_MEMBERS

Answer = TypeVar("Answer")


class SecureSum:
    """A sum of clients' vectors, of which the server sees only masked ones.

    Creating it runs the stages `keys` and `shares`. Clients that do not answer, or answer wrongly, are in `failed`.

    Args:
        terms: Terms of the round.
        parties: Reaches the clients.
        clients: The clients of the round.
        samples: Returns the number of training samples of a client.
    """

    def __init__(self, terms: Terms, parties: Parties, clients: Iterable[int], samples: Callable[[int], int]):
        self.terms, self._parties = terms, parties
        self.failed: dict[int, Failure] = {}
        request: KeysRequest = {"round": terms.round, "attempt": terms.attempt}
        self._roster = self._ask("keys", dict.fromkeys(clients, written(request)), Announcement)
        largest = max(map(samples, self._roster), default=0)  # a client may have joined when it was asked for keys
        self.largest = 1 << max(0, largest - 1).bit_length()  # a power of two: scaling is exact, and reveals less
        """Number of samples that has the weight 1."""
        self._commitments: dict[int, str] = {}
        """Hash of each member's seed; members that shared their keys."""
        self._hash = b""
        self._total: Ring | None = None
        self._added: list[int] = []
        if self._suffice(self._roster, LEAST_MEMBERS, "keys"):
            self._share()

    @property
    def needed(self) -> int:
        """Number of members without whom nothing can be unmasked."""
        return self.terms.settings.needed(len(self._roster))

    @property
    def fixed_point(self) -> FixedPoint:
        """Representation of numbers in this round."""
        return self.terms.settings.fixed_point(max(1, len(self._roster)))

    def _share(self) -> None:
        request: SharesRequest = {"roster": self._roster, "largest": self.largest}
        self._hash = roster_hash(self.terms, request)
        answers = self._ask("shares", dict.fromkeys(self._roster, written(request)), SharesAnswer)
        for member, answer in list(answers.items()):
            complete = answer["shares"].keys() == self._roster.keys() - {member}
            if not complete or answer["roster"] != self._hash.hex():
                del answers[member]
                why = "it knows other terms of the round" if complete else "it did not share its keys with all members"
                self.failed[member] = Failure("invalid", f"secure aggregation: {why}")
        if not self._suffice(answers, self.needed, "shares of keys"):
            return
        self._commitments = {member: answer["commitment"] for member, answer in answers.items()}
        for member in answers:
            relay: Relay = {"shares": {other: answers[other]["shares"][member] for other in answers if other != member}}
            self._parties.relay(member, written(relay))

    def _suffice(self, answers: Mapping[int, object], needed: int, what: str) -> bool:
        """Whether enough clients answered; if not, the round fails for all of them."""
        if len(answers) >= needed:
            return True
        why = f"secure aggregation: {len(answers)} clients sent {what}, and at least {needed} are needed"
        self.failed |= {client: Failure("dropped", why) for client in answers}
        return False

    def add(self, client: int, masked: Ring) -> None:
        """Add a client's masked vector."""
        assert client in self._commitments, f"client {client} has not shared its keys"
        if self._total is None:
            self._total = masked.copy()
        else:
            np.add(self._total, masked, out=self._total)
        self._added.append(client)

    def unmask(self) -> NDArray[np.float64]:
        """Ask the survivors for the shares that remove the masks, and return the sum of their vectors.

        Raises:
            RoundError: Too few clients survived or answered, or a share is wrong. Nothing was unmasked.
        """
        survivors, dropped = sorted(self._added), sorted(self._commitments.keys() - set(self._added))
        if len(survivors) < self.needed or self._total is None:
            raise self._too_few(len(survivors), "sent a masked message")
        request: UnmaskRequest = {"survivors": survivors}
        answers = self._ask("unmask", dict.fromkeys(survivors, written(request)), UnmaskAnswer)
        complete = {
            holder: answer
            for holder, answer in answers.items()
            if answer["seeds"].keys() == set(survivors) and answer["keys"].keys() == set(dropped)
        }
        if len(complete) < self.needed:
            why = "; ".join(dict.fromkeys(failure.why for failure in self.failed.values()))
            raise self._too_few(len(complete), "helped to remove the masks", f" ({why})" if why else "")
        holders = list(complete)[: self.needed]
        for member in survivors:
            seed = self._joined(member, {holder: complete[holder]["seeds"][member] for holder in holders})
            self._refuse_wrong(member, seed is not None and commitment(seed) == self._commitments[member])
            assert seed is not None
            add_mask(self._total, self_mask_key(seed, self._hash), subtract=True)
        for member in dropped:
            key = self._joined(member, {holder: complete[holder]["keys"][member] for holder in holders})
            self._refuse_wrong(member, key is not None and public_key(key).hex() == self._roster[member]["mask"])
            assert key is not None
            for other in survivors:
                pair = pair_mask_key(key, bytes.fromhex(self._roster[other]["mask"]), self._hash)
                add_mask(self._total, pair, subtract=other < member)
        return self.fixed_point.decode(self._total)

    @staticmethod
    def _joined(member: int, shares: Mapping[int, str]) -> bytes | None:
        return shamir.join({holder: bytes.fromhex(share) for holder, share in shares.items()})

    def _refuse_wrong(self, member: int, right: bool) -> None:
        if not right:
            raise RoundError(
                f"round {self.terms.round}: secure aggregation: a client sent a wrong share of client {member}'s "
                "secret, so that the masks cannot be removed; resume the run, without that client if it happens again"
            )

    def _too_few(self, count: int, what: str, why: str = "") -> RoundError:
        refused = any(failure.refusal for failure in self.failed.values())
        return RoundError(
            f"round {self.terms.round}: secure aggregation: {count} of {len(self._roster)} clients {what}, and "
            f"{self.needed} are needed{why}; resume the run when more are available"
            + ("" if refused else ", or lower secure.threshold")
        )

    def _ask(self, stage: Stage, requests: Mapping[int, bytes], kind: type[Answer]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for client, answer in self._parties.ask(stage, self.terms.round, requests).items():
            if isinstance(answer, Failure):
                self.failed[client] = answer
                continue
            try:
                answers[client] = read(answer, kind)
            except MessageError as error:
                self.failed[client] = Failure("invalid", str(error))
        return answers
