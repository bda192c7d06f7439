"""Secure aggregation in a deployment: an organisation's keys, its rounds, and what it has already helped to unmask."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from cryptography.exceptions import InvalidSignature
from torch import Tensor

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.message import MessageError, Signature, refuse_unless
from fedloom.deploy.certificates import Key, PublicKey, read_public_key
from fedloom.deploy.consent import RefusalError
from fedloom.deploy.sealing import SIGNATURE
from fedloom.deploy.terms import FederationTerms
from fedloom.experiment.files import write_whole
from fedloom.trust.privacy import system_normals
from fedloom.trust.secure.contribution import Contribution
from fedloom.trust.secure.party import Party
from fedloom.trust.secure.protocol import KeysRequest, Stage, Terms, UnmaskRequest, read

MEMBERS = "members"
"""Folder with the public keys of all organisations, at each organisation."""


class RegisteredKeys:
    """The organisation's key, and the other organisations' public keys from its folder.

    The keys come from the person who set the federation up, or from the organisations, never from the server: a server
    that could choose them could take part as any organisation.

    Args:
        folder: The organisation's folder.
        federation: The terms of the federation.
        key: The organisation's private key.
    """

    def __init__(self, folder: Path, federation: FederationTerms, key: Key):
        self._folder, self._federation, self._key = folder / MEMBERS, federation, key
        self._known: dict[int, PublicKey] = {}

    def sign(self, data: bytes) -> bytes:
        """Sign data with the organisation's key."""
        return self._key.sign(data, SIGNATURE)

    def verify(self, client: int, data: bytes, signature: bytes) -> None:
        """Raise MessageError unless this organisation signed the data."""
        names = self._federation.organisations
        refuse_unless(client < len(names), f"client {client} is not an organisation of this federation")
        if client not in self._known:
            path = self._folder / f"{names[client]}.pub"
            if not path.exists():
                raise RefusalError(
                    f"the key of {names[client]} is not in this organisation's folder: get its node.pub over a safe "
                    f"channel and save it as {MEMBERS}/{names[client]}.pub"
                )
            self._known[client] = read_public_key(path)
        try:
            self._known[client].verify(signature, data, SIGNATURE)
        except InvalidSignature:
            raise MessageError(
                f"the message is refused: {names[client]} has not signed the keys that the server shows for it"
            ) from None


class UnmaskedSums:
    """The sums of a run that this organisation helped to unmask, on disk, one per round.

    A second sum over other organisations would reveal the difference of both. The same organisations may be summed
    again, for a server that was killed before it could use the first sum.

    Args:
        path: The file.
    """

    def __init__(self, path: Path):
        self._path = path

    def add(self, round: int, survivors: list[int]) -> None:
        """Record a sum before it is unmasked.

        Raises:
            RefusalError: A sum over other organisations was unmasked in this round.
        """
        known: dict[str, list[int]] = {}
        if self._path.exists():
            known = json.loads(self._path.read_text(encoding="utf-8"))
        before = known.get(str(round))
        if before is not None and sorted(survivors) != before:
            raise RefusalError(
                f"round {round} was already summed over the clients {before}; a second sum over {sorted(survivors)} "
                "would reveal the difference: resume the run with the same organisations, or start a new run"
            )
        known[str(round)] = sorted(survivors)
        write_whole(self._path, json.dumps(known).encode() + b"\n", private=True)


class SecureMember:
    """An organisation's part in secure aggregation, one round at a time. Keys of a round are never written to disk.

    Args:
        client: Number of the organisation.
        keys: Its key, and those of the others.
    """

    def __init__(self, client: int, keys: RegisteredKeys):
        self._client, self._keys = client, keys
        self._party: Party | None = None

    def answer(self, about: Mapping[str, Any], body: bytes, recipe: Recipe, sums: UnmaskedSums) -> bytes:
        """Answer a request of a stage.

        Args:
            about: The header of the request.
            body: The request.
            recipe: The recipe that was agreed on.
            sums: The sums of this run that were unmasked.

        Raises:
            MessageError: The request is malformed, out of order or for another round.
            RefusalError: It asks for more than a sum of enough organisations.
        """
        stage = about.get("stage")
        refuse_unless(stage in get_args(Stage), f"secure aggregation has no stage {stage!r:.20}")
        refuse_unless(recipe.secure is not None, "the recipe has no section secure")
        assert recipe.secure is not None
        if stage == "keys":
            request = read(body, KeysRequest)
            rounds = recipe.training.rounds
            refuse_unless(0 < request["round"] <= rounds, f"it is for round {request['round']} of {rounds}")
            terms = Terms(str(about["run"]), str(about["recipe"]), request["round"], request["attempt"], recipe.secure)
            self._party = Party(self._client, terms, self._keys)
        party = self._current(about)
        if stage == "unmask":
            survivors = read(body, UnmaskRequest)["survivors"]
            party.check_survivors(survivors)
            sums.add(party.terms.round, survivors)
        return party.answer(cast(Stage, stage), body)

    def receive(self, about: Mapping[str, Any], job: Job) -> None:
        """Take the other members' shares, which the server sends with a training job; called before training.

        Raises:
            MessageError: The job has no shares, or is for another round. An unmasked update is never sent.
        """
        shares = about.get("secure")
        refuse_unless(isinstance(shares, str), "the recipe asks for secure aggregation, but the job has no shares")
        assert isinstance(shares, str)
        party = self._current(about)
        same = (job.round, job.attempt) == (party.terms.round, party.terms.attempt)
        refuse_unless(same, "it is for another round than the keys of secure aggregation")
        party.receive(shares.encode())

    def masked(self, result: Result, contribution: Contribution, received: Mapping[str, Tensor]) -> Result:
        """Replace an update by its masked form; an update that cannot be masked is refused.

        Args:
            result: The result of a training job.
            contribution: How the organisation adds to the sum.
            received: The server's message, decoded.
        """
        if result.error is not None:
            return result
        assert result.message is not None
        assert self._party is not None
        refuse_unless(
            result.message.samples <= self._party.largest,
            f"the largest number of samples is {self._party.largest}, and this organisation has more",
        )
        try:
            normal = system_normals(self._party.terms.round)
            result.message = contribution.masked(self._party, result.message, received, normal)
        except UserError as error:
            raise RefusalError(str(error)) from None
        return result

    def _current(self, about: Mapping[str, Any]) -> Party:
        party = self._party
        refuse_unless(party is not None, "its keys are unknown: this client was restarted in the round")
        assert party is not None
        same = (party.terms.run, party.terms.recipe) == (about.get("run"), about.get("recipe"))
        refuse_unless(same and about.get("round") == party.terms.round, "it is for another round or run")
        return party


def contribution_of(recipe: Recipe, sent: Signature) -> Contribution | None:
    """Return how an organisation adds to the sum; None if the recipe has no secure aggregation.

    Raises:
        RefusalError: The method needs more than a sum.
    """
    if recipe.secure is None:
        return None
    try:
        return Contribution(recipe.secure, recipe.privacy, recipe.make_method(), sent)
    except UserError as error:
        raise RefusalError(str(error)) from None
