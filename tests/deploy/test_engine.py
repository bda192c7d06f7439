"""The engine without a network: what it computes, and what either side refuses."""

import json
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from federated import (
    NAMES,
    LoopGrid,
    make_experiment,
    make_federation,
    make_fleet,
    member,
    small_recipe,
    without_losses,
)
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as Parcel
from safetensors.torch import load_file
from tiny import same_state, without_times

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.failures import ClientError, RoundError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message, MessageError, pack
from fedloom.core.registry import Registry
from fedloom.deploy import fleet as fleet_module
from fedloom.deploy.certificates import new_key
from fedloom.deploy.consent import RefusalError
from fedloom.deploy.deployable import deployable
from fedloom.deploy.events import EventLog, read_events
from fedloom.deploy.sealing import RECORD, opened, sealed
from fedloom.deploy.tasks import task_elsewhere
from fedloom.deploy.terms import FederationTerms, fingerprint, protocol_versions
from fedloom.deploy.worker import reply_to
from fedloom.experiment.files import unwritable
from fedloom.experiment.loop import Experiment


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(fleet_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module, "REFRESH_SECONDS", 0.05)


class Set:
    """A federation in a folder, with all its organisations at work in this process."""

    def __init__(self, folder, recipe, **limits):
        self.folder, self.recipe = folder, recipe
        self.task = make_federation(folder, recipe)
        self.members = {100 + c: member(folder, name, **limits) for c, name in enumerate(NAMES)}
        self.grid = LoopGrid(self.members)
        self.fleet = make_fleet(folder, self.grid, recipe)

    def run(self, **options):
        self.fleet.wait_for(3, 1, 0.5)
        experiment = make_experiment(self.fleet, self.recipe, **options)
        experiment.run()
        return experiment


@pytest.mark.parametrize("method", ["fedavg", "fedcrl", "scaffold", "fedproto"])
def test_organisations_give_what_a_simulation_gives_bit_for_bit(tmp_path, method):
    recipe = small_recipe(method)
    federated = Set(tmp_path / "fed", recipe).run()
    simulated = Experiment(recipe)
    simulated.run()
    assert same_state(federated.server.state, simulated.server.state)
    assert without_times(federated.history) == without_losses(without_times(simulated.history))
    assert federated.scores == [replace(scores, loss=None) for scores in simulated.scores]
    assert training_entries(federated.ledger) == training_entries(simulated.ledger)


def training_entries(ledger):
    return [entry for entry in ledger.to_json()["messages"] if entry["purpose"] == "training"]


def test_memory_and_personal_models_stay_with_their_clients(tmp_path):
    recipe = small_recipe("fedcrl")
    federation = Set(tmp_path / "fed", recipe)
    experiment = federation.run()
    simulated = Experiment(recipe)
    simulated.run()
    for client, name in enumerate(NAMES):
        place = tmp_path / "fed" / "organisations" / name / "runs" / "one"
        own = load_file(place / "personal.safetensors")
        theirs = load_file(simulated.folder.path / "models" / f"client-{client:05d}.safetensors")
        assert same_state(own, theirs)
        assert sorted(path.stem for path in (place / "memory").iterdir()) == ["round-000001", "round-000002"]
        left = json.loads((place / "ledger.json").read_text())
        up = [entry for entry in left["messages"] if (entry["direction"], entry["purpose"]) == ("up", "training")]
        assert [(entry["rounds"], entry["messages"]) for entry in up] == [([[1, 2]], 2)]
    assert not list((experiment.folder.path / "models").glob("client-*"))


def test_what_ran_ahead_of_a_lost_upload_is_rolled_back(tmp_path):
    recipe = small_recipe("fedcrl", training__min_clients=3)
    federation = Set(tmp_path / "fed", recipe)
    lost = []

    def lose_one(parcel):
        job = parcel.metadata.group_id
        if job == "2" and not lost:
            lost.append(parcel.metadata.src_node_id)
            content = RecordDict({RECORD: ConfigRecord({"about": "{}", "body": b"", "signature": b""})})
            return _with(parcel, content)
        return parcel

    federation.grid.on_reply = lose_one
    experiment = federation.run()
    simulated = Experiment(recipe)
    simulated.run()
    assert lost
    assert experiment.history[1]["attempts"] == 2
    assert same_state(experiment.server.state, simulated.server.state)


def test_leavers_are_tolerated_and_newcomers_join_between_rounds(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=4, training__min_clients=2))
    federation.grid.online = {100, 101}

    def change(record):
        federation.grid.online = {1: {100, 101, 102}, 2: {101, 102}}.get(record["round"], {101, 102})

    history = federation.run(on_round=change).history
    assert [record["clients"] for record in history] == [2, 3, 2, 2]
    assert [record["evaluated"] for record in history] == [2, 3, 2, 2]
    assert history[2]["failed"] == {"dropped": 1}


def test_an_absent_organisation_is_logged_once_until_it_answers(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=4, training__min_clients=2))
    federation.fleet._events = EventLog(tmp_path / "events.jsonl")

    def change(record):
        federation.grid.online = {1: {100, 101}, 2: {100, 101}, 3: {100, 101, 102}}.get(record["round"], {100, 101})

    history = federation.run(on_round=change).history
    assert [record["clients"] for record in history] == [3, 2, 2, 3]
    found = [(event["who"], event["event"]) for event in read_events(tmp_path / "events.jsonl")]
    assert [one for one in found if one[1] == "failed"] == [("west", "failed")]


def test_fewer_than_min_clients_end_the_run_and_it_can_go_on(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedcrl", training__min_clients=3, out=tmp_path / "run"))

    def leave(record):
        federation.grid.online = {100, 101}

    with pytest.raises(RoundError, match="2 of 3 organisations have joined within 2 s, and training.min_clients = 3"):
        federation.run(on_round=leave)
    federation.grid.online = {100, 101, 102}
    again = make_experiment(federation.fleet, federation.recipe)
    again.run(resume=True)
    simulated = Experiment(federation.recipe.with_(out=tmp_path / "simulated"))
    simulated.run()
    assert same_state(again.server.state, simulated.server.state)


def test_a_run_that_ends_names_the_command_of_the_deployment_that_resumes_it(tmp_path):
    server, run = tmp_path / "my server", tmp_path / "my server/runs/first"
    (server / "recipes/first.federation").mkdir(parents=True)
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__min_clients=3, out=run))

    def leave(record):
        federation.grid.online = {100}

    with pytest.raises(RoundError) as ended:
        federation.run(on_round=leave)
    command = f"fedloom deploy start '{server}/recipes/first.yaml' --folder '{server}' --name first"
    assert ended.value.__notes__ == [f"the rounds so far are saved; resume with: {command}"]
    assert str(unwritable(run / "models/server.safetensors", OSError(28, "full"))).endswith(f"with: {command}")
    with pytest.raises(UserError, match="the run of a deployment, .* resume it on its server: fedloom deploy start"):
        fedloom.resume(run)


def test_who_does_not_answer_in_time_is_left_out(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    federation.fleet.wait_for(3, 3, 1)
    federation.grid.silent = {101}
    history = federation.run(timeout=0.2).history
    assert history[0]["failed"] == {"timed_out": 1}
    assert history[0]["clients"] == 2


def test_who_was_restarted_has_lost_the_question_and_is_not_waited_for(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    federation.fleet.wait_for(3, 3, 1)
    push = federation.grid.push_messages

    def restart(parcels):
        if parcels[0].metadata.message_type == "train":
            federation.grid.silent, federation.grid.since = {101}, {101: "later"}
        else:
            federation.grid.silent = set()
        return push(parcels)

    federation.grid.push_messages = restart
    record = federation.run(timeout=60).history[0]
    assert record["failed"] == {"dropped": 1}
    assert record["evaluated"] == 3
    assert record["seconds"] < 60


def _with(parcel, content):
    """The same message with other contents, as somebody in the middle could make it."""
    changed = Parcel.__new__(Parcel)
    changed.__dict__.update(parcel.__dict__)
    changed.__dict__["_content"] = content
    return changed


def _changed(parcel, **fields):
    record = dict(parcel.content.config_records[RECORD]) | fields
    return _with(parcel, RecordDict({RECORD: ConfigRecord(record)}))


def _flipped(parcel):
    body = bytearray(parcel.content.config_records[RECORD]["body"])
    if not body:
        return parcel
    body[-1] ^= 1  # the last bit of a weight: still a message in every other respect
    return _changed(parcel, body=bytes(body))


def test_an_answer_that_was_changed_on_its_way_is_refused(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    federation.grid.on_reply = lambda parcel: _flipped(parcel) if parcel.metadata.src_node_id == 101 else parcel
    history = federation.run().history
    assert history[0]["failed"] == {"invalid": 1}


def test_a_request_that_was_changed_or_is_a_strangers_is_refused(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg"))
    federation.grid.on_request = _flipped
    with pytest.raises(RoundError, match="0 of 3 organisations have joined"):
        federation.run()
    federation.grid.on_request = lambda parcel: _with(parcel, sealed({"what": "join"}, b"{}", new_key()))
    federation.fleet._refused.clear()
    with pytest.raises(RoundError, match="0 of 3 organisations have joined"):
        federation.run()
    assert not (tmp_path / "fed" / "organisations" / "north" / "answered.json").exists()


def test_an_answer_cannot_stand_for_another(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg"))
    first = {}

    def replay(parcel):
        return first.setdefault((parcel.metadata.src_node_id, parcel.metadata.message_type), parcel)

    federation.grid.on_reply = replay
    with pytest.raises(RoundError, match="round 2: 0 of 3 clients answered"):
        federation.run()


def test_a_request_that_is_sent_again_is_not_obeyed_again(tmp_path):
    """It would use up consent, and put an old memory in the place of a new one."""
    federation = Set(tmp_path / "fed", small_recipe("fedcrl"))
    federation.run()
    for again in (federation.members[100], member(tmp_path / "fed", "north")):  # at once, and after a restart
        for parcel in federation.grid.sent:
            if parcel.metadata.dst_node_id == 100:
                assert "it was received before" in reply_to(again, parcel).error.reason
    place = tmp_path / "fed" / "organisations" / "north"
    assert json.loads((place / "answered.json").read_text()) == {"updates": 2}
    assert len(list((place / "runs" / "one" / "memory").iterdir())) == 2


def _asked(federation, kind="update", client=0, **about):
    """What north answers to a job."""
    north = federation.members[100]
    state = federation.fleet_state
    job = Job(
        kind,
        about.pop("round", 1),
        Message(state | about.pop("extra", {})),
        client=client,
        attempt=about.pop("attempt", 0),
        clients=(client,) if kind == "global" else about.pop("clients", ()),
    )
    header = {"what": "job", "to": 0, "run": "one", "accepted": None, "recipe": federation.fleet._terms,
              "versions": federation.language} | about  # fmt: skip
    return Result.from_bytes(north.answer(header, job.to_bytes())[1])


@pytest.fixture
def agreed(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg"))
    federation.fleet.wait_for(3, 3, 1)
    experiment = make_experiment(federation.fleet, federation.recipe)
    with experiment._make_engine(experiment.setup, federation.recipe.engine) as engine:
        federation.fleet_state = engine.server_workspace.downward()
    federation.language = protocol_versions()
    return federation


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"kind": "generalise"}, "a client does jobs of kind update, evaluate, global"),
        ({"client": 1}, "it is about another client's data"),
        ({"round": 3}, "round 3 of 2"),
        ({"run": "../../etc"}, "it has no valid run name"),
        ({"run": ".."}, "it has no valid run name"),
        ({"run": ".ssh"}, "it has no valid run name"),
        ({"attempt": -1}, "attempt = -1"),
        ({"recipe": "0" * 64}, "this recipe was not agreed on"),
        ({"accepted": 1}, "its memory is missing"),
        ({"to": 1}, "it is for client 1"),
        ({"extra": {"model.extra": torch.zeros(1)}}, "'model.extra' does not match what this method sends"),
        ({"extra": {"model.head.weight": torch.zeros(1)}}, "'model.head.weight' does not match what this method sends"),
        ({"versions": {"protocol": "1"}}, "install the same version"),
    ],
)
def test_a_client_refuses(agreed, asked, why):
    result = _asked(agreed, **asked)
    assert why in result.error.why
    assert result.error.trace == ""
    assert result.message is None


def test_a_client_does_what_it_agreed_to(agreed):
    assert _asked(agreed).message is not None
    (scores,) = _asked(agreed, kind="global").scores
    assert sum(scores.total) == len(agreed.task.federation.test[0])


def test_consent_has_limits(tmp_path):
    recipe = small_recipe("fedavg")
    make_federation(tmp_path / "fed", recipe)
    federation = FederationTerms.load(tmp_path / "fed" / "server")
    by_recipe = member(tmp_path / "fed", "north").consent
    by_recipe.check(recipe, federation, answered=0)
    by_recipe.check(recipe.with_("storage.memory_mb=7", "data.name=elsewhere"), federation, answered=0)
    with pytest.raises(RefusalError, match="not the one in this organisation's folder"):
        by_recipe.check(recipe.with_("training.epochs=9"), federation, answered=0)
    limited = member(tmp_path / "fed", "north", methods=("fedavg", "fedrep"), max_rounds=4).consent
    limited.check(recipe.with_("method.name=fedrep", "training.epochs=9"), federation, answered=3)
    with pytest.raises(RefusalError, match="only fedavg, fedrep may run here"):
        limited.check(recipe.with_("method.name=fedprox"), federation, answered=0)
    with pytest.raises(RefusalError, match="training.rounds = 5: this organisation allows at most 4"):
        limited.check(recipe.with_("training.rounds=5"), federation, answered=0)
    with pytest.raises(RefusalError, match="--max-rounds 4: all these updates have already been sent"):
        limited.check(recipe, federation, answered=4)
    with pytest.raises(UserError, match="fedavgg"):
        member(tmp_path / "fed", "north", methods=("fedavgg",))


def test_updates_are_counted_over_all_runs(tmp_path):
    federation = Set(tmp_path / "fed", small_recipe("fedavg", out=tmp_path / "first"), max_rounds=3)
    federation.run()
    again = make_fleet(federation.folder, federation.grid, federation.recipe, run="two")
    again.wait_for(3, 3, 1)
    second = make_experiment(again, federation.recipe.with_(out=tmp_path / "second"))
    with pytest.raises(RoundError, match="round 2: 0 of 3 clients answered"):
        second.run()
    assert json.loads((federation.folder / "organisations" / "west" / "answered.json").read_text()) == {"updates": 3}


def test_the_consent_summary_says_what_leaves_and_what_stays(tmp_path):
    make_federation(tmp_path / "fed", small_recipe("fedrep"))
    north = member(tmp_path / "fed", "north", max_rounds=2)
    text = "\n".join(north.consent.lines(north.federation, north.task(north.consent.recipe), north.name))
    left, never = text.split("never left a client")
    assert "model.extractor.fc1.weight  128×64" in left and "model.head" not in left
    assert "model.head" in never and "images" in never
    assert "at most 2 updates" in text


def test_the_hash_covers_what_is_computed_and_not_where(tmp_path):
    recipe = small_recipe("fedavg")
    make_federation(tmp_path / "fed", recipe)
    federation = FederationTerms.load(tmp_path / "fed" / "server")
    mine = fingerprint(recipe, federation)
    assert fingerprint(recipe.with_("engine.name=processes", "data.name=mnist", out="x"), federation) == mine
    for change in ("training.rounds=3", "seed=6", "method.name=fedprox", "data.augment=[flip]", "model.name=cnn2"):
        assert fingerprint(recipe.with_(change), federation) != mine
    assert fingerprint(recipe, federation.model_copy(update={"classes": tuple("abc")})) != mine


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("method.name=centralized", "pools all data in one place"),
        ("method.name=fedstyle", "gathers several clients' data"),
        ("data.normalise=channels", "measured over all clients' images"),
        ("attack={kind: noise, share: 0.3}", "attack: is only for simulations"),
        ("faults.drop=0.3", "faults: are only for simulations"),
        ("data.split=pooled:0.6:0.2", "data.split = 'pooled:0.6:0.2': organisations do not evaluate on validation"),
        ("objective.name=multilabel", "objective.name = 'multilabel': organisations have images of one class each"),
        ("training.patience=3", "training.patience = 3: organisations do not evaluate on validation"),
        ("model.weights=net.pth", "model.weights = 'net.pth': is a file on one machine"),
    ],
)
def test_recipes_that_no_federation_can_follow(change, why):
    with pytest.raises(UserError, match=why):
        deployable(small_recipe("fedavg").with_(change))


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


@pytest.mark.parametrize(("methods", "why"), [((), "not the one in this"), (("fedavg",), "names")])
def test_a_file_on_a_clients_disk_is_not_run_because_the_server_names_it(agreed, tmp_path, methods, why):
    mark, code = tmp_path / "was run", tmp_path / "code.py"
    code.write_text(f"open({str(mark)!r}, 'w')\n")
    north = member(agreed.folder, "north", methods=methods)
    fields = [(section, "name", "") for section in ("method", "model", "objective", "engine")]
    for section, field, more in [*fields, ("data", "partition", ""), ("data", "partition", ":2")]:
        values = agreed.recipe.resolved()
        values[section][field] = f"{code}:Any{more}"
        header = {"what": "join", "to": 0, "recipe": "0" * 64, "versions": agreed.language}
        error = Result.from_bytes(north.answer(header, json.dumps(values).encode())[1]).error
        assert why in error.why and str(tmp_path) not in error.why
        assert not mark.exists()


@pytest.mark.parametrize("methods", [(), ("fedavg",)])
def test_an_entry_point_is_not_loaded_because_the_server_names_it(agreed, monkeypatch, methods):
    loaded = []
    entry = SimpleNamespace(name="stranger_net", value="x:y", dist=None, load=lambda: loaded.append(1))
    monkeypatch.setattr(Registry, "_entries", lambda self: [entry])
    north = member(agreed.folder, "north", methods=methods)
    values = agreed.recipe.resolved()
    values["model"] = {"name": "stranger_net"}
    header = {"what": "join", "to": 0, "recipe": "0" * 64, "versions": agreed.language}
    assert Result.from_bytes(north.answer(header, json.dumps(values).encode())[1]).error.kind == "dropped"
    assert not loaded


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
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
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
    federation = Set(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
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
