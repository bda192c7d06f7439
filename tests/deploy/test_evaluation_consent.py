"""Evaluation by consent: what is answered, how often, and what a hostile server learns by it."""

import json
import math
import random
import stat
from pathlib import Path

import numpy as np
import pytest
from federated import EXACT, NAMES, LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe

from benchmarks import attack
from fedloom.core.errors import UserError
from fedloom.core.job import Job, Result
from fedloom.core.message import Message
from fedloom.core.scores import Scores
from fedloom.deploy import evaluation
from fedloom.deploy.evaluation import EvaluationLog, EvaluationRequest, EvaluationTerms, evaluations_of
from fedloom.deploy.terms import fingerprint, protocol_versions
from fedloom.trust.ledger_file import read_ledger


@pytest.fixture
def seeded(monkeypatch):
    """The noise of the operating system, made repeatable."""
    monkeypatch.setattr(evaluation, "_random", random.Random(7))


class Asking:
    """North, and somebody who asks it to evaluate."""

    def __init__(self, folder, recipe=None, **consent):
        self.recipe = recipe or small_recipe("fedavg")
        make_federation(folder / "fed", self.recipe)
        self.folder, self.consent = folder / "fed", consent
        self.restart()
        self.header = {
            "to": 0, "run": "one", "accepted": None, "versions": protocol_versions(),
            "recipe": fingerprint(self.recipe, self.north.federation),
        }  # fmt: skip
        about, _ = self.north.answer(self.header | {"what": "join"}, json.dumps(self.recipe.resolved()).encode())
        self.joined = about
        engine = self.north._ready(self.header["recipe"]).engine
        self.state = engine.server_workspace.downward()
        self.place = self.folder / "organisations" / "north"

    def restart(self):
        self.north = member(self.folder, "north", **self.consent)

    def ask(self, kind="global", round=1, shift=0.0, **about):
        state = {name: tensor + shift for name, tensor in self.state.items()}
        job = Job(kind, round, Message(state), client=0, clients=(0,) if kind == "global" else ())
        header = self.header | {"what": "job", "round": round} | about
        return Result.from_bytes(self.north.answer(header, job.to_bytes())[1])


def test_an_exact_attack_reads_a_test_image_pixel_by_pixel(tmp_path):
    """What the consent is for: without it, every pixel comes back."""
    victim = attack.make_victim(tmp_path, seed=1, evaluation=attack.EXACT, max_evaluations=10**6)
    server = attack.HostileServer(victim)
    tried = attack.EvaluationAttack(server, seed=1)
    pixels = [18, 20, 26, 35, 42, 45]
    found = tried.image(pixels).reshape(64)[pixels]
    assert found.tolist() == attack.target_of(tried, victim.test, _labels(victim)).reshape(64)[pixels].tolist()
    assert found.any() and server.answered < 200


def _labels(victim):
    return victim.member._images.labels[victim.member._images.test].numpy()


@pytest.mark.parametrize("repeats", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_up_to_the_budget_an_attack_is_no_better_than_the_mean_image(tmp_path, seeded, repeats):
    """The default consent of a run of 100 rounds or more: 100 answers, however the attack spends them."""
    guessed, mean = [], []
    for seed in range(3):
        victim = attack.make_victim(tmp_path / str(seed), seed=seed, rounds=200)
        server = attack.HostileServer(victim)
        tried = attack.EvaluationAttack(server, seed=seed, repeats=repeats)
        guess = tried.sketch(victim.public)
        target = attack.target_of(tried, victim.test, _labels(victim))
        while server.right(tried._weights(0.0, None, 0.0, 3)) is not None:  # what is left
            pass
        assert server.answered == 100
        guessed.append(attack.rms(guess, target))
        mean.append(attack.rms(victim.public.mean(0), target))
    assert np.mean(guessed) >= np.mean(mean) - 1e-9


def test_there_is_one_answer_per_kind_and_round_and_a_repeated_request_gets_it_again(tmp_path):
    asking = Asking(tmp_path, evaluation=EvaluationTerms(min_test=0, epsilon=0.05))
    first = asking.ask().scores
    assert len(first) == 1
    assert asking.ask().scores == first  # the noise is drawn once
    assert asking.ask(shift=1e-3).scores == []
    asking.restart()
    assert asking.ask().scores == first
    assert asking.ask(shift=1e-3).scores == []
    assert len(asking.ask("evaluate").scores) == 1
    assert len(asking.ask(round=2).scores) == 1


def test_how_long_an_evaluation_took_does_not_leave(tmp_path):
    asking = Asking(tmp_path)
    assert asking.ask().seconds == 0


def test_evaluations_are_counted_over_all_runs_and_restarts(tmp_path):
    asking = Asking(tmp_path, max_evaluations=3)
    given = [len(asking.ask(kind, run=run).scores) for run in ("one", "two") for kind in ("global", "evaluate")]
    assert given == [1, 1, 1, 0]
    asking.restart()
    assert asking.ask(run="three").scores == []
    assert asking.ask(run="one").scores  # the stored answer
    lines = [json.loads(line) for line in (asking.place / "evaluations.jsonl").read_text().split("\n") if line]
    assert len({tuple(line["request"].values()) for line in lines}) == 3


def test_an_evaluation_is_counted_before_it_is_computed(tmp_path, monkeypatch):
    asking = Asking(tmp_path, max_evaluations=1)
    monkeypatch.setattr(asking.north, "_run", lambda *_: 1 / 0)
    assert asking.ask().error is not None
    asking.restart()
    assert asking.ask(round=2).scores == []
    assert asking.ask().scores  # it was counted, and never answered


@pytest.mark.parametrize(
    ("consent", "why"),
    [
        ({"evaluation": EvaluationTerms("none", min_test=0)}, "evaluation is declined"),
        ({"evaluation": EXACT, "max_evaluations": 0}, "evaluation is declined"),
        ({"evaluation": EvaluationTerms(min_test=10**4)}, "answers are given for 10000 or more"),
    ],
)
def test_evaluation_can_be_declined_and_small_test_sets_give_no_figure(tmp_path, consent, why):
    asking = Asking(tmp_path, recipe=small_recipe("fedrep"), **consent)
    assert asking.joined["test"] == 0
    own = asking.place / "runs" / "one" / "personal.safetensors"
    assert asking.ask("evaluate", round=2).scores == []
    assert not own.exists()  # it has not taken part
    asking.ask("update")
    assert asking.ask("evaluate", round=2, accepted=1).scores == []
    assert own.exists()  # its own model is its own business
    own.unlink()
    assert asking.ask("evaluate", round=2, accepted=1, shift=1e-3).scores == []
    assert not own.exists()  # once in a run
    assert asking.north._evaluations.count == 0
    text = "\n".join(_lines(asking.north))
    assert "no results are sent" in text and why in text


def _lines(north):
    return north.consent.lines(north.federation, north.task(north.consent.recipe), north.name)


def test_an_answer_has_all_classes_together_and_no_loss_unless_consented(tmp_path):
    asking = Asking(tmp_path, evaluation=EvaluationTerms(min_test=0))
    (scores,) = asking.ask().scores
    assert len(scores.right) == len(scores.total) == 1
    assert scores.loss is None
    text = "\n".join(_lines(asking.north))
    assert "all classes together, with noise (ε = 0.5 each" in text and "never the loss" in text
    per_class = Asking(tmp_path / "classes", evaluation=EXACT)
    (scores,) = per_class.ask().scores
    assert len(scores.right) == 10 and scores.loss is None
    assert "per class, exact" in "\n".join(_lines(per_class.north))


def test_the_noise_is_discrete_laplace(seeded):
    terms = EvaluationTerms(epsilon=0.5)
    drawn = np.array([terms.shared(Scores(0, [5000], [10_000], None)).right[0] - 5000 for _ in range(20_000)])
    values, counts = np.unique(drawn, return_counts=True)
    share = dict(zip(values.tolist(), (counts / len(drawn)).tolist(), strict=True))
    decay = math.exp(-0.5)
    for value in range(-4, 5):
        assert share[value] == pytest.approx((1 - decay) / (1 + decay) * decay ** abs(value), abs=0.012)
    assert all(0 <= terms.shared(Scores(0, [r], [2], 1.0)).right[0] <= 2 for r in (0, 1, 2) for _ in range(50))


def test_the_budget_is_by_default_what_one_run_of_the_recipe_asks_for_and_not_more_than_a_hundred():
    assert evaluations_of(small_recipe("ditto", training__rounds=4000)) == 100
    fields = {"training__rounds": 10, "evaluation__every": 3}
    assert evaluations_of(small_recipe("fedavg", **fields)) == 4  # everybody has the shared model
    assert evaluations_of(small_recipe("fedcrl", **fields)) == 4  # there is none
    assert evaluations_of(small_recipe("ditto", **fields)) == 8


def test_a_run_within_the_budget_is_answered_and_one_beyond_it_goes_on_without_figures(tmp_path):
    recipe = small_recipe("fedrep", training__rounds=2)
    make_federation(tmp_path / "fed", recipe)
    terms = EvaluationTerms(min_test=0, epsilon=math.inf)
    members = {
        100 + c: member(tmp_path / "fed", name, evaluation=terms, max_evaluations=None) for c, name in enumerate(NAMES)
    }
    for run, answered in (("one", 3), ("two", 0)):
        fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe, run=run)
        fleet.wait_for(3, 3, 1)
        experiment = make_experiment(fleet, recipe.with_(out=tmp_path / run))
        summary = experiment.run()
        assert [record["evaluated"] for record in experiment.history] == [answered] * 2
        assert (summary["personal_accuracy"] is None) == (answered == 0)


def test_both_ledgers_agree_to_the_byte_and_count_evaluations(tmp_path):
    recipe = small_recipe("fedcrl", evaluation__every=2)
    make_federation(tmp_path / "fed", recipe)
    members = {100 + c: member(tmp_path / "fed", name) for c, name in enumerate(NAMES)}
    fleet = make_fleet(tmp_path / "fed", LoopGrid(members), recipe)
    fleet.wait_for(3, 3, 1)
    make_experiment(fleet, recipe.with_(out=tmp_path / "run")).run()

    def totals(*ledgers):
        found = {}
        for ledger in ledgers:
            for entry in ledger["messages"]:
                key = entry["direction"], entry["purpose"]
                before = found.get(key, (0, 0))
                found[key] = before[0] + entry["messages"], before[1] + entry["bytes"]
        return found

    theirs = [read_ledger(tmp_path / "fed" / "organisations" / name / "runs" / "one") for name in NAMES]
    ours = totals(read_ledger(tmp_path / "run"))
    assert ours == totals(*theirs)
    assert ours["down", "training"][0] == 6 and ours["up", "evaluation"][0] == ours["down", "evaluation"][0] > 0


def test_errors_are_in_the_ledger_and_their_texts_stay(tmp_path, monkeypatch, caplog):
    asking = Asking(tmp_path)
    asking.ask()
    monkeypatch.setattr(asking.north, "_run", lambda *_: Path("/secret/path").read_text())
    error = asking.ask(round=2).error
    assert error.why == "FileNotFoundError at north; its log has the details"
    assert error.trace == "" and "/secret/path" in caplog.text
    ledger = read_ledger(asking.place / "runs" / "one")
    (entry,) = [entry for entry in ledger["messages"] if entry["purpose"] == "error"]
    assert (entry["messages"], entry["bytes"]) == (1, len(error.why))


def test_what_a_client_keeps_is_its_owners_alone(tmp_path):
    asking = Asking(tmp_path, recipe=small_recipe("fedrep"))
    asking.ask("update")
    asking.ask("evaluate", round=2, accepted=1)
    files = [path for path in asking.place.rglob("*") if path.is_file()]
    shown = {path.name for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077}
    public = {"federation.yaml", "recipe.yaml", "ca.pem", "coordinator.pub", "node.pub", "organisation", "start.sh"}
    public |= {f"{name}.pub" for name in NAMES}  # the other members' public keys
    assert shown <= public
    assert {"round-000001.safetensors", "personal.safetensors", "ledger.json", "evaluations.jsonl"} <= {
        path.name for path in files
    } - shown


@pytest.mark.parametrize(
    ("terms", "why"),
    [({"shares": "all"}, "--evaluation all"), ({"epsilon": 0}, "--evaluation-epsilon 0"), ({"answers": -1}, "-1")],
)
def test_terms_that_make_no_sense_are_refused(terms, why):
    with pytest.raises(UserError, match=why):
        EvaluationTerms(**terms)


def test_a_damaged_log_of_evaluations_is_refused(tmp_path):
    log = EvaluationLog(tmp_path)
    log.begin(EvaluationRequest("one", "global", 1, "abc"))
    path = tmp_path / "evaluations.jsonl"
    path.write_text(path.read_text() + '{"request": 3}')
    with pytest.raises(UserError, match="restore it from a backup"):
        EvaluationLog(tmp_path)
