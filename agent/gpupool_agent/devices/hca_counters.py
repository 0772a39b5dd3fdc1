"""Counters of the ports of network adapters.

Some functions refuse to be asked (EINVAL), and each refused reading writes a line into
the kernel's log: a file that has refused once is not read again until its adapter is
another one. Values may be text, and whole folders may be missing.
"""

import errno

from gpupool_agent.core.readings import PortCounters
from gpupool_agent.devices.sysfs import names_in, read_file

WORD_BYTES = 4
"""InfiniBand counts data in words of four bytes; so do the files of RoCE ports."""

DATA = {"port_xmit_data": "port_xmit_bytes", "port_rcv_data": "port_rcv_bytes"}
"""Counters of words, and their names once they are bytes."""

SATURATION = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "port_rcv_switch_relay_errors": 0xFFFF,
    "port_xmit_discards": 0xFFFF,
    "port_xmit_constraint_errors": 0xFF,
    "port_rcv_constraint_errors": 0xFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
    "VL15_dropped": 0xFFFF,
}
"""Counters that stop at their greatest value: there it only means "at least so many"."""

COUNTERS = (
    *DATA,
    "port_xmit_packets",
    "port_rcv_packets",
    "port_xmit_wait",
    *SATURATION,
)
HW_COUNTERS = (
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "duplicate_request",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
    "req_cqe_error",
    "resp_cqe_error",
    "req_cqe_flush_error",
    "resp_cqe_flush_error",
    "roce_adp_retrans",
    "roce_slow_restart",
)
"""``lifespan`` beside them is no counter but a time in milliseconds."""

FOLDERS = (("counters", COUNTERS), ("hw_counters", HW_COUNTERS))


class CounterReader:
    """Reads counters; remembers by adapter which files refuse."""

    def __init__(self) -> None:
        self._guids: dict[str, str] = {}
        self._refused: dict[str, set[str]] = {}

    def keep(self, guids: dict[str, str]) -> None:
        """Forget what refused of adapters that are gone, or others by now; GUIDs by name."""
        self._refused = {
            name: paths
            for name, paths in self._refused.items()
            if name in guids and guids[name] == self._guids.get(name)
        }
        self._guids = guids

    def read(self, adapter: str, port: int) -> PortCounters | None:
        """Counters of one port; None where it has none that can be read."""
        hca = adapter.rpartition("/")[2]
        values: dict[str, int] = {}
        saturated: list[str] = []
        for folder, names in FOLDERS:
            path = f"{adapter}/ports/{port}/{folder}"
            there = names_in(path)
            for name in [name for name in names if name in there]:
                value = self._value(hca, f"{path}/{name}")
                if value is None:
                    continue
                if name in DATA:
                    values[DATA[name]] = value * WORD_BYTES
                    continue
                values[name] = value
                if value == SATURATION.get(name):
                    saturated.append(name)
        if not values:
            return None
        return PortCounters(hca=hca, port=port, values=values, saturated=frozenset(saturated))

    def _value(self, hca: str, path: str) -> int | None:
        if path in self._refused.get(hca, ()):
            return None
        try:
            text = read_file(path)
        except OSError as error:
            if error.errno == errno.EINVAL:
                self._refused.setdefault(hca, set()).add(path)
            return None
        # "N/A (no PMA)" and the like are no numbers.
        return int(text) if text.isdecimal() else None
