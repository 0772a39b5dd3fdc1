"""Which ports of a node carry its jobs' traffic: which are healthy, near, on which rail.

A port is of the compute fabric when it is the nearest to some GPU: storage and
management adapters never are where the compute adapters are nearer. Where a host has
InfiniBand, its Ethernet adapters are for storage and management.

Rails are numbered by position, in the order of the slots: hosts that are built alike
number them alike, whatever their adapters are called at this boot.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpupool.model.inventory import Device, Hca, HcaPort
from gpupool.model.locality import distance

INFINIBAND = "InfiniBand"
FULL_WIDTH = 4
"""Lanes of an InfiniBand port; a split one has two, and one lane is a broken cable."""

RAILS_MAX = 256

Slot = tuple[str, int]
"""Slot and port number of a port."""


def usable(port: HcaPort) -> bool:
    """Whether traffic can pass. Without a subnet manager InfiniBand passes nothing."""
    up = port.state == "ACTIVE" and port.phys_state in ("LinkUp", "")
    return up and (port.link_layer != INFINIBAND or bool(port.lid and port.sm_lid))


def compute_hcas(hcas: Sequence[Hca], devices: Sequence[Device]) -> list[Hca]:
    """Adapters of the compute fabric, healthy or not."""
    fabric = [hca for hca in hcas if any(port.link_layer == INFINIBAND for port in hca.ports)]
    fabric = fabric or [hca for hca in hcas if hca.ports]
    near = {hca.name for device in devices for hca in nearest(fabric, device)}
    return [hca for hca in fabric if hca.name in near]


def nearest(hcas: Sequence[Hca], device: Device) -> list[Hca]:
    """Those of the adapters that are nearest to a device."""
    distances = {hca.name: distance(hca, device) for hca in hcas}
    least = min(distances.values(), default=None)
    return [hca for hca in hcas if distances[hca.name] == least]


class Rails:
    """Numbers rails. A slot keeps its number while its adapter, or its GPU, is away.

    ``rate_mbps`` is what a port of the compute fabric should run at by the operator's
    word; 0: what the fastest port of the same product here does.
    """

    def __init__(self, rate_mbps: int = 0) -> None:
        self._slots: list[Slot] = []
        self._rate_mbps = rate_mbps

    def number(self, hcas: Sequence[Hca], devices: Sequence[Device]) -> tuple[Hca, ...]:
        """The adapters with the rails and the expected rates of their ports."""
        layers = {port.link_layer for hca in hcas for port in hca.ports}
        seen = {
            _slot(hca, port)
            for hca in compute_hcas(hcas, devices)
            for port in hca.ports
            if port.link_layer == INFINIBAND or INFINIBAND not in layers
        }
        slots = sorted(seen.union(self._slots))
        self._slots = slots if len(slots) <= RAILS_MAX else sorted(seen)[:RAILS_MAX]
        rails = {slot: rail for rail, slot in enumerate(self._slots)}
        return tuple(
            replace(
                hca,
                ports=tuple(
                    self._numbered(hca, port, hcas, rails.get(_slot(hca, port)))
                    for port in hca.ports
                ),
            )
            for hca in hcas
        )

    def _numbered(self, hca: Hca, port: HcaPort, hcas: Sequence[Hca], rail: int | None) -> HcaPort:
        told_mbps = 0 if rail is None else self._rate_mbps
        expected_mbps = told_mbps or expected_rate_mbps(hca, port, hcas)
        return replace(port, rail=rail, expected_rate_mbps=expected_mbps)


def _slot(hca: Hca, port: HcaPort) -> Slot:
    return hca.pci_address or hca.name, port.number


def expected_rate_mbps(hca: Hca, port: HcaPort, hcas: Sequence[Hca]) -> int:
    """What a port should run at: what the fastest port of the same product here does.

    An InfiniBand port of a single lane has lost others of its cable. 0: not known.
    """
    rates = [
        _full_rate_mbps(other)
        for peer in hcas
        if _product(peer) == _product(hca)
        for other in peer.ports
        if other.link_layer == port.link_layer and other.state == "ACTIVE"
    ]
    return max(rates, default=0)


def _full_rate_mbps(port: HcaPort) -> int:
    if port.link_layer == INFINIBAND and port.width == 1:
        return port.rate_mbps * FULL_WIDTH
    return port.rate_mbps


def _product(hca: Hca) -> tuple[str, str]:
    return hca.hca_type, hca.board_id
