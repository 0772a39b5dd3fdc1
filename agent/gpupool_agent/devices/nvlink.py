"""NVLinks and NVLink fabric of the GPUs, through NVML."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml  # pyright: ignore[reportMissingTypeStubs] - it has none

from gpupool.model.ids import DeviceUuid
from gpupool.model.inventory import FABRIC_COMPLETED, FABRIC_STATES, NVSWITCH

nvml: Any = pynvml

Ask = Callable[..., Any]
"""Asks the driver; None where it cannot say."""

LINKS_MAX = 36
ACTIVE_STATES = (1, 2)
"""Active, and asleep until there is traffic."""

REMOTE_GPU = 0
REMOTE_SWITCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """NVLink fabric of a GPU; the fields of ``Device`` with these names."""

    fabric_state: str = ""
    fabric_status: int = 0
    cluster_uuid: str = ""
    clique_id: int = 0
    nvlink_domain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvlinks:
    """NVLinks of a GPU; the fields of ``Device`` with these names."""

    nvlinks_active: int = 0
    nvlinks_expected: int = 0
    nvlink_peers: dict[str, int] = field(default_factory=dict[str, int])


def read_fabric(handle: Any, ask: Ask) -> Fabric:
    """State of the fabric, and the domain "<cluster uuid>.<clique>" where it is up.

    A zero cluster is a host that is its own domain. An unfinished or failed start says
    nothing about a domain, whatever cluster it names.
    """
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    if ask(nvml.nvmlDeviceGetGpuFabricInfoV, handle, nvml.byref(info)) is None:
        return Fabric()
    number: int = info.state
    state = FABRIC_STATES[number] if number < len(FABRIC_STATES) else str(number)
    status = min(max(0, int(info.status)), 999)
    cluster = _uuid_text(bytes(info.clusterUuid))
    up = state == FABRIC_COMPLETED and status == 0 and bool(cluster)
    return Fabric(
        fabric_state=state,
        fabric_status=status,
        cluster_uuid=cluster,
        clique_id=info.cliqueId,
        nvlink_domain=f"{cluster}.{info.cliqueId}" if up else "",
    )


class NvlinkReader:
    """Reads links. What is at a link's other end is asked once, for it is soldered."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._ends: dict[DeviceUuid, dict[int, str]] = {}

    def keep(self, uuids: set[DeviceUuid]) -> None:
        """Forget the devices that are gone."""
        self._ends = {uuid: ends for uuid, ends in self._ends.items() if uuid in uuids}

    def read(self, uuid: DeviceUuid, handle: Any) -> Nvlinks:
        """Links of a GPU. Those that the driver lists are those that it expects."""
        expected = active = 0
        peers: dict[str, int] = {}
        for link in range(LINKS_MAX):
            state = self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:
                break
            expected += 1
            if state not in ACTIVE_STATES:
                continue
            active += 1
            end = self._end(uuid, handle, link)
            if end:
                peers[end] = peers.get(end, 0) + 1
        return Nvlinks(nvlinks_active=active, nvlinks_expected=expected, nvlink_peers=peers)

    def _end(self, uuid: DeviceUuid, handle: Any, link: int) -> str:
        """What is at the other end; empty: the driver cannot say, or it is no GPU."""
        ends = self._ends.setdefault(uuid, {})
        if not ends.get(link):
            ends[link] = self._ask_end(handle, link)
        return ends[link]

    def _ask_end(self, handle: Any, link: int) -> str:
        kind = self._ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == REMOTE_SWITCH:
            return NVSWITCH
        pci = self._ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if kind != REMOTE_GPU or pci is None:
            return ""
        bus_id = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
        return pci_address(bus_id)


def pci_address(bus_id: str) -> str:
    """NVML's bus id as sysfs has it: "00000000:1B:00.0" is "0000:1b:00.0"."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}" if rest else ""


def _uuid_text(data: bytes) -> str:
    """A UUID as text; empty for zero."""
    text = data.hex()
    if not any(data):
        return ""
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
