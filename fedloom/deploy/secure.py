"""Secure aggregation in a deployment: an organisation's keys, its rounds, and what it has already helped to unmask."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from cryptography.exceptions import InvalidSignature
from torch import Tensor

from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message, MessageError, Signature, refuse_unless
from fedloom.deploy.certificates import Key, read_public_key
from fedloom.deploy.consent import RefusalError
from fedloom.deploy.sealing import SIGNATURE
from fedloom.trust.privacy import system_normals
from fedloom.trust.secure.contribution import Contribution
from fedloom.trust.secure.party import Party
from fedloom.trust.secure.protocol import KeysRequest, Stage, Terms, UnmaskRequest, read

MEMBERS = "members"
"""Folder with the public keys of all organisations, at each organisation."""


class RegisteredKeys:
    """The organisation's key, and the other organisations' public keys from its folder.

    The keys come from the person who set the federation up, or from the organisations, never from the server: a server
    that could choose them could take part as any organisation. The server states only which name has which number, and
    an organisation signs its keys with its number.

    Args:
        folder: The organisation's folder.
        organisations: Names of the organisations of a run, by number.
        key: The organisation's private key.
    """

    def __init__(self, folder: Path, organisations: Sequence[str], key: Key):
        self._folder, self._organisations, self._key = folder / MEMBERS, organisations, key

    def sign(self, data: bytes) -> bytes:
        """Sign data with the organisation's key."""
        return self._key.sign(data, SIGNATURE)

    def verify(self, client: int, data: bytes, signature: bytes) -> None:
        """Raise MessageError unless this organisation signed the data."""
        known = client < len(self._organisations)
        refuse_unless(known, f"client {client} is not an organisation of this federation")
        name = self._organisations[client]
        path = self._folder / f"{name}.pub"
        if not path.exists():
            raise RefusalError(
                f"the key of {name} is not in this organisation's folder: get its node.pub over a safe channel and "
                f"save it as {MEMBERS}/{name}.pub"
            )
        try:
            read_public_key(path).verify(signature, data, SIGNATURE)
        except InvalidSignature:
            raise MessageError(
                f"the message is refused: {name} has not signed the keys that the server shows for it, or its key has "
                f"changed: compare {MEMBERS}/{name}.pub with its node.pub"
            ) from None


class UnmaskedSums:
    """The sums that this organisation helped to unmask in all runs, one line each in `unmasked.jsonl`.

    A second sum over other organisations would reveal the difference of both. So a round of a run is summed over one
    set of organisations. So is an update: the same round, seed and received tensors give the same update in another
    run, too. The same set may be summed again, for a server that was killed before it could use the first sum.

    Args:
        folder: The organisation's folder.
    """

    def __init__(self, folder: Path):
        self._path = folder / "unmasked.jsonl"

    def add(self, run: str, round: int, update: str, clients: Sequence[int]) -> None:
        """Record a sum before it is unmasked.

        Args:
            run: Name of the run.
            round: Number of the round.
            update: Hash of what this organisation's update was computed from.
            clients: The organisations in the sum.

        Raises:
            RefusalError: A sum over other organisations was unmasked in this round, or has the same update.
        """
        wanted = sorted(clients)
        for before in self._lines():
            same_round = (before["run"], before["round"]) == (run, round)
            if before["clients"] == wanted or not (same_round or before["update"] == update):
                continue
            what = f"round {round}" if same_round else f"this update, in run '{before['run']}',"
            remedy = "resume the run with the same organisations, or " if same_round else ""
            raise RefusalError(
                f"{what} was already summed over the clients {before['clients']}; a second sum over {wanted} would "
                f"reveal the difference: {remedy}start a run with another seed in recipe.yaml"
            )
        line = json.dumps({"run": run, "round": round, "update": update, "clients": wanted})
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(f"\n{line}")  # line break first: a line that a crash has cut off does not corrupt the next one
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> Iterator[dict[str, Any]]:
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # empty, or cut off by a crash before anything was unmasked
                    continue


class SecureMember:
    """An organisation's part in secure aggregation, one round at a time. Keys of a round are never written to disk.

    Args:
        client: Number of the organisation.
        folder: Its folder.
        key: Its private key.
    """

    def __init__(self, client: int, folder: Path, key: Key):
        self._client, self._folder, self._key = client, folder, key
        self._sums = UnmaskedSums(folder)
        self._party: Party | None = None
        self._update = ""
        """Hash of what the update of the round was computed from."""

    def answer(self, about: Mapping[str, Any], body: bytes, recipe: Recipe, organisations: Sequence[str]) -> bytes:
        """Answer a request of a stage.

        Args:
            about: The header of the request.
            body: The request.
            recipe: The recipe that was agreed on.
            organisations: Names of the organisations of the run, by number.

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
            self._party = Party(self._client, terms, RegisteredKeys(self._folder, organisations, self._key))
        party = self._current(about)
        if stage == "unmask":
            survivors = read(body, UnmaskRequest)["survivors"]
            party.check_survivors(survivors)
            self._sums.add(party.terms.run, party.terms.round, self._update, survivors)
        return party.answer(cast(Stage, stage), body)

    def receive(self, about: Mapping[str, Any], job: Job, seed: int) -> None:
        """Take the other members' shares, which the server sends with a training job; called before training.

        Args:
            about: The header of the job.
            job: The job.
            seed: The recipe's seed.

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
        received = Message({name: job.message[name] for name in sorted(job.message)}).to_bytes()
        self._update = hashlib.sha256(f"{seed} {job.round} ".encode() + received).hexdigest()

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
