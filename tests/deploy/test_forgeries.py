"""Messages that were changed on their way, sent again, or say what cannot be: either side refuses them."""

import json
import resource
from dataclasses import replace

import pytest
from federated import LocalFederation, make_experiment, member, small_recipe, with_content
from flwr.app import ConfigRecord, RecordDict

from fedloom.core.failures import ClientError, RoundError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message, MessageError, pack
from fedloom.deploy.certificates import new_key
from fedloom.deploy.sealing import RECORD, opened, sealed
from fedloom.deploy.tasks import task_elsewhere
from fedloom.deploy.worker import reply_to

pytestmark = pytest.mark.usefixtures("impatient")


def _changed(parcel, **fields):
    record = dict(parcel.content.config_records[RECORD]) | fields
    return with_content(parcel, RecordDict({RECORD: ConfigRecord(record)}))


def _flipped(parcel):
    body = bytearray(parcel.content.config_records[RECORD]["body"])
    if not body:
        return parcel
    body[-1] ^= 1  # the last bit of a weight: still a message in every other respect
    return _changed(parcel, body=bytes(body))


def test_an_answer_that_was_changed_on_its_way_is_refused(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    federation.grid.on_reply = lambda parcel: _flipped(parcel) if parcel.metadata.src_node_id == 101 else parcel
    history = federation.run().history
    assert history[0]["failed"] == {"invalid": 1}


def test_a_request_that_was_changed_or_is_a_strangers_is_refused(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg"))
    federation.grid.on_request = _flipped
    with pytest.raises(RoundError, match="0 of 3 organisations have joined"):
        federation.run()
    federation.grid.on_request = lambda parcel: with_content(parcel, sealed({"what": "join"}, b"{}", new_key()))
    federation.fleet._refused.clear()
    with pytest.raises(RoundError, match="0 of 3 organisations have joined"):
        federation.run()
    assert not (tmp_path / "fed" / "organisations" / "north" / "answered.json").exists()


def test_an_answer_cannot_stand_for_another(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg"))
    first = {}

    def replay(parcel):
        return first.setdefault((parcel.metadata.src_node_id, parcel.metadata.message_type), parcel)

    federation.grid.on_reply = replay
    with pytest.raises(RoundError, match="round 2: 0 of 3 clients answered"):
        federation.run()


def test_a_request_that_is_sent_again_is_not_obeyed_again(tmp_path):
    """It would use up consent, and put an old memory in the place of a new one."""
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedcrl"))
    federation.run()
    for again in (federation.members[100], member(tmp_path / "fed", "north")):  # at once, and after a restart
        for parcel in federation.grid.sent:
            if parcel.metadata.dst_node_id == 100:
                assert "it was received before" in reply_to(again, parcel).error.reason
    place = tmp_path / "fed" / "organisations" / "north"
    assert json.loads((place / "answered.json").read_text()) == {"updates": 2}
    assert len(list((place / "runs" / "one" / "memory").iterdir())) == 2


def test_sealed_bytes_open_only_with_the_right_key_and_unchanged():
    key, other = new_key(), new_key()
    content = sealed({"a": 1}, b"body", key)
    assert opened(content, key.public_key()) == ({"a": 1}, b"body")
    with pytest.raises(MessageError, match="signature"):
        opened(content, other.public_key())
    with pytest.raises(MessageError, match="4 bytes, and 3 are allowed"):
        opened(content, key.public_key(), limit=3)
    record = dict(content.config_records[RECORD])
    for name, value in (("about", '{"a": 2}'), ("body", b"bodz"), ("signature", b"")):
        with pytest.raises(MessageError, match="signature"):
            opened(RecordDict({RECORD: ConfigRecord(record | {name: value})}), key.public_key())
    with pytest.raises(MessageError, match="must have about, body and signature"):
        opened(RecordDict({RECORD: ConfigRecord({"body": b""})}), key.public_key())
    with pytest.raises(MessageError, match="not a message of fedloom"):
        opened(RecordDict({}), key.public_key())


def test_a_server_is_not_told_what_it_did_not_ask(agreed):
    """An answer of the right key about the wrong client, or with impossible scores, counts as none."""
    from fedloom.core.scores import Scores
    from fedloom.deploy.engine import _check_scores

    good = Scores(0, [1, 0], [2, 3], None)
    _check_scores(good, 0, 2)
    _check_scores(Scores(0, [1], [5], None), 0, 2)
    for bad in (
        replace(good, client=1), replace(good, right=[3, 0]), replace(good, total=[2]), replace(good, total=[2, "3"]),
        replace(good, loss="low"), replace(good, loss=0.5), replace(good, right=None),
    ):  # fmt: skip
        with pytest.raises(MessageError):
            _check_scores(bad, 0, 2)


@pytest.mark.parametrize("count", [2**53, 10**9])
def test_a_newcomer_cannot_make_the_server_allocate(agreed, count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fleet = agreed.fleet
    failure = fleet._admit(0, {"what": "joined", "versions": agreed.language, "train": count, "test": count}, b"")
    if failure is None:
        assert task_elsewhere(agreed.recipe, fleet.federation, fleet.train, fleet.test).largest_client == count
    else:
        assert f"the organisation declares {count}" in failure.why
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17


def test_an_update_weighs_what_its_organisation_said_when_it_joined(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    south = federation.members[101]
    work = south._work

    def boast(about, body):
        result = work(about, body)
        if result.message is not None:
            result.message.samples = 2**50
        return result

    south._work = boast
    assert federation.run().history[0]["failed"] == {"invalid": 1}


def test_scores_are_of_as_many_images_as_its_organisation_said(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    south = federation.members[101]
    work = south._work

    def boast(about, body):
        result = work(about, body)
        for scores in result.scores:
            scores.right = scores.total = [10**6] * len(scores.total)
        return result

    south._work = boast
    assert federation.run().history[0]["evaluated"] == 2


def test_an_error_that_an_organisation_tells_is_words_and_no_more(agreed):
    """A header can hold anything where an exception would be, or a text without end."""
    header = {"kind": "raised", "why": "x" * 10**5, "trace": "", "injected": False, "mistake": True, "reported": False,
            "cause": None}  # fmt: skip
    body = pack({}, {"has": [], "samples": 0, "client": 0, "loss": None, "scores": [], "seconds": 0, "error": header})
    experiment = make_experiment(agreed.fleet, agreed.recipe)
    with experiment._make_engine(experiment.setup, agreed.recipe.engine) as flower:
        error = flower._checked(Job("update", 1, Message({}), client=0), 0, Result.from_bytes(body)).error
    assert isinstance(error.error(0, 1), ClientError)
    assert len(error.why) <= 1000
    for kind in ("raised", "nonsense", ["raised"]):
        bad = pack({}, {"has": [], "samples": 0, "client": 0, "loss": None, "scores": [], "seconds": 0,
                        "error": header | {"kind": kind}})  # fmt: skip
        failure = agreed.fleet._admit(0, {"what": "result"}, bad)
        assert isinstance(failure.why, str) and len(failure.why) <= 1000 and failure.cause is None


def test_a_header_has_its_limit_too():
    key = new_key()
    with pytest.raises(MessageError, match="its header"):
        opened(sealed({"a": "x" * 2**21}, b"", key), key.public_key())
