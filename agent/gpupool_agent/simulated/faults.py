"""What can happen to a simulated node while it runs, by name."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpupool.model.inventory import FABRIC_STATES
from gpupool_agent.simulated.node import FalseReadings
from gpupool_agent.simulated.sysfs import set_port

if TYPE_CHECKING:
    from gpupool_agent.simulated.host import SimulatedHost


_CODE_MAX = 999
_BYTES_MAX = 2**64 - 1


class ActionError(ValueError):
    """An action that is not known, or has wrong arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that can happen. ``parameters`` are names for people, in order."""

    parameters: tuple[str, ...]
    help: str
    run: "Callable[..., Awaitable[Any]]"


async def apply(host: "SimulatedHost", name: str, arguments: list[str]) -> Any:
    """Let it happen; returns what there is to tell. Raises ValueError when it cannot."""
    action = ACTIONS.get(name)
    if action is None:
        raise ActionError(f"action {name!r} is not one of {', '.join(sorted(ACTIONS))}")
    if len(arguments) != len(action.parameters):
        usage = " ".join((name, *action.parameters))
        raise ActionError(f"{name} has {len(arguments)} arguments; accepted is: {usage}")
    return await action.run(host, *arguments)


async def _show(host: "SimulatedHost") -> Any:
    return host.show()


async def _assignments(host: "SimulatedHost") -> Any:
    return host.assignments()


async def _gpu_lost(host: "SimulatedHost", gpu: str) -> str:
    found = host.node.find_gpu(gpu)
    host.node.set_lost(found, lost=True)
    return found.uuid


async def _gpu_back(host: "SimulatedHost", gpu: str) -> str:
    found = host.node.find_gpu(gpu)
    host.node.set_lost(found, lost=False)
    return found.uuid


async def _gpu_pull(host: "SimulatedHost", gpu: str) -> str:
    found = host.node.find_gpu(gpu)
    host.node.remove_gpu(found)
    return found.slot.pci_address


async def _gpu_add(host: "SimulatedHost", slot: str) -> str:
    return host.node.add_gpu(slot).uuid


async def _gpu_hide(host: "SimulatedHost", gpu: str) -> str:
    found = host.node.find_gpu(gpu)
    host.node.set_hidden(found, hidden=True)
    return found.uuid


async def _gpu_unhide(host: "SimulatedHost", gpu: str) -> str:
    found = host.node.find_gpu(gpu)
    host.node.set_hidden(found, hidden=False)
    return found.uuid


async def _memory_reads(host: "SimulatedHost", gpu: str, used: str, total: str) -> str:
    found = host.node.find_gpu(gpu)
    told = FalseReadings(used_bytes=_bytes("USED", used), total_bytes=_bytes("TOTAL", total))
    host.node.set_false(found, told)
    return found.uuid


def _bytes(name: str, text: str) -> int | None:
    """Bytes that a driver may tell; None for the truth."""
    if text == "truth":
        return None
    if not text.isdecimal() or int(text) > _BYTES_MAX:
        raise ActionError(f"{name} is {text!r}; accepted are 0 to {_BYTES_MAX} and truth")
    return int(text)


async def _nvlinks(host: "SimulatedHost", gpu: str, links: str) -> None:
    highest = host.node.machine.gpu.nvlinks
    if not links.isdecimal() or int(links) > highest:
        raise ActionError(f"LINKS is {links!r}; accepted are 0 to {highest}")
    host.node.find_gpu(gpu).active_links = int(links)


async def _fabric(host: "SimulatedHost", state: str, status: str) -> None:
    if state not in FABRIC_STATES:
        raise ActionError(f"STATE is {state!r}; accepted are {', '.join(FABRIC_STATES)}")
    if not status.isdecimal() or int(status) > _CODE_MAX:
        raise ActionError(f"STATUS is {status!r}; accepted are 0 to {_CODE_MAX}")
    host.node.fabric_state, host.node.fabric_status = state, int(status)


async def _nvml_hang(host: "SimulatedHost") -> None:
    host.node.answering.clear()


async def _nvml_resume(host: "SimulatedHost") -> None:
    host.node.answering.set()


async def _driver_unload(host: "SimulatedHost") -> None:
    host.node.unload_driver()


async def _driver_load(host: "SimulatedHost") -> None:
    host.node.load_driver()


async def _hca_down(host: "SimulatedHost", hca: str) -> None:
    set_port(host.node, hca, up=False)


async def _hca_up(host: "SimulatedHost", hca: str) -> None:
    set_port(host.node, hca, up=True)


async def _stray(host: "SimulatedHost", gpu: str, mib: str) -> int:
    if not mib.isdecimal() or int(mib) < 1:
        raise ActionError(f"MIB is {mib!r}; accepted are 1 and more")
    return await host.strays.start(host.node.find_gpu(gpu).uuid, int(mib))


async def _clear_stray(host: "SimulatedHost") -> int:
    return await host.strays.clear()


async def _cut_off(host: "SimulatedHost") -> None:
    host.cut_off()


async def _reconnect(host: "SimulatedHost") -> None:
    host.reconnect()


async def _restart_agent(host: "SimulatedHost") -> None:
    await host.restart_agent()


async def _reboot(host: "SimulatedHost") -> str:
    return await host.reboot()


ACTIONS = {
    "show": Action(parameters=(), help="print what the node has now", run=_show),
    "assignments": Action(parameters=(), help="print what its agent runs", run=_assignments),
    "gpu-lost": Action(parameters=("GPU",), help="it falls off the bus", run=_gpu_lost),
    "gpu-back": Action(parameters=("GPU",), help="a lost one answers again", run=_gpu_back),
    "gpu-pull": Action(parameters=("GPU",), help="it is taken out", run=_gpu_pull),
    "gpu-add": Action(parameters=("SLOT",), help="a new one in a free slot", run=_gpu_add),
    "gpu-hide": Action(parameters=("GPU",), help="the driver lists it no more", run=_gpu_hide),
    "gpu-unhide": Action(parameters=("GPU",), help="the driver lists it again", run=_gpu_unhide),
    "memory-reads": Action(
        parameters=("GPU", "USED", "TOTAL"),
        help="the driver tells so many bytes of its memory, or the truth",
        run=_memory_reads,
    ),
    "nvlinks": Action(parameters=("GPU", "LINKS"), help="so many NVLinks are up", run=_nvlinks),
    "fabric": Action(
        parameters=("STATE", "STATUS"),
        help="its NVLink fabric is so, STATUS a return code of NVML, 0: success",
        run=_fabric,
    ),
    "nvml-hang": Action(parameters=(), help="driver calls block", run=_nvml_hang),
    "nvml-resume": Action(parameters=(), help="they go on", run=_nvml_resume),
    "driver-unload": Action(parameters=(), help="the driver has no devices", run=_driver_unload),
    "driver-load": Action(parameters=(), help="it has them again", run=_driver_load),
    "hca-down": Action(parameters=("HCA",), help="its cable is out", run=_hca_down),
    "hca-up": Action(parameters=("HCA",), help="its cable is in", run=_hca_up),
    "stray": Action(
        parameters=("GPU", "MIB"), help="a process of no lease holds memory", run=_stray
    ),
    "clear-stray": Action(parameters=(), help="all such processes end", run=_clear_stray),
    "cut-off": Action(parameters=(), help="no way to the allocator", run=_cut_off),
    "reconnect": Action(parameters=(), help="the way is there again", run=_reconnect),
    "restart-agent": Action(parameters=(), help="stop the agent, start it", run=_restart_agent),
    "reboot": Action(
        parameters=(), help="end every process, new boot id, start the agent", run=_reboot
    ),
}
"""Every action by its name on the command line."""
