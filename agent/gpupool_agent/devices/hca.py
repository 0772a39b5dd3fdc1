"""Network adapters, read from /sys/class/infiniband (InfiniBand and RoCE alike).

An adapter is known by its GUID and slot, never by its name, which changes when one is
swapped. What a file does not say is left empty; nothing here raises for it.
"""

import re
from pathlib import Path

from gpupool.model.inventory import UNKNOWN_GUID, Hca, HcaPort
from gpupool_agent.core.readings import PortCounters
from gpupool_agent.devices.hca_counters import CounterReader
from gpupool_agent.devices.pci import numa_node, pci_path
from gpupool_agent.devices.sysfs import names_in, read_int, read_text, real_path

GUID = re.compile(r"[0-9a-f]{16}")
RATE = re.compile(r"(?P<gbps>\d+(?:\.\d+)?) Gb/sec(?: \((?P<width>\d+)X(?: (?P<speed>\w+))?\))?")
BOND_NAME = "_bond_"


class SysfsHcaReader:
    """``HcaReader`` over a sysfs tree; ``sysfs`` is where /sys is."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._sysfs = sysfs
        self._counters = CounterReader()

    def read(self) -> tuple[Hca, ...]:
        """Every adapter, by name; none where the host has no such class."""
        found = tuple(self._hca(path) for path in self._adapters())
        self._counters.keep({hca.name: hca.node_guid for hca in found})
        return found

    def counters(self) -> tuple[PortCounters, ...]:
        """Counters of every port that has some."""
        return tuple(
            counters
            for adapter in self._adapters()
            for number in _port_numbers(adapter)
            if (counters := self._counters.read(adapter, number)) is not None
        )

    def _adapters(self) -> list[str]:
        root = f"{self._sysfs}/class/infiniband"
        return [f"{root}/{name}" for name in sorted(names_in(root))]

    def _hca(self, path: str) -> Hca:
        device = f"{path}/device"
        return Hca(
            name=path.rpartition("/")[2],
            node_guid=_guid(read_text(f"{path}/node_guid")) or UNKNOWN_GUID,
            system_image_guid=_guid(read_text(f"{path}/sys_image_guid")),
            pci_address=real_path(device).rpartition("/")[2],
            pci_path=pci_path(device),
            numa_node=numa_node(device),
            firmware=_word(f"{path}/fw_ver"),
            hca_type=_word(f"{path}/hca_type"),
            board_id=_word(f"{path}/board_id"),
            bonded=self._is_bonded(path),
            ports=tuple(_port(path, number) for number in _port_numbers(path)),
        )

    def _is_bonded(self, path: str) -> bool:
        """Whether the kernel has joined its ports: by its name, or by its network device."""
        if BOND_NAME in path.rpartition("/")[2]:
            return True
        # Only the first: entries that are not used answer EINVAL.
        netdev = _word(f"{path}/ports/1/gid_attrs/ndevs/0")
        return bool(netdev) and (self._sysfs / "class" / "net" / netdev / "bonding").is_dir()


def _port_numbers(adapter: str) -> list[int]:
    return sorted(int(name) for name in names_in(f"{adapter}/ports") if name.isdecimal())


def _port(adapter: str, number: int) -> HcaPort:
    path = f"{adapter}/ports/{number}"
    rate = RATE.match(read_text(f"{path}/rate"))
    return HcaPort(
        number=number,
        port_guid=_guid(":".join(read_text(f"{path}/gids/0").split(":")[4:])) or UNKNOWN_GUID,
        lid=_lid(f"{path}/lid"),
        sm_lid=_lid(f"{path}/sm_lid"),
        state=_state(f"{path}/state"),
        phys_state=_state(f"{path}/phys_state"),
        rate_mbps=round(float(rate["gbps"]) * 1000) if rate else 0,
        width=int(rate["width"] or 0) if rate else 0,
        speed=(rate["speed"] or "") if rate else "",
        link_layer=_word(f"{path}/link_layer"),
    )


def _state(path: str) -> str:
    """Text of a state, as "ACTIVE" for "4: ACTIVE"."""
    return _printable(read_text(path).partition(":")[2].strip())


def _lid(path: str) -> int:
    lid = read_int(path, unknown=0)
    # What is above is no address of a port.
    return lid if 0 <= lid < 0xC000 else 0


def _word(path: str) -> str:
    return _printable(read_text(path))


def _printable(text: str) -> str:
    # An adapter with odd bytes in a name must not cost its node the connection.
    return "".join(char if char.isprintable() else "?" for char in text[:253])


def _guid(text: str) -> str:
    digits = text.replace(":", "").removeprefix("0x").lower()
    return digits if GUID.fullmatch(digits) else ""
