"""Checkpoints: what was saved comes back bit for bit; damage is noticed; little is written twice; nothing piles up."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from tiny import same_state

from fedloom.core.errors import UserError
from fedloom.core.state import State
from fedloom.experiment import checkpoint as module
from fedloom.experiment.checkpoint import Checkpoints
from fedloom.experiment.client_store import ClientStore

KB = 1024
SPECIAL: State = {
    "switch": torch.tensor([True, False]),
    "count": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "nothing": torch.zeros(0, 3),
    "a/b.c d": torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


def state(seed: int, floats: int = 256) -> State:
    return {"model.weight": torch.randn(floats, generator=torch.Generator().manual_seed(seed))}


def stores(budget: int = 4 * KB) -> dict[str, ClientStore]:
    return {"memory": ClientStore(budget), "remembered": ClientStore(budget)}


def loaded(folder: Path):
    fresh = stores()
    found, server = Checkpoints(folder).load(fresh)
    return found, server, {kind: dict(store.items()) for kind, store in fresh.items()}


def same(got: dict[int, State], expected: dict[int, State]) -> bool:
    return got.keys() == expected.keys() and all(same_state(got[c], expected[c]) for c in got)


def rounds(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, dict[int, State], dict[int, State]]:
    """Checkpoints after rounds 1 and 2, and what clients had then."""
    here, saved = stores(), Checkpoints(tmp_path / "c")
    was = {}
    for round in (1, 2):
        for client in range(3):
            here["memory"][client] = state(10 * round + client)
        here["remembered"][7] = state(round)
        saved.save(round, state(100 + round), here, {"history": [{"round": r} for r in range(1, round + 1)]})
        was[round] = dict(here["memory"].items())
    return tmp_path / "c", was[1], was[2]


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    here = stores()
    shared = torch.arange(6.0).reshape(3, 2)
    memory: dict[int, State] = {c: state(c) for c in range(20)}  # most of them spilled
    memory |= {30: {}, 31: SPECIAL, 12_345: {"first": shared[0], "again": shared[0], "all": shared}}
    for client, value in memory.items():
        here["memory"][client] = value
    here["remembered"][3] = state(99)
    notes = {"history": [{"round": 1, "loss": 0.1 + 0.2, "styles": {"b": 1, "a": None}}], "seconds": 1.5}
    Checkpoints(tmp_path / "c").save(1, SPECIAL, here, notes)
    found, server, got = loaded(tmp_path / "c")
    assert found.round == 1
    assert json.dumps(found.notes) == json.dumps(notes)
    assert same_state(server, SPECIAL)
    assert same(got["memory"], memory)
    assert same(got["remembered"], {3: state(99)})
    assert all(server[name].dtype == SPECIAL[name].dtype for name in SPECIAL)


def test_files_are_safetensors_and_json_that_anybody_can_read(two) -> None:
    folder = two[0]
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    from safetensors.torch import load_file

    assert same_state(load_file(folder / "round-000002-server.safetensors"), state(102))
    clients = load_file(folder / "round-000002-clients-000.safetensors")
    assert torch.equal(clients["memory/1/model.weight"], state(21)["model.weight"])


def test_the_last_two_are_kept_and_share_no_file(tmp_path: Path) -> None:
    here, saved = stores(), Checkpoints(tmp_path / "c")
    for client in range(8):
        here["memory"][client] = state(client)
    for round in range(1, 9):
        here["memory"][round % 8] = state(100 + round)
        saved.save(round, state(round), here, {})
        assert same(loaded(tmp_path / "c")[2]["memory"], dict(here["memory"].items()))
        newest, before = saved._kept[-1], saved._kept[0]
        if round > 1:
            assert rounds(tmp_path / "c") == [f"round-{round - 1:06d}.json", f"round-{round:06d}.json"]
            assert not newest.files.keys() & before.files.keys()
            assert names(tmp_path / "c") == {*newest.files, *before.files, *rounds(tmp_path / "c")}


def test_only_what_changed_is_written_again_and_space_stays_bounded(tmp_path: Path) -> None:
    here, saved = stores(), Checkpoints(tmp_path / "c")
    for client in range(64):
        here["memory"][client] = state(client)
    written = []
    for round in range(1, 40):
        here["memory"][round % 64] = state(1000 + round)
        saved.save(round, {}, here, {})
        new = [file for name, file in saved._kept[-1].files.items() if name.startswith(f"round-{round:06d}-clients")]
        written.append(sum(len(file.clients["memory"]) for file in new))
        assert sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors")) < 2 * 2 * 64 * 1.3 * KB
    assert written[:4] == [64, 64, 2, 2]  # whole ones at first; then the clients of two rounds
    assert sum(written) < 64 * 10


def test_a_client_that_is_deleted_is_gone(tmp_path: Path) -> None:
    here, saved = stores(), Checkpoints(tmp_path / "c")
    for client in range(6):
        here["memory"][client] = state(client)
    for round in (1, 2):
        saved.save(round, {}, here, {})
    del here["memory"][3]
    for round in (3, 4, 5):
        saved.save(round, {}, here, {})
        assert sorted(loaded(tmp_path / "c")[2]["memory"]) == [0, 1, 2, 4, 5]


def test_many_clients_go_through_little_ram(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "SHARD", 8 * KB)
    here = stores()
    for client in range(100):
        here["memory"][client] = state(client)
    Checkpoints(tmp_path / "c").save(1, {}, here, {})
    files = list((tmp_path / "c").glob("*clients*"))
    assert len(files) == 13
    assert all(path.stat().st_size < 10 * KB for path in files)
    assert here["memory"].resident <= 4 * KB
    back = stores()
    Checkpoints(tmp_path / "c").load(back)
    assert back["memory"].resident <= 4 * KB
    assert same(dict(back["memory"].items()), {c: state(c) for c in range(100)})


def test_a_resumed_run_goes_on_saving(two) -> None:
    folder, _, latest = two
    here = stores()
    saved = Checkpoints(folder)
    saved.load(here)
    expected = dict(latest)
    for round in (3, 4, 5, 6):
        expected[round % 3] = here["memory"][round % 3] = state(500 + round)
        saved.save(round, {}, here, {})
        assert same(loaded(folder)[2]["memory"], expected)
        assert len(rounds(folder)) == 2


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [truncated, flipped, emptied, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("part", ["server.safetensors", "clients-000.safetensors", ".json"])
def test_damage_is_noticed_and_the_checkpoint_before_is_used(two, part, damage, caplog) -> None:
    folder, before, _ = two
    damage(next(path for path in folder.iterdir() if path.name.startswith("round-000002") and path.name.endswith(part)))
    with caplog.at_level(logging.WARNING):
        found, server, got = loaded(folder)
    assert found.round == 1
    assert same_state(server, state(101))
    assert same(got["memory"], before)
    gone = part == ".json" and damage is Path.unlink  # then it never was a checkpoint
    assert gone or ("round-000002.json is damaged" in caplog.text and "trying the previous checkpoint" in caplog.text)


@pytest.mark.parametrize("bit", range(0, 8 * 300, 97))
def test_any_flipped_bit_of_a_manifest_is_noticed(two, bit) -> None:
    path = two[0] / "round-000002.json"
    data = bytearray(path.read_bytes())
    data[(bit // 8) % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)
    found, server, _ = loaded(two[0])
    assert found.round == 1 or same_state(server, state(102))  # white space is nobody's


def test_after_a_damaged_one_the_good_one_is_not_the_first_to_go(two) -> None:
    folder, before, _ = two
    (folder / "round-000002.json").rename(folder / "round-000009.json")  # the newest by name
    flipped(folder / "round-000002-server.safetensors")
    here, saved = stores(), Checkpoints(folder)
    assert saved.load(here)[0].round == 1
    saved.save(2, {}, here, {})
    assert rounds(folder) == ["round-000001.json", "round-000002.json"]
    assert same(loaded(folder)[2]["memory"], before)


def test_without_a_usable_one_there_is_one_clear_error_and_nothing_changes(two) -> None:
    folder = two[0]
    for path in folder.glob("*server*"):
        truncated(path)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="cannot be resumed: none of its 2 checkpoints can be used; nothing was"):
        loaded(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
    with pytest.raises(UserError, match="it has no checkpoint"):
        loaded(folder / "nowhere")


def test_a_format_of_the_future_is_not_misread(two, caplog) -> None:
    path = two[0] / "round-000002.json"
    values = json.loads(path.read_text())["checkpoint"] | {"format": 2}
    path.write_text(json.dumps({"sha256": module._sha256(json.dumps(values)), "checkpoint": values}))
    assert loaded(two[0])[0].round == 1
    assert "its format is 2, but this fedloom reads 1" in caplog.text


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_any_moment_leaves_what_was_there(two, call, monkeypatch) -> None:
    folder, _, latest = two
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    real, failed = getattr(os, call), 0
    while True:
        here, saved = stores(), Checkpoints(folder)
        saved.load(here)
        here["memory"][0] = state(77)
        left = [failed]

        def full(*arguments, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        monkeypatch.setattr(os, call, full)
        said = None
        try:
            saved.save(3, {}, here, {})
        except UserError as error:
            said = str(error)
        monkeypatch.setattr(os, call, real)
        if said is None:
            break
        assert "cannot be written: No space left on device; existing files are intact" in said
        found, _, got = loaded(folder)
        if found.round == 2:  # at the very last fsync the third is there already
            assert same(got["memory"], latest)
        assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()
        assert not [name for name in names(folder) if name.endswith(".tmp")]
        for path in folder.glob("round-000003*"):
            path.unlink()
        failed += 1
    assert failed >= 3
    assert rounds(folder) == ["round-000002.json", "round-000003.json"]


def test_finished_runs_have_none(two) -> None:
    folder = two[0]
    saved = Checkpoints(folder)
    saved.load(stores())
    saved.remove()
    assert not folder.exists()
