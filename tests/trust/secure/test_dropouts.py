"""The protocol with all members in this process: sums are right for any dropouts, and members refuse misuse."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.failures import Failure, RoundError
from fedloom.core.message import MessageError
from fedloom.trust.secure import shamir
from fedloom.trust.secure.coordinator import SecureSum
from fedloom.trust.secure.masks import add_mask
from fedloom.trust.secure.party import Party, commitment, pair_mask_key, self_mask_key
from fedloom.trust.secure.protocol import Terms
from fedloom.trust.secure.settings import SecureSettings
from fedloom.trust.secure.simulation import LocalParties, Unsigned

SIZE = 5
NOTHING = Failure("dropped", "it does not answer")


class Unreliable(LocalParties):
    """Clients of which some do not answer in some stages; requests and answers are kept."""

    def __init__(self, settings, silent=()):
        super().__init__(settings)
        self.silent = dict(silent)
        self.log = []
        self.change = lambda stage, client, answer: answer

    def ask(self, stage, round, requests):
        here = {c: body for c, body in requests.items() if c not in self.silent.get(stage, ())}
        answers = super().ask(stage, round, here)
        self.log.append((stage, requests, dict(answers)))
        gone = dict.fromkeys(requests.keys() - here.keys(), NOTHING)
        return {c: self.change(stage, c, answer) for c, answer in answers.items()} | gone


def begin(clients, silent=(), **options):
    secure = SecureSettings(**options)
    parties = Unreliable(secure, silent)
    return SecureSum(Terms(*parties.scope, 1, 0, secure), parties, clients, lambda client: 10), parties


def contribute(total, parties, client, values):
    vector = parties[client].fixed_point.encode(values, "x")
    parties[client].mask(vector)
    total.add(client, vector)
    return vector


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_sum_is_that_of_the_survivors_for_any_dropouts(data):
    members = data.draw(st.integers(3, 9))
    numbers = data.draw(st.lists(st.integers(0, 1000), min_size=members, max_size=members, unique=True))
    bits = data.draw(st.sampled_from([32, 64]))
    threshold = data.draw(st.sampled_from([0.51, 2 / 3, 1.0]))
    stages = {
        client: data.draw(st.sampled_from(["never"] * 4 + ["keys", "shares", "training", "unmask"]))
        for client in numbers
    }
    gone = {stage: [c for c in numbers if stages[c] == stage] for stage in ("keys", "shares", "training", "unmask")}
    total, parties = begin(numbers, gone, bits=bits, threshold=threshold)
    roster = members - len(gone["keys"])
    needed = SecureSettings(threshold=threshold).needed(roster)
    shared = roster - len(gone["shares"])
    if roster < 3 or shared < needed:
        assert set(total.failed) == set(numbers)
        return
    assert set(total.failed) == {*gone["keys"], *gone["shares"]}
    senders = [c for c in numbers if stages[c] in ("never", "unmask")]
    rng = np.random.default_rng(members)
    values = {client: rng.uniform(-8, 8, SIZE) for client in senders}
    for client in senders:
        contribute(total, parties, client, values[client])
    if len(senders) < needed or len(senders) - len(gone["unmask"]) < needed:
        with pytest.raises(RoundError, match=f"{needed} are needed"):
            total.unmask()
        return
    exact = np.sum(list(values.values()), 0)
    assert np.abs(total.unmask() - exact).max() <= total.fixed_point.error(len(senders)) + 1e-12


def test_what_the_server_gets_looks_random_and_differs_between_rounds_with_the_same_values():
    seen = []
    for _ in range(2):
        total, parties = begin(range(4), bits=32)
        seen.append([contribute(total, parties, c, np.full(200_000, 0.5)) for c in range(4)])
        assert np.allclose(total.unmask(), 2.0, atol=1e-6)
    for vector in (*seen[0], *seen[1], seen[0][0] - seen[0][1], seen[0][0] + seen[0][1], seen[0][0] - seen[1][0]):
        counts = np.bincount(np.ascontiguousarray(vector).view(np.uint8), minlength=256)
        expected = vector.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400  # χ² with 255 degrees of freedom: 5.7e-8
    signal = np.full(200_000, 0.5)
    for vector in seen[0]:
        assert abs(np.corrcoef(vector.view(np.int32), np.arange(200_000))[0, 1]) < 0.02
        assert not np.allclose(total.fixed_point.decode(vector), signal, atol=1)


def test_three_members_without_the_fourths_mask_get_noise():
    """All but one masked vector, with all their masks removed, do not give the sum of the others."""
    total, parties = begin(range(4))
    for client in range(4):
        contribute(total, parties, client, np.ones(SIZE))
    total._added.pop()  # the server treats client 3 as dropped, but its vector stays in the sum
    assert np.abs(total.unmask() - 4).max() > 100


@pytest.mark.parametrize("clients", [1, 2])
def test_a_sum_of_fewer_than_three_members_is_refused_by_the_members(clients):
    secure = SecureSettings()
    members = [Party(c, Terms("run", "recipe", 1, 0, secure), Unsigned()) for c in range(clients)]
    roster = {member.client: member.announce() for member in members}
    with pytest.raises(MessageError, match=f"a sum of {clients} members would reveal too much"):
        members[0].share({"roster": roster, "largest": 1})
    total, _ = begin(range(clients))
    assert f"{clients} clients sent keys, and at least 3 are needed" in total.failed[0].why


def members_until(stage):
    """Four parties that have passed all stages before this one."""
    secure = SecureSettings()
    found = [Party(c, Terms("run", "recipe", 1, 0, secure), Unsigned()) for c in range(4)]
    request = {"roster": {one.client: one.announce() for one in found}, "largest": 16}
    if stage == "shares":
        return found, request
    shares = {one.client: one.share(request)["shares"] for one in found}
    relays = {c: {"shares": {i: shares[i][c] for i in shares if i != c}} for c in range(4)}
    if stage == "relay":
        return found, relays
    for one in found:
        one.receive(json.dumps(relays[one.client]).encode())
    if stage == "unmask":
        for one in found:
            one.mask(np.zeros(3, np.uint64))
    return found, None


def test_a_member_never_reveals_both_shares_of_a_peer():
    first, *_ = members_until("unmask")[0]
    answer = first.reveal([0, 1, 2])
    assert set(answer["seeds"]) == {0, 1, 2} and set(answer["keys"]) == {3}
    for again in ([0, 1, 2], [0, 1, 3], [0, 1, 2, 3]):
        with pytest.raises(MessageError, match="to which this client has added nothing"):
            first.reveal(again)


@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        ([0, 1], "a sum of 2 members, and at least 3 are needed"),
        ([], "not among the survivors"),
        ([1, 2, 3], "this client is not among the survivors"),
        ([0, 1, 1, 2], "a survivor is not a member"),
        ([0, 1, 2, 7], "a survivor is not a member"),
    ],
)
def test_a_member_refuses_to_unmask(survivors, why):
    first, *_ = members_until("unmask")[0]
    with pytest.raises(MessageError, match=why):
        first.reveal(survivors)
    assert first.reveal([0, 1, 2])["seeds"]  # a refusal does not use the round up


def test_nothing_is_unmasked_before_something_was_masked():
    first, *_ = members_until("mask")[0]
    with pytest.raises(MessageError, match="to which this client has added nothing"):
        first.reveal([0, 1, 2])


def test_a_client_masks_once_and_shares_once():
    first, *_ = members_until("unmask")[0]
    with pytest.raises(MessageError, match="it is about the stage 'mask', not 'unmask'"):
        first.mask(np.zeros(3, np.uint64))
    (second, *_), request = members_until("shares")
    second.share(request)
    with pytest.raises(MessageError, match="it is about the stage 'shares', not 'relay'"):
        second.share(request)


def test_shares_that_were_changed_or_swapped_or_are_for_another_roster_are_refused():
    (first, *_), relays = members_until("relay")
    text = relays[0]["shares"][1]
    for shares in (
        {**relays[0]["shares"], 1: text[:-1] + ("0" if text[-1] != "0" else "1")},
        {**relays[0]["shares"], 1: relays[0]["shares"][2]},
        {**relays[0]["shares"], 1: relays[2]["shares"][1]},
    ):
        with pytest.raises(MessageError, match="the share of member 1 was changed, or is for another roster"):
            first.receive(json.dumps({"shares": shares}).encode())
        (first, *_), relays = members_until("relay")
        text = relays[0]["shares"][1]
    with pytest.raises(MessageError, match="2 members shared their keys; 3 are needed"):
        first.receive(json.dumps({"shares": {1: text}}).encode())


def test_members_with_different_rosters_cannot_read_each_others_shares():
    """A server that shows one member another key for a peer gets no sum."""
    members, request = members_until("shares")
    stranger = Party(3, Terms("run", "recipe", 1, 0, SecureSettings()), Unsigned())
    lie = {"roster": {**request["roster"], 3: stranger.announce()}, "largest": 16}
    to_first = {1: members[1].share(request)["shares"][0], 2: members[2].share(request)["shares"][0]}
    members[0].share(lie)
    with pytest.raises(MessageError, match="for another roster"):
        members[0].receive(json.dumps({"shares": to_first}).encode())


def test_a_roster_without_the_own_keys_or_with_a_key_twice_is_refused():
    members, request = members_until("shares")
    roster = request["roster"]
    with pytest.raises(MessageError, match="the roster does not have this client's keys"):
        members[0].share({"roster": {**roster, 0: roster[1]}, "largest": 16})
    with pytest.raises(MessageError, match="two members of the roster have the same key"):
        members[0].share({"roster": {**roster, 2: roster[1]}, "largest": 16})


def test_wrong_shares_are_noticed():
    total, parties = begin(range(4))
    for client in range(4):
        contribute(total, parties, client, np.ones(SIZE))

    def lie(stage, client, answer):
        if stage != "unmask" or client != 0:
            return answer
        values = json.loads(answer)
        values["seeds"]["2"] = "00" * 33
        return json.dumps(values).encode()

    parties.change = lie
    with pytest.raises(RoundError, match="a client sent a wrong share of client 2's secret"):
        total.unmask()


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"encryption": "00"}', b'{"encryption": "zz", "mask": "00", "signature": "00"}']
)
def test_malformed_answers_are_failures_of_their_clients(answer):
    secure = SecureSettings()
    parties = Unreliable(secure)
    parties.change = lambda stage, client, found: answer if (stage, client) == ("keys", 2) else found
    total = SecureSum(Terms(*parties.scope, 1, 0, secure), parties, range(4), lambda client: 1)
    assert set(total.failed) == {2} and total.failed[2].kind == "invalid"


def test_members_that_know_another_run_are_left_out():
    total = SecureSum(
        Terms("another", "", 1, 0, SecureSettings()), LocalParties(SecureSettings()), range(4), lambda client: 1
    )
    assert {failure.why for failure in total.failed.values()} == {
        "secure aggregation: it knows other terms of the round"
    }


def test_a_seed_does_not_follow_from_its_commitment_in_the_clear():
    total, parties = begin(range(3))
    texts = b"".join(answer for _, _, answers in parties.log for answer in answers.values())
    for client in range(3):
        party = parties[client]
        assert commitment(party._seed).encode() in texts
        for secret in (party._seed, party._mask, party._encryption):
            assert secret.hex().encode() not in texts
    assert total.failed == {}


@pytest.mark.parametrize(("colluding", "found"), [((2, 3), True), ((3,), False)])
def test_a_lying_server_needs_2t_minus_n_colluding_clients_to_read_an_update(colluding, found):
    """n = 4, t = 3: it tells client 0 that everybody survived, and client 1 that client 0 dropped out."""
    total, parties = begin(range(4), bits=64)
    masked = contribute(total, parties, 0, np.array([1.0, 2.0, 3.0]))
    for client in (1, 2, 3):
        contribute(total, parties, client, np.zeros(3))
    held = {c: parties[c]._held[0] for c in colluding}
    to_itself, to_another = parties[0].reveal([0, *colluding, 1][:3]), parties[1].reveal([1, 2, 3])
    seeds = {0: to_itself["seeds"][0], **{c: share[0].hex() for c, share in held.items()}}
    keys = {1: to_another["keys"][0], **{c: share[1].hex() for c, share in held.items()}}
    assert (len(seeds) >= total.needed) == found
    if found:
        seed, key = (shamir.join({c: bytes.fromhex(one) for c, one in shares.items()}) for shares in (seeds, keys))
        add_mask(masked, self_mask_key(seed, total._hash), subtract=True)
        for other in (1, 2, 3):
            pair = pair_mask_key(key, bytes.fromhex(total._roster[other]["mask"]), total._hash)
            add_mask(masked, pair, subtract=other > 0)
        assert total.fixed_point.decode(masked) == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff", b"null", b"[" * 100_000, b'{"survivors": [1e400]}', b'{"survivors": [-1]}', b'{"roster": {}}',
     b'{"roster": {}, "largest": 1}', b'{"roster": {"99999999999999999999": {}}, "largest": 1}'],
)  # fmt: skip
@pytest.mark.parametrize("stage", ["shares", "unmask"])
def test_malformed_requests_are_refused_by_members(stage, body):
    (first, *_), _ = members_until("shares")
    with pytest.raises(MessageError):
        first.answer(stage, body)


def test_a_key_with_which_the_secret_would_be_known_is_refused():
    """A point of low order: X25519 with it gives zero, whatever the other key is."""
    (first, *_), request = members_until("shares")
    for zero in ("00" * 32, "01" + "00" * 31):
        own = Party(9, first.terms, Unsigned()).announce()
        roster = {**request["roster"], 9: {**own, "encryption": zero}}
        with pytest.raises(MessageError, match="a member's public key is invalid"):
            Party.share(first, {"roster": roster, "largest": 16})
        (first, *_), request = members_until("shares")
