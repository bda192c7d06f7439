"""Organisations that are added and revoked, and certificates that are renewed, in a federation that exists."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from federated import NAMES, LoopGrid, make_experiment, make_federation, make_fleet, member, small_recipe
from test_deploy_commands import call

from fedloom.core.errors import UserError
from fedloom.deploy.certificates import (
    expiry_warning,
    make_authority,
    make_server_certificate,
    new_key,
    read_certificate,
    read_key,
    read_public_key,
    write_key_pair,
)
from fedloom.deploy.door import registered
from fedloom.deploy.events import read_events
from fedloom.deploy.fleet import Fleet
from fedloom.deploy.terms import FederationTerms


@pytest.fixture
def federation(tmp_path):
    make_federation(tmp_path / "fed", small_recipe("fedavg"))
    return tmp_path / "fed"


def events(federation: Path) -> list[tuple[str, str]]:
    return [(event["who"], event["event"]) for event in read_events(federation / "server" / "events.jsonl")]


def test_an_added_organisation_gets_the_next_number_and_the_others_keep_theirs(federation):
    keys = {name: (federation / "organisations" / name / "node.key").read_bytes() for name in NAMES}
    call("deploy", "add", "east", "--folder", str(federation / "server"))
    terms = FederationTerms.load(federation / "server")
    assert terms.organisations == (*NAMES, "east")
    assert FederationTerms.load(federation / "organisations" / "east") == terms
    assert keys == {name: (federation / "organisations" / name / "node.key").read_bytes() for name in NAMES}
    own = read_key(federation / "organisations" / "east" / "node.key").public_key()
    assert {one.name: one.key for one in registered(federation / "server" / "organisations").values()}["east"] == own
    assert events(federation) == [("east", "added")]
    with pytest.raises(UserError, match="'east' is already an organisation .* revoke it first"):
        call("deploy", "add", "east", "--folder", str(federation / "server"))


def test_an_organisation_can_keep_its_private_key_to_itself(federation, tmp_path):
    write_key_pair(tmp_path, "mine", new_key())
    server, public = str(federation / "server"), tmp_path / "mine.pub"
    call("deploy", "add", "east", "--folder", server, "--key", str(public), "--to", str(tmp_path / "east"))
    assert not (tmp_path / "east" / "node.key").exists()
    assert (federation / "server" / "organisations" / "east.pub").read_bytes() == public.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("add", "../east"), "must be letters"),
        (("revoke", "east"), "'east' is not one of the federation's organisations"),
        (("add", "east", "--key", "no.pub"), "'no.pub' is not a public key"),
        (("add", "east", "--to", "."), "already exists"),
        (("renew", "--ca-key", "no.key"), "'no.key' is not a private key"),
    ],
)
def test_what_cannot_be_changed_is_refused_in_one_sentence(federation, arguments, why):
    with pytest.raises(UserError, match=why):
        call("deploy", *arguments, "--folder", str(federation / "server"))
    assert FederationTerms.load(federation / "server").organisations == NAMES


def test_a_revoked_organisation_keeps_its_number_and_can_be_added_again_with_a_new_key(federation):
    server = federation / "server"
    call("deploy", "revoke", "south", "--folder", str(server))
    terms = FederationTerms.load(server)
    assert (terms.organisations, terms.revoked) == (NAMES, ("south",))
    assert {one.name: one.revoked for one in registered(server / "organisations").values()} == {
        "north": False, "south": True, "west": False,
    }  # fmt: skip
    with pytest.raises(UserError, match="'south' is revoked already"):
        call("deploy", "revoke", "south", "--folder", str(server))
    call("deploy", "add", "south", "--folder", str(server), "--to", str(federation / "again"))
    assert FederationTerms.load(server).revoked == ()
    assert FederationTerms.load(federation / "again").number("south") == 1
    keys = {(one.name, one.revoked) for one in registered(server / "organisations").values()}
    assert keys == {("north", False), ("south", True), ("south", False), ("west", False)}


def test_the_last_organisation_cannot_be_revoked(federation):
    for name in NAMES[:2]:
        call("deploy", "revoke", name, "--folder", str(federation / "server"))
    with pytest.raises(UserError, match="'west' is the last organisation"):
        call("deploy", "revoke", "west", "--folder", str(federation / "server"))


def days_left(path: Path) -> float:
    return (read_certificate(path).not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def test_the_ca_lives_ten_years_and_the_servers_certificate_is_renewed_with_it(federation):
    server = federation / "server"
    assert 3651 < days_left(server / "ca.pem") < 3653
    before = read_certificate(server / "server.pem")
    said = call("deploy", "renew", "--folder", str(server))
    after = read_certificate(server / "server.pem")
    assert before.serial_number != after.serial_number and before.public_key() != after.public_key()
    after.verify_directly_issued_by(read_certificate(server / "ca.pem"))
    assert f"valid until {after.not_valid_after_utc:%Y-%m-%d}" in said
    assert (server / "server.key").stat().st_mode & 0o077 == 0


def test_a_renewed_ca_keeps_its_key_so_that_old_and_new_certificates_fit(federation):
    server = federation / "server"
    old = read_certificate(server / "ca.pem")
    said = call("deploy", "renew", "--authority", "--folder", str(server))
    assert "send" in said
    new = read_certificate(server / "ca.pem")
    assert (new.serial_number != old.serial_number, new.public_key() == old.public_key()) == (True, True)
    for ca in (old, new):
        read_certificate(server / "server.pem").verify_directly_issued_by(ca)


def test_a_certificate_does_not_outlive_its_ca(federation):
    authority = make_authority("short", days=100)
    certificate = make_server_certificate(authority, "127.0.0.1")[1]
    assert certificate.not_valid_after_utc <= authority[1].not_valid_after_utc


def test_renewal_needs_the_key_of_the_ca(federation):
    other = federation / "server" / "server.key"
    with pytest.raises(UserError, match="is not the key of"):
        call("deploy", "renew", "--folder", str(federation / "server"), "--ca-key", str(other))


@pytest.mark.parametrize(
    ("days", "said"), [(31, None), (29.9, "server.pem expires on .*, in 30 days: run"), (-1, "has expired on")]
)
def test_warnings_begin_thirty_days_ahead(days, said):
    found = expiry_warning("server.pem", datetime.now(UTC) + timedelta(days=days, minutes=1))
    assert (found is None) == (said is None)
    assert said is None or re.search(said, found)


def fleet_of(federation: Path, grid: LoopGrid, run: str) -> Fleet:
    """Four organisations, as the server has them after `add`."""
    server = federation / "server"
    terms = FederationTerms.load(server)
    keys = {c: read_public_key(server / "organisations" / f"{name}.pub") for c, name in enumerate(terms.organisations)}
    nodes = {100 + c: c for c in range(len(terms.organisations))}
    return Fleet(grid, terms, nodes, keys, read_key(server / "coordinator.key"), small_recipe("fedavg"), run)


def test_members_accept_a_longer_list_of_organisations_and_the_added_one_takes_part(federation):
    """The three members have the old federation.yaml; the server and the fourth have the new one."""
    call("deploy", "add", "east", "--folder", str(federation / "server"))
    (federation / "data" / "east.npz").write_bytes((federation / "data" / "north.npz").read_bytes())
    members = {100 + c: member(federation, name) for c, name in enumerate((*NAMES, "east"))}
    fleet = fleet_of(federation, LoopGrid(members), "second")
    fleet.wait_for(4, 4, 1)
    experiment = make_experiment(fleet, small_recipe("fedavg", out=federation / "run"))
    experiment.run()
    assert [record["clients"] for record in experiment.history] == [4, 4]
    before = FederationTerms.load(federation / "organisations" / "north")
    before.save(federation / "server")  # a run that began before is resumed with its own list
    assert before.organisations == NAMES
    assert make_fleet(federation, LoopGrid(members), small_recipe("fedavg"), run="first").gather() == [0, 1, 2]


def test_a_list_that_moves_a_member_is_refused(federation):
    north = member(federation, "north")
    for names in (["south", "north", "west"], ["south"], [], "north", [1], None):
        with pytest.raises(UserError, match="neither list begins with the other"):
            north.federation.with_organisations(names)
    assert north.federation.with_organisations(["north"]).organisations == ("north",)
