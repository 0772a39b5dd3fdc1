"""The pool: one way in, one way out.

``effects = pool.handle(event, now)``. Topics live in their own modules over
``state.State``:

* ``commands``    what holders and operators ask
* ``granting``    plan, validate, book, all or nothing
* ``ending``      release and expiry; nodes confirm before anything is free again
* ``connecting``  agents come, go, reboot; inventories are merged
* ``reporting``   what nodes say of assignments, devices and holders
* ``settling``    a node's whole account against the book, both ways
* ``serving``     the queue and the places kept for its head
* ``restoring``   from the store's records after a restart
* ``reading``     pictures for the outside

Every event ends with one pass of the queue over what became available, and with
``State.flush``, which turns the marks that topics left into effects.
"""

from collections.abc import Callable
from typing import assert_never

from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.hold import Hold
from gpupool.model.ids import HoldId, LeaseId
from gpupool.model.lease import Lease, LeaseState
from gpupool.model.request import LeaseSpec
from gpupool.model.views import (
    DeviceView,
    DryRunResult,
    NodeView,
    PoolSummary,
    UnclaimedAssignment,
)
from gpupool_allocator.core import commands, connecting, reading, restoring, serving, settling
from gpupool_allocator.core.books import Books
from gpupool_allocator.core.checking import check
from gpupool_allocator.core.clocks import ClockKind
from gpupool_allocator.core.effects import Effect, Stored
from gpupool_allocator.core.ending import begin_end
from gpupool_allocator.core.events import (
    Acquire,
    AddHold,
    CallEnded,
    EndUnclaimed,
    KeepAlive,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    NodeSpoke,
    PoolEvent,
    Release,
    RemoveHold,
    TimePassed,
    Watch,
    WritesAccepted,
    WritesRefused,
)
from gpupool_allocator.core.outbox import Outbox
from gpupool_allocator.core.settings import PoolSettings
from gpupool_allocator.core.state import State
from gpupool_allocator.core.waiting import WaitQueue


class Pool:
    """All nodes under one allocator, as a machine without I/O.

    ``fits_store`` says of a lease with all its members whether the store takes it as
    one record; it is asked for big leases only, and what does not fit is not granted.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        epoch: int,
        last_sequence: int = 0,
        fits_store: Callable[[Lease], bool] = lambda _: True,
    ) -> None:
        self._state = State(
            settings=settings,
            epoch=epoch,
            fits_store=fits_store,
            books=Books(grain_pct=settings.grain_pct),
            out=Outbox(last_sequence),
            queue=WaitQueue(settings.aging_s),
        )
        self._restored = restoring.Restored()

    def restore(self, record: Stored) -> None:
        """Takes in a stored record, in any order, before ``start``."""
        self._restored.add(record)

    def start(self, now: float, unix_s: float) -> list[Effect]:
        """Builds the pool from its records; call once, after the last ``restore``."""
        state = self._state
        state.out.unix_s = unix_s
        state.out.record("allocator.started", "pool", "start", {"epoch": str(state.epoch)})
        restoring.rebuild(state, self._restored, now, unix_s)
        self._restored = restoring.Restored()
        state.flush()
        return state.out.take()

    def handle(self, event: PoolEvent, now: float) -> list[Effect]:
        """Takes in one event at monotonic time ``now``; what shall be done about it."""
        state = self._state
        unix_s = getattr(event, "unix_s", 0.0)
        if unix_s:
            state.out.unix_s = unix_s
        self._dispatch(event, now)
        if state.freed or state.queue_changed:
            serving.serve(state, now)
        state.flush()
        return state.out.take()

    def _dispatch(self, event: PoolEvent, now: float) -> None:
        state = self._state
        match event:
            case NodeReported():
                self._reported(event, now)
            case NodeSpoke():
                node = connecting.known_connection(state, event.node_id, event.connection)
                if node is not None:
                    node.heard(event.unix_s)
            case Acquire():
                commands.acquire(state, event, now)
            case Release():
                commands.release(state, event)
            case KeepAlive():
                commands.keep_alive(state, event, now)
            case CallEnded():
                commands.call_ended(state, event, now)
            case Watch():
                commands.watch(state, event)
            case TimePassed():
                self._time_passed(now)
            case NodeConnected():
                connecting.connect(state, event, now)
            case NodeDisconnected():
                connecting.disconnect(state, event, now)
            case AddHold():
                commands.add_hold(state, event, now)
            case RemoveHold():
                commands.remove_hold(state, event)
            case EndUnclaimed():
                commands.end_unclaimed(state, event)
            case WritesRefused():
                state.read_only = event.reason
                state.out.writable = False
            case WritesAccepted():
                state.read_only = ""
                state.out.writable = True
                for node_id in state.nodes:
                    state.node_freed(node_id)
            case _:
                assert_never(event)

    def _reported(self, event: NodeReported, now: float) -> None:
        state = self._state
        node = connecting.known_connection(state, event.node_id, event.connection)
        if node is None:
            return
        report = event.report
        node.heard(event.unix_s)
        if report.inventory is not None and report.inventory != node.inventory:
            connecting.take_inventory(state, node, report.inventory)
            state.record_changed(node.node_id)
        settling.take_report(state, node, report, now)

    def _time_passed(self, now: float) -> None:
        state = self._state
        if state.read_only:
            return
        for subject, kind in state.clocks.due(now):
            match kind:
                case ClockKind.HOLDER:
                    self._holder_silent(LeaseId(subject), now)
                case ClockKind.WAIT:
                    self._waited_enough(LeaseId(subject))
                case ClockKind.END:
                    lease = state.leases[LeaseId(subject)]
                    begin_end(state, lease, LeaseState.EXPIRED, "its max_duration is over")
                case ClockKind.HOLD:
                    if subject in state.holds:
                        commands.drop_hold(state, state.holds[HoldId(subject)], "expired")
                case ClockKind.RESERVATION:
                    serving.refresh_reservation(state, now)

    def _holder_silent(self, lease_id: LeaseId, now: float) -> None:
        state = self._state
        lease = state.leases[lease_id]
        if lease.state is LeaseState.PENDING:
            begin_end(state, lease, LeaseState.CANCELLED, "its caller is gone and did not return")
        elif lease.state is LeaseState.GRANTED and lease.listeners and lease.ttl_s is not None:
            # The caller is on the line and cannot renew what it has not got yet.
            state.clocks.set(lease_id, ClockKind.HOLDER, now + lease.ttl_s)
        elif lease.process is not None:
            cause = f"its holder's node {lease.process.node_id} was cut off for too long"
            begin_end(state, lease, LeaseState.EXPIRED, cause)
        else:
            begin_end(state, lease, LeaseState.EXPIRED, f"not renewed for {lease.ttl_s:g} s")

    def _waited_enough(self, lease_id: LeaseId) -> None:
        state = self._state
        lease = state.leases[lease_id]
        cause = f"not granted within its wait of {lease.wait_s:g} s: {lease.explanation.summary}"
        refused = Refused(kind=ErrorKind.NO_CAPACITY, message=cause, explanation=lease.explanation)
        for command in list(lease.listeners):
            state.forget_listener(command)
            state.out.refuse(command, refused)
        begin_end(state, lease, LeaseState.CANCELLED, cause)

    def next_deadline(self) -> float | None:
        """Monotonic time at which ``TimePassed`` is wanted; None: nothing to wait for."""
        return None if self._state.read_only else self._state.clocks.next()

    def check(self) -> None:
        """Asserts every promise of design.md section 9 that the core can break."""
        check(self._state)

    def lease(self, lease_id: LeaseId) -> Lease | None:
        """One lease, or None."""
        entry = self._state.leases.get(lease_id)
        return self._state.snapshot(entry) if entry is not None else None

    def expires_at(self, lease_id: LeaseId) -> float | None:
        """Monotonic time at which a TTL lease expires unless it is renewed; None: never."""
        lease = self._state.leases.get(lease_id)
        if lease is None or lease.ttl_s is None:
            return None
        return self._state.clocks.get(lease_id, ClockKind.HOLDER)

    def leases(
        self,
        *,
        after: str = "",
        limit: int = 100,
        states: frozenset[LeaseState] = frozenset(),
        tenant: str = "",
        node_id: str = "",
    ) -> list[Lease]:
        """Leases by id; without ``states`` those that have not ended."""
        return reading.leases(
            self._state, after=after, limit=limit, states=states, tenant=tenant, node_id=node_id
        )

    def nodes(self, *, after: str = "", limit: int = 100) -> list[NodeView]:
        """Nodes by id."""
        return reading.nodes(self._state, after=after, limit=limit)

    def devices(
        self, *, after: tuple[str, str] = ("", ""), limit: int = 100, node_id: str = ""
    ) -> list[DeviceView]:
        """Devices by (node id, UUID)."""
        return reading.devices(self._state, after=after, limit=limit, node_id=node_id)

    def holds(self, *, after: str = "", limit: int = 100) -> list[Hold]:
        """Holds by id, the places kept for the head of the queue among them."""
        return reading.holds(self._state, after=after, limit=limit)

    def unclaimed(
        self, *, after: tuple[str, str, int] = ("", "", -1), limit: int = 100
    ) -> list[UnclaimedAssignment]:
        """What nodes run and the store does not know, by (node id, lease id, rank)."""
        return reading.unclaimed(self._state, after=after, limit=limit)

    def summary(self) -> PoolSummary:
        """Sums of the pool."""
        return reading.summary(self._state)

    def dry_run(
        self, spec: LeaseSpec, now: float, *, explain: bool = False
    ) -> DryRunResult | Refused:
        """What Acquire would answer now; changes nothing."""
        return reading.dry_run(self._state, spec, now, explain=explain)
