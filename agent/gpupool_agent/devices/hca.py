"""Network adapters, read from /sys/class/infiniband (InfiniBand and RoCE alike)."""

from pathlib import Path

from gpupool.model.inventory import Hca, HcaPort
from gpupool_agent.devices.sysfs import read_int, read_text


class SysfsHcaReader:
    """``HcaReader`` over a sysfs tree; ``sysfs`` is where /sys is."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._root = sysfs / "class" / "infiniband"

    def read(self) -> tuple[Hca, ...]:
        """Every adapter, by name; none where the host has no such class."""
        if not self._root.is_dir():
            return ()
        return tuple(_hca(path) for path in sorted(self._root.iterdir()))


def _hca(path: Path) -> Hca:
    device = path / "device"
    ports = path / "ports"
    numbers = [int(each.name) for each in ports.iterdir()] if ports.is_dir() else []
    return Hca(
        name=path.name,
        node_guid=_guid(read_text(path / "node_guid")),
        pci_address=_pci_address(device),
        numa_node=read_int(device / "numa_node", unknown=-1),
        ports=tuple(_port(ports / str(number), number) for number in sorted(numbers)),
    )


def _pci_address(device: Path) -> str:
    """Where the link to the PCI device leads; its name is the address."""
    try:
        return device.readlink().name
    except OSError:
        return ""


def _port(path: Path, number: int) -> HcaPort:
    # "4: ACTIVE", "400 Gb/sec (4X NDR)".
    state = read_text(path / "state").partition(":")[2].strip()
    return HcaPort(
        number=number,
        port_guid=_guid(":".join(read_text(path / "gids" / "0").split(":")[4:])),
        lid=read_int(path / "lid", unknown=0),
        sm_lid=read_int(path / "sm_lid", unknown=0),
        state=state,
        rate_mbps=_rate_mbps(read_text(path / "rate")),
        link_layer=read_text(path / "link_layer"),
    )


def _rate_mbps(text: str) -> int:
    try:
        return round(float(text.partition(" ")[0]) * 1000)
    except ValueError:
        return 0


def _guid(text: str) -> str:
    return text.replace(":", "").removeprefix("0x")
