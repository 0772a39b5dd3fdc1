"""Strategies for the pool's words within their limits."""

from collections.abc import Mapping

from hypothesis import strategies as st

from gpupool.model import assignment as a
from gpupool.model import inventory as inv
from gpupool.model import lease as ls
from gpupool.model import limits
from gpupool.model import request as rq
from gpupool.model.caller import Caller, ProcessRef, Role
from gpupool.model.errors import ErrorKind, Refused
from gpupool.model.event import Event
from gpupool.model.hold import Hold, HoldKind, HoldScope
from gpupool.model.views import PoolSummary, UnclaimedAssignment
from gpupool.wire.agent import PID_MIN, AdoptAsk, Adopted
from gpupool.wire.lease import AcquireAsk

INT64 = 2**63 - 1


def ascii_text(alphabet: str, least: int = 1, most: int = 12) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=least, max_size=most)


names = st.text(
    st.characters(exclude_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"]), max_size=8
)
full_names = names.filter(bool)
ids = ascii_text("abcXYZ019:-_./")
node_ids = ascii_text("abzAZ09._-")
group_names = ascii_text("abz09-")
uuids = st.builds(lambda kind, rest: f"{kind}-{rest}", st.sampled_from(["GPU", "MIG"]), node_ids)
words = ascii_text("abz_.09")
guids = st.integers(0, 2**64 - 1).map(lambda value: f"{value:016x}")
tenants = st.just("default") | full_names
uids = st.integers(0, limits.UID_MAX)


def seconds(least: float, most: float) -> st.SearchStrategy[float]:
    """Durations that are whole nanoseconds, as the wire has them."""
    nanos = st.integers(int(least * 10**9), int(most * 10**9))
    return nanos.map(lambda value: value / 10**9)


unix_s = st.integers(0, 253_402_300_799 * 10**3).map(lambda value: value / 10**3)
labels = st.dictionaries(full_names, names, max_size=3)
environment = st.dictionaries(ascii_text("ABZ_"), st.text("az09=,\n", max_size=9), max_size=3)
levels = st.none() | st.sampled_from(rq.Level)


@st.composite
def constraints(draw: st.DrawFn) -> rq.TopologyConstraint:
    spread = draw(levels)
    return rq.TopologyConstraint(
        required=draw(levels),
        preferred=draw(levels),
        spread=spread,
        max_per_domain=draw(st.integers(1, 1024)) if spread else 1,
    )


gpu_memory = st.integers(0, limits.GPU_MEMORY_MIB_MAX)
whole_gpus = st.builds(
    rq.WholeGpus, count=st.integers(1, limits.GPUS_PER_MEMBER_MAX), min_memory_mib=gpu_memory
)


@st.composite
def slices(draw: st.DrawFn) -> rq.GpuSlice:
    share = draw(st.integers(0, 100))
    memory = draw(gpu_memory if share else st.integers(1, limits.GPU_MEMORY_MIB_MAX))
    if share and draw(st.booleans()):
        least, most = draw(st.integers(1, share)), draw(st.integers(share, 100))
        return rq.GpuSlice(
            share_pct=share, memory_mib=memory, min_share_pct=least, max_share_pct=most
        )
    return rq.GpuSlice(share_pct=share, memory_mib=memory)


selectors = st.builds(
    rq.LabelSelector,
    key=full_names,
    values=st.lists(names, max_size=3, unique=True).map(tuple),
    exclude=st.booleans(),
)
groups = st.builds(
    rq.Group,
    name=group_names,
    replicas=st.integers(1, 5),
    accelerator=st.none() | whole_gpus | slices(),
    models=st.lists(ascii_text("ah100 "), max_size=3, unique=True).map(tuple),
    node_selectors=st.lists(selectors, max_size=2).map(tuple),
    cpu_milli=st.integers(0, limits.CPU_MILLI_MAX),
    host_memory_mib=st.integers(0, limits.HOST_MEMORY_MIB_MAX),
    topology=constraints(),
    member_topology=constraints(),
)
specs = st.builds(
    rq.LeaseSpec,
    groups=st.lists(groups, min_size=1, max_size=3, unique_by=lambda g: g.name).map(tuple),
    topology=constraints(),
    display_name=names,
    labels=labels,
    tenant=tenants,
    uid=uids,
    priority=st.integers(limits.PRIORITY_MIN, limits.PRIORITY_MAX),
    max_duration_s=st.none() | seconds(limits.MAX_DURATION_S_MIN, limits.MAX_DURATION_S_MAX),
    disconnect_s=seconds(limits.DISCONNECT_S_MIN, limits.DISCONNECT_S_MAX),
    spares=st.integers(0, limits.SPARES_MAX),
    on_failure=st.none() | st.sampled_from(rq.OnFailure),
    isolated=st.booleans(),
    movable=st.booleans(),
    workload_class=st.none() | st.sampled_from(rq.WorkloadClass),
    shared_trust=st.booleans(),
    on_caller_node=st.booleans(),
)

ttls = seconds(limits.TTL_S_MIN, limits.TTL_S_MAX)


@st.composite
def asks(draw: st.DrawFn) -> AcquireAsk:
    process = draw(st.booleans())
    return AcquireAsk(
        request_id=draw(ids),
        spec=draw(specs),
        ttl_s=None if process else draw(ttls),
        caller_process=process,
        wait_s=draw(st.none() | seconds(0, limits.WAIT_S_MAX)),
        follow=draw(st.booleans()),
    )


@st.composite
def shares(draw: st.DrawFn) -> ls.DeviceShare:
    whole = draw(st.booleans())
    return ls.DeviceShare(
        device_uuid=draw(uuids),
        share_pct=100 if whole else draw(st.integers(0, 100)),
        memory_mib=draw(gpu_memory),
        whole=whole,
    )


places = st.builds(
    ls.Place,
    node_id=node_ids,
    devices=st.lists(shares(), max_size=3, unique_by=lambda s: s.device_uuid).map(tuple),
    cpu_milli=st.integers(0, limits.CPU_MILLI_MAX),
    host_memory_mib=st.integers(0, limits.HOST_MEMORY_MIB_MAX),
)
shares_given = st.lists(
    st.builds(
        ls.ShareGiven,
        device_uuid=uuids,
        sm_count=st.integers(0, limits.SM_COUNT_MAX),
        share_milli_pct=st.integers(0, 100_000),
    ),
    max_size=2,
    unique_by=lambda share: share.device_uuid,
).map(tuple)
members = st.builds(
    ls.Member,
    group=group_names,
    index=st.integers(0, limits.REPLICAS_MAX - 1),
    rank=st.integers(0, limits.MEMBERS_MAX - 1),
    state=st.sampled_from(ls.MemberState),
    token=st.integers(0, INT64),
    place=places,
    environment=st.none() | environment.filter(bool),
    given=shares_given,
    degraded=names,
)
callers = st.builds(Caller, tenant=tenants, user=names, uid=uids, role=st.sampled_from(Role))
processes = st.builds(
    ProcessRef,
    node_id=node_ids,
    pid=st.integers(1, 2**22),
    start_ticks=st.integers(0, INT64),
)
causes = st.builds(
    ls.Cause,
    code=words,
    count=st.integers(0, INT64),
    unit=names,
    message=st.text("a\n", max_size=9),
)
explanations = st.builds(
    ls.Explanation,
    summary=names,
    causes=st.lists(causes, max_size=2).map(tuple),
    nearest_change=names,
)
leases = st.builds(
    ls.Lease,
    lease_id=ids,
    request_id=ids,
    caller=callers,
    spec=specs,
    state=st.sampled_from(ls.LeaseState),
    generation=st.integers(0, INT64),
    members=st.lists(members, max_size=2).map(tuple),
    ttl_s=st.none() | ttls,
    process=st.none() | processes,
    create_unix_s=unix_s,
    grant_unix_s=st.none() | unix_s,
    end_unix_s=st.none() | unix_s,
    position=st.integers(0, 2**31 - 1),
    explanation=explanations,
)
refusals = st.builds(
    Refused,
    kind=st.sampled_from(ErrorKind),
    message=names,
    field=names,
    explanation=st.none() | explanations,
    retry_after_s=st.none() | seconds(0, 86400),
)

devices = st.builds(
    inv.Device,
    uuid=uuids,
    model=full_names,
    pci_address=names,
    memory_mib=st.none() | st.integers(1, limits.GPU_MEMORY_MIB_MAX),
    index=st.integers(0, 4095),
    numa_node=st.integers(-1, 1023),
    nvlink_domain=names,
    sm_count=st.integers(0, 65535),
    sliceable=st.booleans(),
    parent_uuid=st.none() | uuids,
    compute_capability=names,
    pci_path=names,
    cpus=names,
    fabric_state=st.just("") | st.sampled_from(inv.FABRIC_STATES),
    fabric_status=st.integers(0, 999),
    cluster_uuid=names,
    clique_id=st.integers(0, 2**32 - 1),
    nvlinks_active=st.integers(0, 64),
    nvlinks_expected=st.integers(0, 64),
    nvlink_peers=st.dictionaries(full_names, st.integers(1, 64), max_size=3),
    serial=names,
)
ports = st.builds(
    inv.HcaPort,
    number=st.integers(1, 255),
    port_guid=guids,
    lid=st.integers(0, 65535),
    sm_lid=st.integers(0, 65535),
    state=names,
    rate_mbps=st.integers(0, 10**9),
    link_layer=names,
    phys_state=names,
    width=st.integers(0, 12),
    speed=names,
    expected_rate_mbps=st.integers(0, 10**9),
    rail=st.none() | st.integers(0, 255),
)
hcas = st.builds(
    inv.Hca,
    name=full_names,
    node_guid=guids,
    pci_address=names,
    numa_node=st.integers(-1, 1023),
    ports=st.lists(ports, max_size=2, unique_by=lambda p: p.number).map(tuple),
    pci_path=names,
    system_image_guid=st.just("") | guids,
    firmware=names,
    hca_type=names,
    board_id=names,
    bonded=st.booleans(),
)
inventories = st.builds(
    inv.NodeInventory,
    devices=st.lists(devices, max_size=3, unique_by=lambda d: d.uuid).map(tuple),
    hcas=st.lists(hcas, max_size=2).map(tuple),
    cpu_milli=st.integers(0, limits.CPU_MILLI_MAX),
    host_memory_mib=st.integers(0, limits.HOST_MEMORY_MIB_MAX),
    labels=labels,
    simulated=names,
    driver_version=names,
    hostname=names,
)
strays = st.builds(
    inv.StrayProcess,
    pid=st.integers(0, 2**22),
    uid=uids,
    user=names,
    command=st.text("ab\t\x1b", max_size=20),
    memory_mib=gpu_memory,
    cause=st.just("") | st.sampled_from([each.value for each in inv.StrayCause]) | words,
    lease_id=st.text("l-1\t\x1b", max_size=20),
)
keys = st.builds(a.AssignmentKey, lease_id=ids, rank=st.integers(0, limits.MEMBERS_MAX - 1))
unclaimed = st.builds(
    UnclaimedAssignment,
    node_id=node_ids,
    lease_id=ids,
    rank=st.integers(0, limits.MEMBERS_MAX - 1),
    token=st.integers(0, 2**63 - 1),
    place=places,
    uid=uids,
    ending=st.booleans(),
)
adopt_asks = st.builds(AdoptAsk, lease_id=ids, pid=st.integers(PID_MIN, 2**22))
adopted = st.builds(
    Adopted,
    device_uuids=st.lists(uuids, max_size=3).map(tuple),
    command=st.text("ab\t\x1b", max_size=20),
)
counts = st.integers(0, 2**31 - 1)
summaries = st.builds(
    PoolSummary,
    epoch=st.integers(0, INT64),
    version=names,
    nodes=counts,
    nodes_connected=counts,
    devices=counts,
    devices_free=counts,
    devices_used=counts,
    devices_unavailable=counts,
    granted_share_pct=st.integers(0, INT64),
    leases=counts,
    waiting=counts,
    grain_pct=counts,
    read_only_reason=names,
    strays=st.integers(0, INT64),
)
assignments = st.builds(
    a.Assignment,
    key=keys,
    group=group_names,
    token=st.integers(0, INT64),
    place=places,
    uid=uids,
    disconnect_s=seconds(limits.DISCONNECT_S_MIN, limits.DISCONNECT_S_MAX),
    world_size=st.integers(1, limits.MEMBERS_MAX),
)
watches = st.builds(a.HolderWatch, lease_id=ids, process=processes)
desired_states = st.builds(
    a.DesiredState,
    revision=st.integers(0, INT64),
    epoch=st.integers(0, INT64),
    assignments=st.lists(assignments, max_size=2, unique_by=lambda x: x.key).map(tuple),
    holders=st.lists(watches, max_size=2, unique_by=lambda w: w.lease_id).map(tuple),
    unclaimed=st.lists(keys, max_size=2, unique=True).map(tuple),
)
assignment_reports = st.builds(
    a.AssignmentReport,
    key=keys,
    token=st.integers(0, INT64),
    state=st.sampled_from(a.AssignmentState),
    environment=environment,
    reason=names,
    place=st.none() | places,
    uid=uids,
    given=shares_given,
    degraded=names,
)
device_reports = st.builds(
    a.DeviceReport,
    uuid=uuids,
    clean=st.booleans(),
    failed=st.booleans(),
    strays=st.lists(strays, max_size=2).map(tuple),
    reason=names,
)
report_lists: Mapping[str, st.SearchStrategy[tuple[object, ...]]] = {
    "assignments": st.lists(assignment_reports, max_size=2, unique_by=lambda r: r.key).map(tuple),
    "devices": st.lists(device_reports, max_size=2, unique_by=lambda r: r.uuid).map(tuple),
}
hellos = st.builds(
    a.Hello,
    node_id=node_ids,
    boot_id=ids,
    agent_version=full_names,
    agent_instance_id=ids,
    protocol_revisions=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    inventory=inventories,
    highest_epoch=st.integers(0, INT64),
    **report_lists,
)
welcomes = st.builds(
    a.Welcome,
    epoch=st.integers(0, INT64),
    protocol_revision=st.integers(1, 9),
    allocator_version=names,
    heartbeat_timeout_s=seconds(0.1, 86400),
    report_interval_s=seconds(0.1, 86400),
    reconnect_spread_s=seconds(0, 86400),
    forward_key=names,
)
holder_ends = st.builds(a.HolderEnd, lease_id=ids, pid=st.integers(0, 2**22), reason=names)
fault_reports = st.builds(
    a.FaultReport,
    code=words,
    evidence=names,
    open=st.booleans(),
    device_uuid=st.none() | uuids,
    unix_s=unix_s,
)
process_notes = st.builds(
    a.ProcessNote,
    kind=st.sampled_from(a.ProcessNoteKind),
    device_uuid=uuids,
    process=strays,
    reason=names,
    actor=names,
)
reports = st.builds(
    a.Report,
    full=st.booleans(),
    inventory=st.none() | inventories,
    alive_holders=st.lists(ids, max_size=3).map(tuple),
    ended_holders=st.lists(holder_ends, max_size=2).map(tuple),
    accepted_revision=st.integers(0, INT64),
    faults=st.lists(fault_reports, max_size=2).map(tuple),
    process_notes=st.lists(process_notes, max_size=2).map(tuple),
    **report_lists,
)
telemetry = st.lists(
    st.builds(
        a.DeviceTelemetry,
        uuid=uuids,
        utilization_pct=st.none() | st.integers(0, 100),
        memory_used_mib=st.none() | gpu_memory,
        temperature_c=st.none() | st.integers(-20, 120),
        power_mw=st.none() | st.integers(0, 10**6),
    ),
    max_size=3,
    unique_by=lambda d: d.uuid,
).map(tuple)


@st.composite
def holds(draw: st.DrawFn) -> Hold:
    scope = draw(st.sampled_from(HoldScope))
    return Hold(
        hold_id=draw(ids),
        kind=draw(st.sampled_from(HoldKind)),
        scope=scope,
        target=draw(uuids if scope is HoldScope.DEVICE else node_ids),
        reason=draw(full_names),
        owner=draw(callers),
        allowed_tenants=draw(st.lists(full_names, max_size=3, unique=True).map(tuple)),
        expire_unix_s=draw(st.none() | unix_s),
        create_unix_s=draw(unix_s),
    )


events = st.builds(
    Event,
    sequence=st.integers(1, INT64),
    unix_s=unix_s,
    kind=words,
    subject=ids,
    cause=names,
    details=labels,
)
