"""What every backend of the store promises, as tests that each backend's file runs.

A backend's test class inherits ``StoreSuite`` and gives the fixture ``open_store``:
a function that opens a store on the same disk each time, and whose keywords
``history_max`` and ``deletions_max`` count at the first call.
"""

from collections.abc import Callable
from typing import Protocol

import pytest

from gpupool.model.event import Event
from gpupool_allocator.storage.store import (
    COMMIT_BYTES_MAX,
    EPOCH_MAX,
    HISTORY_READ_MAX,
    OPERATIONS_MAX,
    EpochLostError,
    History,
    Operation,
    Store,
)


class StoreWithHistory(Store, History, Protocol):
    """Both interfaces, as the engine uses them."""


OpenStore = Callable[..., StoreWithHistory]


def put(key: str, value: bytes = b"v", kind: str = "lease") -> Operation:
    return Operation(kind=kind, key=key, value=value)


def delete(key: str, kind: str = "lease") -> Operation:
    return Operation(kind=kind, key=key, value=None)


def happened(sequence: int, subject: str = "l1") -> Event:
    return Event(
        sequence=sequence,
        unix_s=1.5,
        kind="lease.granted",
        subject=subject,
        cause="it fits",
        details={"node": "n1", "what": "ü"},
    )


def contents(store: Store) -> dict[tuple[str, str], bytes | None]:
    return {(each.kind, each.key): each.value for each in store.load()}


def changes(store: Store, after: int) -> list[tuple[str, bytes | None]]:
    return [(each.key, each.value) for each in store.watch(after)]


class StoreSuite:
    """The conformance suite."""

    def test_a_new_store_is_empty(self, open_store: OpenStore) -> None:
        store = open_store()
        assert list(store.load()) == []
        assert list(store.watch(0)) == []
        assert store.read(after_sequence=0, limit=10) == []
        assert store.bounds() == (0, 0)
        assert store.accepts_writes() == ""

    def test_terms_only_rise_and_above_what_was_heard_of(self, open_store: OpenStore) -> None:
        store = open_store()
        first = store.begin_term()
        assert store.begin_term() > first
        assert store.begin_term(above=1000) == 1001
        assert store.begin_term(above=7) > 1001
        store.close()
        assert open_store().begin_term() > 1002

    @pytest.mark.parametrize("above", [-1, EPOCH_MAX + 1, 2**64])
    def test_an_epoch_that_nobody_gave_is_refused(self, open_store: OpenStore, above: int) -> None:
        store = open_store()
        epoch = store.begin_term()
        with pytest.raises(ValueError, match=f"above: {above}, must be 0 to {EPOCH_MAX}"):
            store.begin_term(above=above)
        assert store.begin_term(above=EPOCH_MAX) == EPOCH_MAX + 1
        assert epoch == 1

    def test_what_was_committed_is_there_after_reopening(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        store.commit(epoch, [put("a", b"1"), put("b", b"2")], [happened(1)])
        store.commit(epoch, [put("a", b"3"), delete("b"), put("n", b"", kind="node")])
        store.close()
        store = open_store()
        assert contents(store) == {("lease", "a"): b"3", ("node", "n"): b""}
        assert store.read(after_sequence=0, limit=10) == [happened(1)]

    def test_records_are_loaded_by_kind_and_key(self, open_store: OpenStore) -> None:
        store = open_store()
        names = [("node", "n"), ("lease", "b"), ("hold", "z"), ("lease", "a/ü"), ("lease", "a")]
        store.commit(store.begin_term(), [put(key, kind=kind) for kind, key in names])
        assert [(each.kind, each.key) for each in store.load()] == sorted(names)

    def test_a_load_shows_one_moment_and_hinders_no_commit(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        for first in range(0, 1000, 100):
            store.commit(epoch, [put(f"{first + each:04}") for each in range(100)])
        load = store.load()
        seen = [next(load)]
        store.commit(epoch, [delete("0999"), put("1000"), put("0500", b"changed")])
        seen += load
        assert [each.key for each in seen] == [f"{each:04}" for each in range(1000)]
        assert {each.value for each in seen} == {b"v"}

    def test_an_abandoned_load_does_no_harm(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        store.commit(epoch, [put("a"), put("b")])
        next(store.load())
        store.commit(epoch, [put("c")])
        store.close()
        assert len(contents(open_store())) == 3

    def test_an_ended_term_writes_nothing(self, open_store: OpenStore) -> None:
        store = open_store()
        old = store.begin_term()
        store.commit(old, [put("a", b"old")])
        new = store.begin_term()
        for stale in (old, new + 1, 0, 2**80):
            with pytest.raises(EpochLostError, match=f"epoch {stale} is over"):
                store.commit(stale, [put("a", b"stale"), put("b")], [happened(1)])
            with pytest.raises(EpochLostError):
                store.commit(stale, [])
        assert contents(store) == {("lease", "a"): b"old"}
        assert store.bounds() == (0, 0)
        store.commit(new, [put("a", b"new")], [happened(1)])
        assert contents(store) == {("lease", "a"): b"new"}

    def test_an_empty_commit_changes_nothing(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        store.commit(epoch, [put("a")])
        (record,) = store.load()
        store.commit(epoch, [])
        assert list(store.load()) == [record]
        assert changes(store, record.revision) == []

    def test_the_largest_commit_is_taken_and_one_more_is_refused(
        self, open_store: OpenStore
    ) -> None:
        store = open_store()
        epoch = store.begin_term()
        half = COMMIT_BYTES_MAX // 2
        store.commit(epoch, [put("a", b"x" * half), put("b", b"y" * half)])
        store.commit(epoch, [put(f"k{each}") for each in range(OPERATIONS_MAX)])
        before = contents(store)
        with pytest.raises(ValueError, match=f"{COMMIT_BYTES_MAX + 1} bytes, at most"):
            store.commit(epoch, [put("c", b"x" * half), put("d", b"y" * (half + 1))])
        with pytest.raises(ValueError, match=f"operations: {OPERATIONS_MAX + 1}, at most"):
            store.commit(epoch, [put(f"m{each}") for each in range(OPERATIONS_MAX + 1)])
        assert contents(store) == before
        assert len(before) == OPERATIONS_MAX + 2

    def test_the_later_of_two_operations_on_a_record_counts(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        store.commit(epoch, [put("a", b"1"), put("a", b"2"), put("b"), delete("b")])
        store.commit(epoch, [delete("a"), put("a", b"3")])
        assert contents(store) == {("lease", "a"): b"3"}

    def test_keys_of_different_kinds_are_different_records(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        store.commit(epoch, [put("x", b"1", kind="lease"), put("x", b"2", kind="hold")])
        store.commit(epoch, [delete("x", kind="hold")])
        assert contents(store) == {("lease", "x"): b"1"}

    def test_a_watch_gives_changes_and_deletions_in_order(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        store.commit(epoch, [put("a", b"1"), put("b", b"1"), put("c", b"1")])
        seen = max(each.revision for each in store.load())
        store.commit(epoch, [delete("b")])
        store.commit(epoch, [put("a", b"2"), put("d", b"1")])
        store.commit(epoch, [delete("never there")])
        assert changes(store, seen) == [("b", None), ("a", b"2"), ("d", b"1")]
        newest = [each.revision for each in store.watch(seen)]
        assert newest == sorted(newest)
        assert newest[0] > seen
        assert newest[1] == newest[2]
        assert changes(store, newest[0]) == [("a", b"2"), ("d", b"1")]
        store.commit(epoch, [put("b", b"back")])
        assert changes(store, newest[0])[-1] == ("b", b"back")

    def test_a_watch_from_the_start_rebuilds_the_store(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        for number in range(30):
            gone = [delete(f"k{number - 2}")] if number % 3 == 0 else []
            store.commit(epoch, [put(f"k{number}"), put("same", b"%d" % number), *gone])
        rebuilt: dict[tuple[str, str], bytes | None] = {}
        for change in store.watch(0):
            rebuilt[change.kind, change.key] = change.value
        live = {name: value for name, value in rebuilt.items() if value is not None}
        assert live == contents(store)

    def test_a_watch_says_when_changes_are_no_longer_kept(self, open_store: OpenStore) -> None:
        store = open_store(deletions_max=3)
        epoch = store.begin_term()
        revisions: list[int] = []
        for number in range(6):
            store.commit(epoch, [put(f"k{number}")])
            (change,) = [each for each in store.load() if each.key == f"k{number}"]
            revisions.append(change.revision)
            store.commit(epoch, [delete(f"k{number}")])
        with pytest.raises(LookupError, match="changes are kept after"):
            list(store.watch(revisions[1]))
        assert changes(store, revisions[3]) == [("k3", None), ("k4", None), ("k5", None)]

    def test_a_watch_from_a_revision_that_never_was_is_told(self, open_store: OpenStore) -> None:
        store = open_store()
        store.commit(store.begin_term(), [put("a")])
        (record,) = store.load()
        assert list(store.watch(record.revision)) == []
        for unknown in (record.revision + 1, -1):
            with pytest.raises(LookupError, match=f"after_revision: {unknown}"):
                list(store.watch(unknown))

    def test_history_is_read_in_order_from_anywhere(self, open_store: OpenStore) -> None:
        store = open_store()
        epoch = store.begin_term()
        events = [happened(each, subject=f"l{each % 3}") for each in range(1, 31)]
        store.commit(epoch, [put("a")], events[:10])
        store.commit(epoch, [], events[10:])
        assert store.bounds() == (1, 30)
        assert store.read(after_sequence=0, limit=1000) == events
        assert store.read(after_sequence=12, limit=5) == events[12:17]
        assert store.read(after_sequence=30, limit=5) == []
        assert store.read(after_sequence=9, limit=4, subject="l2") == events[10:20:3]
        assert store.read(after_sequence=0, limit=4, subject="nobody") == []

    def test_an_event_comes_back_as_it_was(self, open_store: OpenStore) -> None:
        store = open_store()
        event = Event(
            sequence=1,
            unix_s=-1.25e300,
            kind="",
            subject="a'b\"c\x00d",
            cause="ü😀",
            details={"": "", "k\n": "\\"},
        )
        store.commit(store.begin_term(), [], [event])
        assert store.read(after_sequence=0, limit=1) == [event]
        assert store.read(after_sequence=0, limit=1, subject=event.subject) == [event]

    @pytest.mark.parametrize("sequences", [[2], [1, 3], [1, 1], [0], [1, 2, 2**70]])
    def test_a_gap_in_the_history_is_refused_whole(
        self, open_store: OpenStore, sequences: list[int]
    ) -> None:
        store = open_store()
        epoch = store.begin_term()
        with pytest.raises(ValueError, match=f"event sequence: {sequences[-1]}, must be"):
            store.commit(epoch, [put("a")], [happened(each) for each in sequences])
        assert contents(store) == {}
        assert store.bounds() == (0, 0)

    def test_an_event_at_no_time_is_refused_whole(self, open_store: OpenStore) -> None:
        store = open_store()
        event = Event(sequence=1, unix_s=float("nan"), kind="k", subject="s", cause="c")
        with pytest.raises(ValueError, match="unix_s of event 1: nan, must be finite"):
            store.commit(store.begin_term(), [put("a")], [event])
        assert contents(store) == {}

    @pytest.mark.parametrize(
        ("after", "limit", "complaint"),
        [
            (-1, 1, "after_sequence: -1"),
            (2**63, 1, "after_sequence"),
            (0, 0, f"limit: 0, must be 1 to {HISTORY_READ_MAX}"),
            (0, HISTORY_READ_MAX + 1, "limit: 10001"),
        ],
    )
    def test_a_read_out_of_range_is_refused(
        self, open_store: OpenStore, after: int, limit: int, complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            open_store().read(after_sequence=after, limit=limit)

    def test_old_history_goes_and_the_sequence_goes_on(self, open_store: OpenStore) -> None:
        store = open_store(history_max=10)
        epoch = store.begin_term()
        for sequence in range(1, 96):
            store.commit(epoch, [], [happened(sequence)])
        assert store.bounds() == (86, 95)
        kept = store.read(after_sequence=0, limit=100)
        assert [event.sequence for event in kept] == list(range(86, 96))
        store.commit(epoch, [], [happened(each) for each in range(96, 121)])
        assert store.bounds() == (111, 120)
        store.close()
        store = open_store()
        assert store.bounds()[1] == 120
        store.commit(store.begin_term(), [], [happened(121)])
