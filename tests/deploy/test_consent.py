"""What an organisation does for a server, and what it refuses."""

import json
from types import SimpleNamespace

import pytest
import torch
from federated import LocalFederation, make_experiment, make_federation, make_fleet, member, small_recipe

from fedloom.core.errors import UserError
from fedloom.core.failures import RoundError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.registry import Registry
from fedloom.deploy.consent import RefusalError
from fedloom.deploy.deployable import deployable
from fedloom.deploy.terms import FederationTerms, fingerprint

pytestmark = pytest.mark.usefixtures("impatient")


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
    federation = LocalFederation(tmp_path / "fed", small_recipe("fedavg", out=tmp_path / "first"), max_rounds=3)
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
