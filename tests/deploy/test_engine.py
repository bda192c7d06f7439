"""The engine without a network: what it computes, and who is waited for."""

import json
import re
from dataclasses import replace

import pytest
from federated import NAMES, LocalFederation, make_experiment, small_recipe, with_content, without_losses
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load_file
from tiny import same_state, without_times

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.failures import RoundError
from fedloom.deploy.events import EventLog, read_events
from fedloom.deploy.sealing import RECORD
from fedloom.experiment.files import unwritable
from fedloom.experiment.loop import Experiment

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("method", ["fedavg", "fedcrl", "scaffold", "fedproto"])
def test_organisations_give_what_a_simulation_gives_bit_for_bit(tmp_path, method):
    recipe = small_recipe(method)
    federated = LocalFederation(tmp_path / "fed", recipe).run()
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
    federation = LocalFederation(tmp_path / "fed", recipe)
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
    federation = LocalFederation(tmp_path / "fed", recipe)
    lost = []

    def lose_one(parcel):
        job = parcel.metadata.group_id
        if job == "2" and not lost:
            lost.append(parcel.metadata.src_node_id)
            content = RecordDict({RECORD: ConfigRecord({"about": "{}", "body": b"", "signature": b""})})
            return with_content(parcel, content)
        return parcel

    federation.grid.on_reply = lose_one
    experiment = federation.run()
    simulated = Experiment(recipe)
    simulated.run()
    assert lost
    assert experiment.history[1]["attempts"] == 2
    assert same_state(experiment.server.state, simulated.server.state)


def test_leavers_are_tolerated_and_newcomers_join_between_rounds(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=4, training__min_clients=2))
    federation.grid.online = {100, 101}

    def change(record):
        federation.grid.online = {1: {100, 101, 102}, 2: {101, 102}}.get(record["round"], {101, 102})

    history = federation.run(on_round=change).history
    assert [record["clients"] for record in history] == [2, 3, 2, 2]
    assert [record["evaluated"] for record in history] == [2, 3, 2, 2]
    assert history[2]["failed"] == {"dropped": 1}


def test_an_absent_organisation_is_logged_once_until_it_answers(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=4, training__min_clients=2))
    federation.fleet._events = EventLog(tmp_path / "events.jsonl")

    def change(record):
        federation.grid.online = {1: {100, 101}, 2: {100, 101}, 3: {100, 101, 102}}.get(record["round"], {100, 101})

    history = federation.run(on_round=change).history
    assert [record["clients"] for record in history] == [3, 2, 2, 3]
    found = [(event["who"], event["event"]) for event in read_events(tmp_path / "events.jsonl")]
    assert [one for one in found if one[1] == "failed"] == [("west", "failed")]


def test_fewer_than_min_clients_end_the_run_and_it_can_go_on(tmp_path):
    federation = LocalFederation(
        tmp_path / "fed", small_recipe("fedcrl", training__min_clients=3, out=tmp_path / "run")
    )

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


def test_a_run_that_ends_names_the_command_of_the_deployment_that_resumes_it(tmp_path, monkeypatch):
    server, run = tmp_path / "my server", tmp_path / "my server/runs/first"
    (server / "recipes/first.federation").mkdir(parents=True)
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__min_clients=3, out=run))

    def leave(record):
        federation.grid.online = {100}

    with pytest.raises(RoundError) as ended:
        federation.run(on_round=leave)
    command = f"fedloom deploy start '{server}/recipes/first.yaml' --folder '{server}' --name first"
    assert ended.value.__notes__ == [f"the rounds so far are saved; resume with: {command}"]
    assert str(unwritable(run / "models/server.safetensors", OSError(28, "full"))).endswith(f"with: {command}")
    with pytest.raises(UserError, match="the run of a deployment, .* resume it on its server: fedloom deploy start"):
        fedloom.resume(run)
    monkeypatch.chdir(run)
    with pytest.raises(UserError, match=f"resume it on its server: {re.escape(command)}"):
        fedloom.resume(".")


def test_who_does_not_answer_in_time_is_left_out(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
    federation.fleet.wait_for(3, 3, 1)
    federation.grid.silent = {101}
    history = federation.run(timeout=0.2).history
    assert history[0]["failed"] == {"timed_out": 1}
    assert history[0]["clients"] == 2


def test_who_was_restarted_has_lost_the_question_and_is_not_waited_for(tmp_path):
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", training__rounds=1))
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
