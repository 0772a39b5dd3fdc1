"""Every promise that the core can break, as assertions (design.md, section 9)."""

from gpupool.model.ids import DeviceUuid
from gpupool.model.lease import LeaseState, MemberState
from gpupool_allocator.core.state import State


def check(state: State) -> None:
    """AssertionError on the first broken promise; walks the whole pool, for tests."""
    state.books.check()
    _check_bookings(state)
    _check_leases(state)
    _check_tokens(state)
    _check_queue(state)
    assert len(state.ended) <= state.settings.ended_kept
    assert len(state.queue) <= state.settings.queue_max + 1


def _check_bookings(state: State) -> None:
    """The books hold exactly the members that have not ended, and the unclaimed."""
    held = {
        lease.key(member)
        for lease in state.leases.values()
        if not lease.ended
        for member in lease.members
        if member.state is not MemberState.ENDED
    }
    booked = set(state.books.keys())
    assert held <= booked, f"members without a booking: {held - booked}"
    strangers = booked - held
    assert strangers <= set(state.unclaimed), f"bookings of nobody: {strangers}"
    for node in state.nodes.values():
        for key, member in node.members.items():
            assert key in held, f"{key} is on node {node.node_id} but holds nothing"
            assert member.place.node_id == node.node_id
    assert len(held) == sum(len(node.members) for node in state.nodes.values())


def _check_leases(state: State) -> None:
    for lease in state.leases.values():
        asked = sum(group.replicas for group in lease.spec.groups)
        match lease.state:
            case LeaseState.PENDING:
                assert not lease.members, f"{lease.lease_id} waits and holds something"
                assert lease.lease_id in state.queue
            case LeaseState.GRANTED | LeaseState.ACTIVE:
                # All or nothing.
                assert len(lease.members) == asked, f"{lease.lease_id} is partly held"
                assert all(
                    member.state in (MemberState.PREPARING, MemberState.READY)
                    for member in lease.members
                )
                assert lease.ending_as is None
            case LeaseState.RELEASING:
                assert lease.ending_as is not None
                assert any(m.state is MemberState.ENDING for m in lease.members)
            case _:
                assert all(m.state is MemberState.ENDED for m in lease.members)
                assert not lease.listeners
        assert [member.rank for member in lease.members] == sorted(
            member.rank for member in lease.members
        )


def _check_tokens(state: State) -> None:
    """No two members of whole devices share one; slices have tokens of their own."""
    by_device: dict[DeviceUuid, set[int]] = {}
    for node in state.nodes.values():
        for member in node.members.values():
            assert 0 < member.token <= (state.epoch << 32) + state.tokens_issued
            for share in member.place.devices:
                tokens = by_device.setdefault(share.device_uuid, set())
                assert member.token not in tokens, f"token {member.token} twice on a device"
                tokens.add(member.token)


def _check_queue(state: State) -> None:
    waiting = {
        lease.lease_id for lease in state.leases.values() if lease.state is LeaseState.PENDING
    }
    assert waiting == set(state.queue)
    if state.reserved_for is not None:
        assert state.reserved_for in waiting, "places are kept for a request that does not wait"
    for command, lease_id in state.listeners.items():
        assert command in state.leases[lease_id].listeners
