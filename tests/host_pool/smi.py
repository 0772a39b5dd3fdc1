"""Reading ``nvidia-smi -q -x``, which is what our own readings are held against."""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiGpu:
    """A GPU as nvidia-smi tells it. Memory in MiB, None where it says N/A."""

    uuid: str
    name: str
    pci_address: str
    serial: str
    memory_total_mib: int | None
    memory_reserved_mib: int
    compute_mode: str
    mig_enabled: bool
    mig_instances: int
    pids: frozenset[int]


def read_smi(text: str) -> list[SmiGpu]:
    """Every GPU of the listing, in its order."""
    # From the driver's own program, or from recordings of it.
    root = ET.fromstring(text)  # noqa: S314
    return [_gpu(each) for each in root.findall("gpu")]


def driver_version(text: str) -> str:
    return ET.fromstring(text).findtext("driver_version", "")  # noqa: S314


def _gpu(gpu: ET.Element) -> SmiGpu:
    return SmiGpu(
        uuid=_text(gpu, "uuid"),
        name=_text(gpu, "product_name"),
        pci_address=_pci(gpu.get("id", "")),
        serial=_text(gpu, "serial"),
        memory_total_mib=_mib(_text(gpu, "fb_memory_usage/total")),
        memory_reserved_mib=_mib(_text(gpu, "fb_memory_usage/reserved")) or 0,
        compute_mode=_text(gpu, "compute_mode").lower(),
        mig_enabled=_text(gpu, "mig_mode/current_mig") == "Enabled",
        mig_instances=len(gpu.findall("mig_devices/mig_device")),
        pids=frozenset(
            int(_text(each, "pid"))
            for each in gpu.findall("processes/process_info")
            if _computes(each)
        ),
    )


def _computes(process: ET.Element) -> bool:
    """Whether it is on the GPU to compute, also through MPS ("M+C"), and not only to draw."""
    return "C" in (process.findtext("type") or "C")


def _text(gpu: ET.Element, path: str) -> str:
    return (gpu.findtext(path) or "").strip()


def _mib(text: str) -> int | None:
    found = re.fullmatch(r"(\d+) MiB", text)
    return int(found[1]) if found else None


def _pci(bus_id: str) -> str:
    """As sysfs writes it: four digits of domain, lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
