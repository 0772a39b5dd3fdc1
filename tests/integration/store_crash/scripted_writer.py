"""A process that performs a fixed series of commits and says which are acknowledged.

Run as a program with the store's path. It says "opened", "acknowledged N", "full N"
(and then tries once more with the reserve), "unknown N". The tests interrupt it at
each of its writes and know from ``STATES`` what may be on disk then.
"""

import os
import sys
from pathlib import Path

from gpupool.model.event import Event
from gpupool_allocator.storage.sqlite import MIB, SqliteStore
from gpupool_allocator.storage.store import Operation, StoreError, StoreFullError

State = dict[str, bytes]

COMMITS = 4


def operations(commit: int) -> list[Operation]:
    """Some records written over, one new, one deleted; several pages each time."""
    values = {
        "always": b"%d" % commit * 100,
        f"new-{commit}": b"n" * 3000,
    }
    writes = [Operation(kind="lease", key=key, value=value) for key, value in values.items()]
    return [*writes, Operation(kind="lease", key=f"new-{commit - 2}", value=None)]


def events(commit: int) -> list[Event]:
    """One event a commit, with the commit's number as its sequence."""
    return [Event(sequence=commit, unix_s=1.0, kind="k", subject=f"s{commit}", cause="c")]


def states() -> list[State]:
    """What the store holds after each number of commits."""
    state: State = {}
    result = [dict(state)]
    for commit in range(1, COMMITS + 1):
        for each in operations(commit):
            if each.value is None:
                state.pop(each.key, None)
            else:
                state[each.key] = each.value
        result.append(dict(state))
    return result


STATES = states()


def open_store(path: Path) -> SqliteStore:
    """The store as every test here opens it."""
    return SqliteStore(path, max_bytes=16 * MIB, reserve_bytes=64 * 1024)


def committed(store: SqliteStore) -> int:
    """How many commits are in the store. AssertionError unless it is exactly those."""
    count = store.bounds()[1]
    assert {each.key: each.value for each in store.load()} == STATES[count]
    assert len(store.read(after_sequence=0, limit=100)) == count
    return count


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def main(path: Path) -> int:
    try:
        store = open_store(path)
        epoch = store.begin_term()
    except (OSError, StoreError, StoreFullError) as error:
        say(f"closed {error!r}")
        return 1
    # So short that the script meets checkpoints, and the log starts over.
    store._database.execute("PRAGMA wal_autocheckpoint = 16")
    say("opened")
    for commit in range(1, COMMITS + 1):
        try:
            try:
                store.commit(epoch, operations(commit), events(commit))
            except StoreFullError:
                assert committed(store) == commit - 1, "a refused commit was written"
                say(f"full {commit}")
                store.free_reserve()
                store.commit(epoch, operations(commit), events(commit))
        except StoreFullError:
            say(f"refused {commit}")
            return 2
        except StoreError:
            say(f"unknown {commit}")
            return 3
        say(f"acknowledged {commit}")
    store.close()
    say("closed well")
    return 0


if __name__ == "__main__":
    # Not sys.exit: what a dying process would tidy up must not be done here either.
    os._exit(main(Path(sys.argv[1])))
