from collections import deque
from collections.abc import Sequence

import pytest

from gpupool.model.event import Event
from gpupool.model.ids import NodeId
from gpupool.model.inventory import NodeInventory, NodeRecord
from gpupool_allocator.core.effects import Delete, Put, Record
from gpupool_allocator.engine.commit import Change, Committer, Transaction, pack
from gpupool_allocator.storage.memory import Failure, MemoryDisk, MemoryStore
from gpupool_allocator.storage.store import COMMIT_BYTES_MAX, OPERATIONS_MAX, StoreFullError


def node(name: str, *, label_chars: int = 0) -> NodeRecord:
    labels = {"text": "x" * label_chars}
    inventory = NodeInventory(labels=labels)
    return NodeRecord(node_id=NodeId(name), boot_id="b", agent_version="1", inventory=inventory)


def put(name: str, *, label_chars: int = 0) -> Put:
    return Put(record=node(name, label_chars=label_chars))


def record(sequence: int) -> Record:
    return Record(event=Event(sequence=sequence, unix_s=1.0, kind="k", subject="s", cause="c"))


def keys(transaction: Transaction) -> list[str]:
    return [key for _, key in transaction.operations]


def test_events_that_arrived_together_are_one_transaction() -> None:
    groups: list[Sequence[Change]] = [[put("a"), record(1)], [put("b"), record(2)]]
    (only,) = pack(groups)
    assert keys(only) == ["a", "b"]
    assert [event.sequence for event in only.events] == [1, 2]


def test_the_changes_of_one_event_are_never_split_while_they_fit() -> None:
    first = [put(f"a{number}") for number in range(60)]
    second = [put(f"b{number}") for number in range(60)]
    packed = list(pack([first, second]))
    assert [len(transaction.operations) for transaction in packed] == [60, 60]


def test_an_event_with_more_than_fits_is_cut_in_order() -> None:
    changes = [put(f"{number:04}") for number in range(250)]
    packed = list(pack([[*changes, record(1)]]))
    assert [len(transaction.operations) for transaction in packed] == [100, 100, 50]
    assert [key for each in packed for key in keys(each)] == [f"{n:04}" for n in range(250)]
    assert [len(each.events) for each in packed] == [0, 0, 1]


def test_no_transaction_exceeds_the_stores_bytes() -> None:
    packed = list(pack([[put(f"n{number}", label_chars=400_000)] for number in range(5)]))
    assert [len(each.operations) for each in packed] == [2, 2, 1]
    assert all(each.size <= COMMIT_BYTES_MAX for each in packed)
    assert all(len(each.operations) <= OPERATIONS_MAX for each in packed)


def test_a_record_changed_twice_is_written_once_in_its_last_form() -> None:
    (only,) = pack([[put("a")], [Delete(record=node("a"))]])
    (operation,) = only.operations.values()
    assert operation.value is None


def test_nothing_to_keep_is_no_transaction() -> None:
    assert list(pack([])) == []
    assert list(pack([[]])) == []


def test_a_full_store_gets_its_reserve_and_takes_what_was_decided() -> None:
    store = MemoryStore(MemoryDisk(failures=_failures(Failure.FULL)))
    store.disk.epoch = 1
    committer = Committer(store, 1)
    assert committer.commit([[put("a")]]) == 1
    assert committer.reserve_used
    assert not store.disk.reserve
    assert len(store.disk.records) == 1


def test_what_met_a_full_store_is_committed_once_and_in_order_when_there_is_room() -> None:
    disk = MemoryDisk(reserve=False)
    disk.epoch = 1
    committer = Committer(MemoryStore(disk), 1)
    big = [[put(f"n{number}", label_chars=600_000), record(number)] for number in (1, 2, 3)]
    disk.failures.extend([Failure.FULL])
    with pytest.raises(StoreFullError):
        committer.commit(big)
    assert not disk.records
    assert committer.resume() == 3
    assert [event.sequence for event in disk.history] == [1, 2, 3]
    assert committer.resume() == 0


def _failures(*failures: Failure) -> deque[Failure]:
    return deque(failures)
