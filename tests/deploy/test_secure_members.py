"""Secure aggregation between organisations, without a network: what the server gets, and what members refuse."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from federated import LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe

from fedloom.core.errors import UserError
from fedloom.core.failures import RoundError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.deploy import fleet as fleet_module
from fedloom.deploy.certificates import new_key, write_key_pair
from fedloom.deploy.consent import RefusalError
from fedloom.deploy.events import EventLog, read_events
from fedloom.deploy.lifecycle import add_organisation
from fedloom.deploy.sealing import opened
from fedloom.deploy.secure import UnmaskedSums
from fedloom.deploy.terms import protocol_versions
from fedloom.experiment.loop import Experiment

NAMES = ("north", "south", "west", "east")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(fleet_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(fleet_module, "REFRESH_SECONDS", 0.05)


class Four:
    """A federation of four organisations at work in this process."""

    def __init__(self, folder, recipe, **consent):
        self.folder, self.recipe = folder, recipe
        make_federation(folder, recipe, NAMES)
        self.members = {100 + c: member(folder, name, **consent) for c, name in enumerate(NAMES)}
        self.grid = LoopGrid(self.members)
        self.fleet = make_fleet(folder, self.grid, recipe, names=NAMES)

    def run(self, **options):
        self.fleet.wait_for(4, 1, 0.5)
        experiment = make_experiment(self.fleet, self.recipe, **options)
        experiment.run()
        return experiment


def recipe_of(method="fedavg", **fields):
    return small_recipe(method, **{"data__clients": 4, "training__rounds": 1, "secure": {}, **fields})


def distance(one, other) -> float:
    return max(
        (one.server.state[name].double() - other.server.state[name].double()).abs().max().item()
        for name, value in one.server.state.items()
        if value.is_floating_point()
    )


@pytest.mark.parametrize("method", ["fedavg", "fedcrl", "scaffold"])
def test_organisations_give_the_plain_mean_within_the_recorded_error(tmp_path, method):
    federated = Four(tmp_path / "fed", recipe_of(method)).run()
    audit = read_events(tmp_path / "fed" / "organisations" / "north" / "audit.jsonl")
    assert [entry["kind"] for entry in audit if "kind" in entry][:4] == ["keys", "shares", "update", "unmask"]
    plain = Experiment(recipe_of(method, secure=None, out=tmp_path / "plain"))
    plain.run()
    assert distance(federated, plain) <= federated.history[0]["quantisation"] + 5e-7
    assert federated.history[0]["clients"] == 4


def test_the_server_gets_masked_updates_only_and_both_ledgers_agree(tmp_path):
    federation = Four(tmp_path / "fed", recipe_of(secure={"bits": 32}))
    sent, besides = [], []

    def keep(parcel):
        client = parcel.metadata.src_node_id - 100
        about, body = opened(parcel.content, federation.fleet._keys[client])
        if about["what"] == "result" and (message := Result.from_bytes(body).message) is not None:
            sent.append(message)
            besides.append((message.samples, Result.from_bytes(body).loss))
        return parcel

    federation.grid.on_reply = keep
    run = federation.run()
    assert len(sent) == 4
    for message in sent:
        assert set(message) == {"masked"} and message["masked"].dtype == torch.int32
        assert message["masked"].double().std() == pytest.approx(2**32 / 12**0.5, rel=0.05)  # uniform
    # what is sent besides, as docs/explanation/trust.md says
    assert all(samples > 0 and loss > 0 for samples, loss in besides)
    served = run.ledger.to_json()["messages"]
    assert any("when it joins" in line for line in run.ledger.to_json()["numbers"])  # not those of a simulation
    kinds = [("up", "training"), ("up", "secure"), ("down", "secure")]
    for kind in kinds:
        (total,) = [e for e in served if (e["direction"], e["purpose"]) == kind]
        own = 0
        for name in NAMES:
            path = federation.folder / "organisations" / name / "runs" / "one" / "ledger.json"
            own += sum(
                e["bytes"] for e in json.loads(path.read_text())["messages"] if (e["direction"], e["purpose"]) == kind
            )
        assert own == total["bytes"], kind


def test_one_that_refuses_after_sharing_its_keys_is_left_out_of_the_sum(tmp_path):
    federation = Four(tmp_path / "fed", recipe_of(training__on_error="skip"))
    west = federation.members[102]

    def refuse(*_):
        raise RefusalError("not today")

    west._secure.receive = refuse
    found = federation.run()
    assert found.history[0]["failed"] == {"dropped": 1} and found.history[0]["clients"] == 3
    plain = Four(tmp_path / "plain", recipe_of(secure=None, training__on_error="skip", out=tmp_path / "out"))
    plain.members[102]._run = lambda agreed, job: (_ for _ in ()).throw(RefusalError("not today"))
    assert distance(found, plain.run()) <= found.history[0]["quantisation"] + 5e-7


def test_two_that_drop_out_of_four_end_the_run(tmp_path):
    federation = Four(tmp_path / "fed", recipe_of())
    federation.fleet.wait_for(4, 1, 0.5)
    federation.grid.silent = {102, 103}
    with pytest.raises(RoundError, match="secure.threshold needs 3 of them"):
        make_experiment(federation.fleet, federation.recipe, timeout=0.2).run()


def test_a_member_whose_key_was_replaced_by_the_server_is_not_accepted(tmp_path):
    """The roster's keys must be signed by the keys in the organisation's own folder."""
    recipe = recipe_of()
    make_federation(tmp_path / "fed", recipe, NAMES)
    for name in NAMES[1:]:
        place = tmp_path / "fed" / "organisations" / name / "members"
        (place / "north.pub").unlink()
        write_key_pair(tmp_path, f"other-{name}", new_key())
        shutil.copy(tmp_path / f"other-{name}.pub", place / "north.pub")
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}
    fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe, names=NAMES)
    fleet.wait_for(4, 1, 0.5)
    with pytest.raises(RoundError, match="clients answered"):
        make_experiment(fleet, recipe, timeout=0.5).run()
    log = (tmp_path / "fed" / "organisations" / "south" / "runs" / "one" / "ledger.json").read_text()
    assert '"error"' in log


def test_a_member_without_the_key_of_another_refuses_the_roster(tmp_path):
    recipe = recipe_of()
    make_federation(tmp_path / "fed", recipe, NAMES)
    (tmp_path / "fed" / "organisations" / "south" / "members" / "east.pub").unlink()
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}
    fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe, names=NAMES)
    fleet._events = EventLog(tmp_path / "events.jsonl")
    fleet.wait_for(4, 1, 0.5)
    history = []
    make_experiment(fleet, recipe, on_round=history.append).run()
    assert history[0]["clients"] == 3 and history[0]["failed"] == {"dropped": 1}
    asked = {e["kind"] for e in read_events(tmp_path / "events.jsonl") if e.get("asked") == "secure"}
    assert asked == {"keys", "shares", "unmask"}


def test_refusals_that_end_a_run_are_quoted_and_less_protection_is_no_remedy(tmp_path):
    recipe = recipe_of()
    make_federation(tmp_path / "fed", recipe, NAMES)
    for name in ("north", "south"):
        (tmp_path / "fed" / "organisations" / name / "members" / "east.pub").unlink()
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}
    fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe, names=NAMES)
    fleet._events = EventLog(tmp_path / "events.jsonl")
    fleet.wait_for(4, fleet.least, 0.5)
    with pytest.raises(
        RoundError, match=r"north refuses: the key of east .* members/east.pub; south refuses"
    ) as caught:
        make_experiment(fleet, recipe).run()
    assert "remove the causes" in str(caught.value) and "lower" not in str(caught.value)
    refused = [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "refused"]
    assert sorted((event["who"], event["reason"]) for event in refused) == [("north", "consent"), ("south", "consent")]


def test_two_members_online_do_not_begin_a_secure_run(tmp_path):
    recipe = recipe_of(training__min_clients=2)
    federation = Four(tmp_path / "fed", recipe)
    federation.grid.online = {100, 101}
    with pytest.raises(RoundError, match="secure needs 3; joined: north, south: start more clients") as caught:
        federation.fleet.wait_for(4, federation.fleet.least, 0.1)
    assert "lower" not in str(caught.value)
    federation.fleet.wait_for(4, 2, 0.1)
    with pytest.raises(RoundError, match="secure needs 3"):  # members that leave later
        make_experiment(federation.fleet, recipe).run()


def test_an_update_is_never_sent_without_masks(tmp_path):
    federation = Four(tmp_path / "fed", recipe_of())
    federation.fleet.wait_for(4, 1, 0.5)
    experiment = make_experiment(federation.fleet, federation.recipe)
    with experiment._make_engine(experiment.setup, federation.recipe.engine) as engine:
        job = Job("update", 1, Message(engine.server_workspace.downward()), client=0)
    header = {"what": "job", "to": 0, "run": "one", "round": 1, "accepted": None, "recipe": federation.fleet._terms,
              "versions": protocol_versions()}  # fmt: skip
    north = federation.members[100]
    for more, why in (({}, "the job has no shares"), ({"secure": '{"shares": {}}'}, "its keys are unknown")):
        result = Result.from_bytes(north.answer(header | more, job.to_bytes())[1])
        assert why in result.error.why and result.message is None
    assert not (tmp_path / "fed" / "organisations" / "north" / "answered.json").exists()


def test_a_member_that_requires_secure_aggregation_refuses_plain_recipes(tmp_path):
    federation = Four(tmp_path / "fed", recipe_of(secure=None), secure_only=True)
    with pytest.raises(RefusalError, match="sends only masked updates .--require-secure-aggregation"):
        federation.members[100].consent.check(federation.recipe, federation.fleet.federation, 0)
    with pytest.raises(RoundError, match=r"0 of 4 .*joined: none; north does not join: \(consent\) .*masked") as caught:
        federation.run()
    assert "start more clients" not in str(caught.value)
    assert Four(tmp_path / "two", recipe_of(out=tmp_path / "out"), secure_only=True).run().history[0]["clients"] == 4


def test_a_second_sum_of_a_round_or_of_an_update_over_others_is_refused(tmp_path):
    sums = UnmaskedSums(tmp_path)
    sums.add("one", 1, "aa", [0, 1, 2, 3])
    sums.add("one", 1, "aa", [3, 2, 1, 0])  # a server that was killed asks again
    for run, update in (("one", "aa"), ("one", "bb"), ("two", "aa")):
        with pytest.raises(
            RefusalError, match="already summed over the clients .0, 1, 2, 3.; .* reveal the difference"
        ):
            UnmaskedSums(tmp_path).add(run, 1, update, [0, 1, 2])
    with (tmp_path / "unmasked.jsonl").open("a") as file:
        file.write('\n{"run": "one", "rou')  # a crash
    sums.add("one", 2, "cc", [0, 1, 2])
    with pytest.raises(RefusalError, match="round 2 was already summed"):
        sums.add("one", 2, "cc", [0, 1, 3])
    sums.add("two", 1, "dd", [0, 1, 2])
    assert (tmp_path / "unmasked.jsonl").stat().st_mode & 0o077 == 0


def test_another_run_does_not_reveal_the_update_of_a_client_that_is_missing_in_it(tmp_path):
    """The same recipe, so the same updates: the sum of four minus the sum of three would be the fourth's update."""
    federation = Four(tmp_path / "fed", recipe_of(out=tmp_path / "first"))
    federation.run()
    federation.grid.online.discard(102)

    def again(run, **fields):
        recipe = recipe_of(training__on_error="skip", out=tmp_path / run, **fields)
        for one in federation.members.values():
            one.consent = replace(one.consent, recipe=recipe)
        federation.fleet, federation.recipe = make_fleet(tmp_path / "fed", federation.grid, recipe, run, NAMES), recipe
        federation.fleet.wait_for(3, 3, 0.5)
        return federation.run(timeout=0.5).history[0]["clients"]

    with pytest.raises(RoundError, match="this update, in run 'one', was already summed over the clients"):
        again("second")
    assert again("third", seed=6) == 3


def test_an_organisation_that_is_added_takes_part_once_the_others_have_its_key(tmp_path):
    recipe = recipe_of(data__clients=3)
    make_federation(tmp_path / "fed", recipe, NAMES[:3])
    add_organisation(tmp_path / "fed" / "server", "east", tmp_path / "fed" / "organisations" / "east")
    shutil.copy(tmp_path / "fed" / "data" / "north.npz", tmp_path / "fed" / "data" / "east.npz")
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}

    def clients(run, seed):
        mine = recipe_of(data__clients=3, training__on_error="skip", seed=seed, out=tmp_path / run)
        for one in members.values():
            one.consent = replace(one.consent, recipe=mine)
        fleet = make_fleet(tmp_path / "fed", LoopGrid(members), mine, run, NAMES)
        fleet.wait_for(4, 4, 0.5)
        experiment = make_experiment(fleet, mine)
        experiment.run()
        return experiment.history[0]["clients"]

    for name in NAMES[:2]:
        place = tmp_path / "fed" / "organisations" / name / "members"
        shutil.copy(tmp_path / "fed" / "organisations" / "east" / "node.pub", place / "east.pub")
    assert clients("without", seed=5) == 3  # west does not have it
    place = tmp_path / "fed" / "organisations" / "west" / "members"
    shutil.copy(tmp_path / "fed" / "organisations" / "east" / "node.pub", place / "east.pub")
    assert clients("with", seed=6) == 4


@pytest.mark.parametrize("name", ["../coordinator", "north", "a/b", ""])
def test_a_server_cannot_name_a_file_of_its_own_as_the_key_of_a_member(tmp_path, name):
    """`members/../coordinator.pub` exists, and the server has its private key."""
    make_federation(tmp_path / "fed", recipe_of(), NAMES)
    north = member(tmp_path / "fed", "north")
    with pytest.raises(UserError, match="neither list begins with the other"):
        north.federation.with_organisations([*NAMES, name])


def test_the_consent_says_that_updates_are_masked(tmp_path):
    make_federation(tmp_path / "fed", recipe_of("fedrep"), NAMES)
    north = member(tmp_path / "fed", "north", max_rounds=2)
    text = "\n".join(north.consent.lines(north.federation, north.task(north.consent.recipe), north.name))
    assert "masked" in text and "the server sees only the sum of several organisations' messages" in text
    assert "sees each of these messages individually" not in text


def test_noise_for_privacy_is_added_by_the_members(tmp_path):
    fields = {"privacy": {"clip": 1.0, "noise": 1e-6}, "training__fraction": 1.0}
    federated = Four(tmp_path / "fed", recipe_of(**fields)).run()
    simulated = Experiment(recipe_of(**fields, out=tmp_path / "simulated"))
    simulated.run()
    assert 0 < distance(federated, simulated) < 1e-4  # other noise, of the operating system
    assert federated.history[0]["epsilon"] == simulated.history[0]["epsilon"]
