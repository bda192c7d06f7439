"""The store of clients' memories: nothing is lost or changed by spilling, and RAM stays in the budget."""

from pathlib import Path

import pytest
import torch

from fedloom.core.state import State
from fedloom.experiment.client_store import ClientStore

KB = 1024


def state(seed: int, floats: int = 256) -> State:
    """One kilobyte by default."""
    return {"model.weight": torch.randn(floats, generator=torch.Generator().manual_seed(seed))}


def equal(a: State, b: State) -> bool:
    same = a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape for n in a)
    return same and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def store(tmp_path: Path):
    store = ClientStore(4 * KB, inside=tmp_path)
    yield store
    store.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_what_was_put_comes_back_bit_for_bit_through_spilling(store: ClientStore, tmp_path: Path) -> None:
    for client in range(50):
        store[client] = state(client)
    assert len(files(tmp_path)) == 46  # four fit
    for client in torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist() * 2:
        assert equal(store[client], state(client))


def test_ram_stays_in_the_budget_whatever_is_put_or_read(store: ClientStore) -> None:
    for client in range(30):
        store[client] = state(client, floats=64 * (1 + client % 4))
        assert store.resident <= 4 * KB
    for client in (0, 29, 7, 7, 13, 0):
        assert equal(store[client], state(client, floats=64 * (1 + client % 4)))
        assert store.resident <= 4 * KB
    resident = sum(t.numel() * t.element_size() for s in store._warm.values() for t in s.values())
    assert store.resident == resident


def test_one_state_above_the_budget_is_held_alone(store: ClientStore) -> None:
    store[0] = state(0)
    store[1] = state(1, floats=10_000)
    assert store.resident == 40_000
    store[2] = state(2)
    assert store.resident == KB
    assert equal(store[1], state(1, floats=10_000))


def test_the_least_recently_used_is_spilled_first(store: ClientStore, tmp_path: Path) -> None:
    for client in range(4):
        store[client] = state(client)
    assert files(tmp_path) == []
    _ = store[0]
    store[4] = state(4)
    assert [path.stem for path in files(tmp_path)] == ["0000001"]


def test_overwriting_after_a_spill_forgets_the_old_value(store: ClientStore) -> None:
    for client in range(10):
        store[client] = state(client)
    store[0] = state(100)
    for client in range(1, 10):
        _ = store[client]
    assert equal(store[0], state(100))
    store[0] = state(200)  # was loaded, spilled twice by now
    for client in range(1, 10):
        _ = store[client]
    assert equal(store[0], state(200))
    assert len(store) == 10


def test_a_state_that_someone_holds_survives_the_overwriting_of_its_file(store: ClientStore) -> None:
    for client in range(10):
        store[client] = state(client)
    held = store[0]
    store[0] = held | {"extra": torch.ones(3)}  # made of tensors that may be mapped to the file
    for client in range(1, 10):
        _ = store[client]
    assert equal(store[0], state(0) | {"extra": torch.ones(3)})
    store[0] = state(100)
    for client in range(1, 10):
        _ = store[client]
    assert equal(held, state(0))


def test_overwriting_with_another_size_keeps_the_count_right(store: ClientStore) -> None:
    store[0] = state(0)
    store[0] = state(0, floats=512)
    assert store.resident == 2 * KB
    store[0] = {}
    assert store.resident == 0


def test_deleting_removes_from_ram_and_disk(store: ClientStore, tmp_path: Path) -> None:
    for client in range(6):
        store[client] = state(client)
    del store[0], store[5]
    assert sorted(store) == [1, 2, 3, 4]
    assert [path.stem for path in files(tmp_path)] == ["0000001"]
    assert store.resident == 3 * KB
    for gone in (0, 5, 99):
        assert gone not in store
        assert store.get(gone) is None
        with pytest.raises(KeyError, match=str(gone)):
            store[gone]
        with pytest.raises(KeyError, match=str(gone)):
            del store[gone]


def test_iteration_is_in_the_order_of_clients(store: ClientStore) -> None:
    clients = [7, 3, 12_345, 0, 999, 1000, 5]
    for client in clients:
        store[client] = state(client)
    _ = store[3]
    assert list(store) == sorted(clients)
    assert [client for client, value in store.items() if equal(value, state(client))] == sorted(clients)
    assert len(store) == 7


SPECIAL: State = {
    "switch": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "scalar": torch.tensor(0.1),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "nothing": torch.zeros(0, 3),
    "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    "channels last": torch.arange(16.0).reshape(1, 4, 2, 2).contiguous(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
}


def test_every_kind_of_tensor_survives_a_spill(store: ClientStore) -> None:
    store[0] = SPECIAL
    for client in range(1, 6):
        store[client] = state(client)
    assert 0 not in store._warm
    back = store[0]
    assert back.keys() == SPECIAL.keys()
    for name, tensor in SPECIAL.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name].contiguous().view(torch.uint8) if name == "odd" else back[name],
                           tensor.view(torch.uint8) if name == "odd" else tensor), name  # fmt: skip


def test_tensors_that_share_memory_survive_a_spill(store: ClientStore) -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    store[0] = {"first": rows[0], "second": rows[1], "again": rows[0], "all": rows}
    for client in range(1, 6):
        store[client] = state(client)
    assert equal(store[0], {"first": rows[0], "second": rows[1], "again": rows[0], "all": rows})


@pytest.mark.parametrize("put", [ClientStore.__setitem__, ClientStore.stage])
def test_a_small_part_of_larger_memory_does_not_hold_it(put) -> None:
    """A client's head in the message of its whole model, or in memory with the messages of all clients."""
    store = ClientStore(100 * KB)
    messages = torch.randn(100, 3 * KB)
    put(store, 0, {"a": messages[0, :KB], "b": messages[0, KB : KB + 8].view(2, 4)})
    whole = {"a": messages[1, : 2 * KB].clone()[:KB], "b": torch.ones(2)}
    put(store, 1, whole)
    store.commit()
    assert sum(tensor.untyped_storage().nbytes() for tensor in store[0].values()) == 4 * (KB + 8)
    assert equal(store[0], {"a": messages[0, :KB], "b": messages[0, KB : KB + 8].view(2, 4)})
    assert store[1] is whole  # most of its memory is its own


def test_a_client_that_keeps_nothing_is_known_nevertheless(store: ClientStore) -> None:
    store[3] = {}
    for client in range(10, 20):
        store[client] = state(client)
    assert 3 in store
    assert store[3] == {}


def test_close_removes_the_temporary_folder_and_forgets() -> None:
    store = ClientStore(KB)
    for client in range(3):
        store[client] = state(client)
    folder = store._temporary
    assert folder is not None
    assert len(files(folder)) == 2
    store.close()
    assert not folder.exists()
    assert len(store) == 0
    assert store.resident == 0
    store.close()


def test_nothing_is_written_while_all_fits() -> None:
    store = ClientStore(KB * KB)
    for client in range(100):
        store[client] = state(client)
    assert store._temporary is None


def states(*values: float) -> list[State]:
    return [{"w": torch.full((1000,), float(value))} for value in values]


@pytest.mark.parametrize("budget", [1, 10**9])
def test_what_is_staged_counts_at_commit_spilled_or_not(tmp_path: Path, budget: int) -> None:
    store = ClientStore(budget, inside=tmp_path)
    old, new, other = states(1, 2, 3)
    store[0] = old
    store.stage(0, new)
    store.stage(1, other)
    assert list(store) == [0]
    assert torch.equal(store[0]["w"], old["w"])
    store.changed.clear()
    store.commit()
    assert list(store) == [0, 1]
    assert torch.equal(store[0]["w"], new["w"])
    assert torch.equal(store[1]["w"], other["w"])
    assert store.changed == {0, 1}
    assert store.resident <= max(budget, 4000)


@pytest.mark.parametrize("budget", [1, 10**9])
def test_what_is_discarded_leaves_no_trace(tmp_path: Path, budget: int) -> None:
    store = ClientStore(budget, inside=tmp_path)
    old, new, other = states(1, 2, 3)
    store[0] = old
    store.changed.clear()
    store.stage(0, new)
    store.stage(1, other)
    store.discard()
    store.commit()
    assert list(store) == [0]
    assert torch.equal(store[0]["w"], old["w"])
    assert store.changed == set()
    assert not list(tmp_path.rglob("*.staged.safetensors"))
