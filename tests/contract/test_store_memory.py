"""The store in memory keeps the contract, and fails as asked."""

from collections.abc import Callable

import pytest
from tests.contract.store_suite import StoreSuite, StoreWithHistory, contents, happened, put

from gpupool_allocator.storage.memory import Failure, MemoryDisk, MemoryStore
from gpupool_allocator.storage.store import EpochLostError, StoreError, StoreFullError


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def open_store(self) -> Callable[..., StoreWithHistory]:
        disks: list[MemoryDisk] = []

        def opened(**limits: int) -> StoreWithHistory:
            if not disks:
                disks.append(MemoryDisk(**limits))
            return MemoryStore(disks[0])

        return opened


def test_of_two_writers_the_later_term_wins() -> None:
    disk = MemoryDisk()
    first, second = MemoryStore(disk), MemoryStore(disk)
    old = first.begin_term()
    first.commit(old, [put("a", b"first")])
    new = second.begin_term()
    second.commit(new, [put("a", b"second")])
    with pytest.raises(EpochLostError):
        first.commit(old, [put("a", b"first again")])
    assert contents(first) == {("lease", "a"): b"second"}


def test_a_full_store_writes_nothing_and_goes_on() -> None:
    store = MemoryStore()
    epoch = store.begin_term()
    store.disk.failures.append(Failure.FULL)
    with pytest.raises(StoreFullError):
        store.commit(epoch, [put("a")], [happened(1)])
    assert contents(store) == {}
    assert store.free_reserve()
    store.commit(epoch, [put("a")], [happened(1)])
    assert not store.free_reserve()
    store.disk.refusal = "disk nearly full"
    assert store.accepts_writes() == "disk nearly full"


@pytest.mark.parametrize(("failure", "written"), [(Failure.LOST, 0), (Failure.ANSWER_LOST, 1)])
def test_after_an_unknown_outcome_only_a_new_store_goes_on(failure: Failure, written: int) -> None:
    store = MemoryStore()
    epoch = store.begin_term()
    store.disk.failures.append(failure)
    with pytest.raises(StoreError, match="outcome of its last write is unknown"):
        store.commit(epoch, [put("a")], [happened(1)])
    with pytest.raises(StoreError):
        store.commit(epoch, [put("b")])
    assert store.accepts_writes() == "the store failed"
    again = MemoryStore(store.disk)
    assert len(contents(again)) == written
    assert again.bounds() == (written, written)


def test_a_term_whose_answer_was_lost_is_followed_by_a_higher_one() -> None:
    store = MemoryStore()
    store.disk.failures.append(Failure.ANSWER_LOST)
    with pytest.raises(StoreError):
        store.begin_term()
    assert MemoryStore(store.disk).begin_term() == 2
