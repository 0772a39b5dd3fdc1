"""The agent's client against the real helper, and an agent without one."""

import asyncio
import inspect
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.helper.running import Helper, running, sleeping, until

from gpupool.model.ids import DeviceUuid, LeaseId
from gpupool_agent.devices.helper_client import RETRY_S, WITHOUT, HelperClient, NoHelper
from gpupool_agent.devices.privileged import (
    ComputeMode,
    MpsSlot,
    NotPermittedError,
    Privileged,
    PrivilegedError,
    ProbeRequest,
)
from gpupool_agent.helper.checks import ACTIONS

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be the helper")
SLOT = "0123abcd"
UID = 65534
GPU = DeviceUuid("GPU-01234567-89ab-cdef-0123-456789abcdef")


@pytest.fixture
def helper() -> Iterator[Helper]:
    with running(probe_program="sh,-c,id -u; echo oops >&2; exit 3") as started:
        yield started


@pytest.fixture
async def client(helper: Helper) -> AsyncIterator[HelperClient]:
    made = HelperClient(helper.socket)
    yield made
    await made.close()


def slot_of(helper: Helper) -> MpsSlot:
    return MpsSlot(name=SLOT, gpu=DeviceUuid(helper.gpus[0]), uid=UID)


@needs_root
async def test_the_whole_list_goes_through_to_the_helper(
    helper: Helper, client: HelperClient
) -> None:
    privileged: Privileged = client
    gpu = DeviceUuid(helper.gpus[0])
    await privileged.set_compute_mode(gpu, ComputeMode.EXCLUSIVE_PROCESS)
    facts = await privileged.start_mps(slot_of(helper))
    assert facts.pipe_directory == str(helper.folder / "mps" / SLOT / "pipe")
    assert await privileged.mps_daemon(SLOT) == facts
    said = await privileged.mps_commands(SLOT, ("get_server_list", "ps"))
    assert (said.exit_code, len(said.output.splitlines())) == (0, 2)
    probed = await privileged.probe(ProbeRequest(slot=SLOT, uid=UID))
    assert (probed.exit_code, probed.output, probed.errors) == (3, f"{UID}\n", "oops\n")
    await privileged.stop_mps(SLOT)
    assert await privileged.mps_daemon(SLOT) is None
    with sleeping(GPUPOOL_LEASE_ID="l-1") as process:
        ticks = helper.list_on_gpu(process.pid, gpu)
        assert await privileged.lease_of(gpu, process.pid, ticks) == "l-1"
        await privileged.end_process(gpu, process.pid, ticks, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
    spec = json.dumps({"cdiVersion": "0.6.0", "kind": "gpupool.dev/lease"}).encode()
    await privileged.write_cdi(LeaseId("l-1"), spec)
    assert await privileged.cdi_leases() == ("l-1",)
    await privileged.remove_cdi(LeaseId("l-1"))
    await privileged.rescan_pci()
    with pytest.raises(PrivilegedError, match="nvidia-smi"):
        await privileged.reset_gpu(gpu)
    assert {line["action"] for line in helper.audit()} == set(ACTIONS)


@needs_root
async def test_a_refusal_and_a_failure_are_told_apart(helper: Helper, client: HelperClient) -> None:
    with pytest.raises(NotPermittedError, match="the driver lists no"):
        await client.set_compute_mode(GPU, ComputeMode.DEFAULT)
    with pytest.raises(PrivilegedError, match="has no MPS daemon"):
        await client.mps_commands(SLOT, ("ps",))
    with pytest.raises(NotPermittedError, match="at most"):
        await client.write_cdi(LeaseId("l-1"), b'"' * 200_000)
    with pytest.raises(NotPermittedError, match="UTF-8"):
        await client.write_cdi(LeaseId("l-1"), b"\xff")


@needs_root
async def test_a_slow_action_holds_up_no_other(helper: Helper, client: HelperClient) -> None:
    slow = helper.control.parent / "slow"
    slow.touch()
    starting = asyncio.create_task(client.start_mps(slot_of(helper)))
    pid_file = helper.folder / "run" / f"mps-{SLOT}.pid"
    await asyncio.to_thread(until, pid_file.exists, "the slow start")
    await client.set_compute_mode(DeviceUuid(helper.gpus[1]), ComputeMode.DEFAULT)
    assert not starting.done()
    slow.unlink()
    await starting
    await client.stop_mps(SLOT)


@needs_root
async def test_a_helper_that_is_started_anew_is_asked_again(
    helper: Helper, client: HelperClient
) -> None:
    await client.cdi_leases()
    for number in (signal.SIGTERM, signal.SIGKILL):
        await asyncio.to_thread(helper.stop, number)
        again = asyncio.create_task(client.cdi_leases())
        await asyncio.to_thread(helper.start)
        assert await again == ()


@needs_root
async def test_a_helper_that_stays_away_is_named_with_what_is_not_done(
    helper: Helper, client: HelperClient
) -> None:
    await client.cdi_leases()
    await asyncio.to_thread(helper.stop)
    with pytest.raises(NotPermittedError, match=r"no root helper answers at .* cannot reset GPUs"):
        await client.reset_gpu(GPU)
    # Waited for once: whoever asks now is told at once.
    async with asyncio.timeout(RETRY_S / 2):
        with pytest.raises(NotPermittedError, match="no root helper answers"):
            await client.reset_gpu(GPU)


@needs_root
async def test_many_at_once_get_their_own_answers(helper: Helper, client: HelperClient) -> None:
    known = [DeviceUuid(each) for each in helper.gpus] * 8
    found = await asyncio.gather(
        *(client.set_compute_mode(gpu, ComputeMode.DEFAULT) for gpu in known),
        *(client.set_compute_mode(GPU, ComputeMode.DEFAULT) for _ in range(10)),
        return_exceptions=True,
    )
    assert found[: len(known)] == [None] * len(known)
    assert all(isinstance(each, NotPermittedError) for each in found[len(known) :])


async def test_a_helper_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = HelperClient(tmp_path / "s", deadline_s=0.2)
        with pytest.raises(PrivilegedError, match=r"has not answered for 0\.2 s"):
            await client.cdi_leases()
        await client.close()


async def test_nonsense_from_the_other_end_ends_the_connection(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client = HelperClient(tmp_path / "s")
        asking = asyncio.create_task(client.cdi_leases())
        for _ in range(2):
            channel, _ = await asyncio.to_thread(listener.accept)
            with channel:
                await asyncio.to_thread(channel.recv, 1000)
                channel.send(b"\xff")
        with pytest.raises(PrivilegedError, match="lost"):
            await asking
        await client.close()


ARGUMENTS: dict[str, Any] = {
    "gpu": GPU,
    "mode": ComputeMode.DEFAULT,
    "slot": SLOT,
    "lines": ("ps",),
    "request": ProbeRequest(slot=SLOT, uid=UID),
    "pid": 2,
    "start_ticks": 1,
    "number": 15,
    "lease_id": LeaseId("l-1"),
    "spec": b"{}",
}


@pytest.mark.parametrize("action", sorted(ACTIONS))
async def test_without_a_helper_each_action_says_what_is_not_done_and_what_to_do(
    action: str,
) -> None:
    method = getattr(NoHelper(), action)
    arguments = [ARGUMENTS[name] for name in inspect.signature(method).parameters]
    with pytest.raises(NotPermittedError) as refused:
        await method(*arguments)
    assert WITHOUT[action] in str(refused.value)
    assert "gpupool-helper.service" in str(refused.value)
