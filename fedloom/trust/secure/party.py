"""A client's side of one round of secure aggregation; `protocol` lists the stages."""

import hashlib
import secrets
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedloom.core.message import MessageError, refuse_unless
from fedloom.trust.secure import shamir
from fedloom.trust.secure.masks import add_mask, agreed_key, derived_key, new_private_key, public_key
from fedloom.trust.secure.protocol import (
    Announcement,
    Identity,
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

NONCE = bytes(12)
"""A key encrypts one message only, so that the nonce need not differ."""
_SELF, _PAIR, _SHARES = b"self", b"pair", b"shares"


class Party:
    """A client in one round. It generates new keys, so that nothing of an earlier round can be used again.

    Every stage happens once and in order; anything else is refused.

    Args:
        client: Number of the client.
        terms: Terms of the round.
        identity: The client's long-term key, and the other clients' public keys.
    """

    def __init__(self, client: int, terms: Terms, identity: Identity):
        self.client, self.terms, self._identity = client, terms, identity
        self._encryption, self._mask, self._seed = new_private_key(), new_private_key(), secrets.token_bytes(32)
        self._expected: Literal["keys", "shares", "relay", "mask", "unmask", "nothing"] = "keys"
        self._own: Announcement
        self._request: SharesRequest
        self._hash = b""
        self._held: dict[int, tuple[bytes, bytes]] = {}
        """Shares of each member's seed and mask key that this client holds; its own are among them."""

    def answer(self, stage: Stage, body: bytes) -> bytes:
        """Answer a request of the server.

        Raises:
            MessageError: The request is malformed, out of order, or asks for more than a sum of three members.
        """
        if stage == "keys":
            return written(self.announce())
        if stage == "shares":
            return written(self.share(read(body, SharesRequest)))
        return written(self.reveal(read(body, UnmaskRequest)["survivors"]))

    def announce(self) -> Announcement:
        """Return this client's public keys, signed."""
        self._advance("keys", "shares")
        encryption, mask = public_key(self._encryption), public_key(self._mask)
        signature = self._identity.sign(signed_keys(self.terms, self.client, encryption, mask))
        self._own = {"encryption": encryption.hex(), "mask": mask.hex(), "signature": signature.hex()}
        return self._own

    def share(self, request: SharesRequest) -> SharesAnswer:
        """Check the roster, and return shares of this client's seed and mask key, encrypted for each member."""
        roster = request["roster"]
        refuse_unless(
            len(roster) >= LEAST_MEMBERS,
            f"a sum of {len(roster)} members would reveal too much about each; at least {LEAST_MEMBERS} must take part",
        )
        refuse_unless(roster.get(self.client) == self._own, "the roster does not have this client's keys")
        for member, one in roster.items():
            if member != self.client:
                data = signed_keys(self.terms, member, bytes.fromhex(one["encryption"]), bytes.fromhex(one["mask"]))
                self._identity.verify(member, data, bytes.fromhex(one["signature"]))
        keys = [one[kind] for one in roster.values() for kind in ("encryption", "mask")]
        refuse_unless(len(set(keys)) == len(keys), "two members of the roster have the same key")
        refuse_unless(request["largest"] > 0, "the largest number of samples is 0")
        self._advance("shares", "relay")
        self._request, self._hash = request, roster_hash(self.terms, request)
        seeds, masks = (shamir.split(secret, self.needed, roster) for secret in (self._seed, self._mask))
        self._held = {self.client: (seeds[self.client], masks[self.client])}
        return {
            "roster": self._hash.hex(),
            "commitment": commitment(self._seed),
            "shares": {
                member: AESGCM(self._share_key(self.client, member)).encrypt(NONCE, seeds[member] + masks[member], None)
                .hex()
                for member in roster
                if member != self.client
            },
        }  # fmt: skip

    def receive(self, body: bytes) -> None:
        """Decrypt the shares of the other members, which the server passes on with the training job.

        Raises:
            MessageError: A share was changed, is for another client or roster, or too few members sent one.
        """
        shares = read(body, Relay)["shares"]
        self._advance("relay", "mask")
        others = self._request["roster"].keys() - {self.client}
        refuse_unless(shares.keys() <= others, "it has a share of a client that is not in the roster")
        for member, encrypted in shares.items():
            try:
                plain = AESGCM(self._share_key(member, self.client)).decrypt(NONCE, bytes.fromhex(encrypted), None)
            except InvalidTag:
                raise MessageError(
                    f"the message is refused: the share of member {member} was changed, or is for another roster"
                ) from None
            refuse_unless(len(plain) == 2 * shamir.SHARE_BYTES, f"the share of member {member} has the wrong size")
            self._held[member] = plain[: shamir.SHARE_BYTES], plain[shamir.SHARE_BYTES :]
        refuse_unless(
            len(self._held) >= self.needed, f"{len(self._held)} members shared their keys; {self.needed} are needed"
        )

    @property
    def members(self) -> int:
        """Number of members of the roster."""
        return len(self._request["roster"])

    @property
    def needed(self) -> int:
        """Number of members without whom nothing can be unmasked."""
        return self.terms.settings.needed(self.members)

    @property
    def largest(self) -> int:
        """Number of samples that has the weight 1."""
        return self._request["largest"]

    @property
    def fixed_point(self) -> FixedPoint:
        """Representation of numbers in this round."""
        return self.terms.settings.fixed_point(self.members)

    def mask(self, vector: Ring) -> None:
        """Add this client's masks to a vector, in place: one from its seed, and one per other member."""
        self._advance("mask", "unmask")
        add_mask(vector, self_mask_key(self._seed, self._hash))
        for member in self._held.keys() - {self.client}:
            key = pair_mask_key(self._mask, bytes.fromhex(self._request["roster"][member]["mask"]), self._hash)
            add_mask(vector, key, subtract=member < self.client)

    def check_survivors(self, survivors: list[int]) -> None:
        """Refuse to unmask anything but one sum over enough members, this client among them."""
        refuse_unless(self._expected == "unmask", "it unmasks a sum to which this client has added nothing")
        found = set(survivors)
        refuse_unless(len(found) == len(survivors) and found <= self._held.keys(), "a survivor is not a member")
        refuse_unless(self.client in found, "this client is not among the survivors")
        refuse_unless(
            len(found) >= self.needed,
            f"it unmasks a sum of {len(found)} members, and at least {self.needed} are needed",
        )

    def reveal(self, survivors: list[int]) -> UnmaskAnswer:
        """Return shares of the survivors' seeds and of the other members' mask keys, once."""
        self.check_survivors(survivors)
        self._advance("unmask", "nothing")
        answer: UnmaskAnswer = {
            "seeds": {member: self._held[member][0].hex() for member in survivors},
            "keys": {member: share[1].hex() for member, share in self._held.items() if member not in survivors},
        }
        self._held, self._seed, self._mask, self._encryption = {}, b"", b"", b""
        return answer

    def _share_key(self, sender: int, recipient: int) -> bytes:
        other = recipient if sender == self.client else sender
        purpose = _SHARES + self._hash + sender.to_bytes(8) + recipient.to_bytes(8)
        return agreed_key(self._encryption, bytes.fromhex(self._request["roster"][other]["encryption"]), purpose)

    def _advance(self, stage: str, following: Literal["shares", "relay", "mask", "unmask", "nothing"]) -> None:
        refuse_unless(
            self._expected == stage,
            f"round {self.terms.round}: it is about the stage '{stage}', not '{self._expected}'",
        )
        self._expected = following


def signed_keys(terms: Terms, client: int, encryption: bytes, mask: bytes) -> bytes:
    """Return the bytes that a client signs to announce its public keys."""
    return b"fedloom secure aggregation keys" + terms.context + client.to_bytes(8) + encryption + mask


def commitment(seed: bytes) -> str:
    """Return a hash of a seed, by which the server recognises wrong shares."""
    return hashlib.sha256(b"fedloom secure aggregation seed" + seed).hexdigest()


def self_mask_key(seed: bytes, roster: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derived_key(seed, _SELF + roster)


def pair_mask_key(private: bytes, public: bytes, roster: bytes) -> bytes:
    """Return the key of the mask of two members, which the one with the smaller number adds and the other subtracts."""
    return agreed_key(private, public, _PAIR + roster)
