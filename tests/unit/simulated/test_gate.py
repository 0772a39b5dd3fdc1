"""The way between a node and its allocator can be cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from gpupool_agent.simulated.gate import Gate, GateAddressError

DEADLINE_S = 10.0


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def connect(gate: Gate) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gate.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the connection is reset or closed before anything comes."""
    try:
        return await asyncio.wait_for(reader.read(1), DEADLINE_S) == b""
    except ConnectionError:
        return True


async def test_it_passes_what_is_sent_both_ways(echo: str) -> None:
    gate = await Gate.open(echo)
    reader, writer = await connect(gate)
    data = bytes(range(256)) * 8192
    writer.write(data)
    assert await asyncio.wait_for(reader.readexactly(len(data)), DEADLINE_S) == data
    writer.close()
    await gate.close()


async def test_cut_it_resets_what_is_open_and_what_comes_until_it_is_mended(echo: str) -> None:
    gate = await Gate.open(echo)
    reader, writer = await connect(gate)
    writer.write(b"x")
    assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"x"
    gate.cut()
    assert await ends(reader)
    writer.close()
    again, writer = await connect(gate)
    assert await ends(again)
    writer.close()
    gate.mend()
    reader, writer = await connect(gate)
    writer.write(b"y")
    assert await asyncio.wait_for(reader.readexactly(1), DEADLINE_S) == b"y"
    writer.close()
    await gate.close()


async def test_with_nobody_behind_it_a_connection_ends(echo: str) -> None:
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    gate = await Gate.open(f"127.0.0.1:{port}")
    reader, writer = await connect(gate)
    assert await ends(reader)
    writer.close()
    await gate.close()


@pytest.mark.parametrize("target", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
async def test_a_target_that_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(GateAddressError, match="is not host:port"):
        await Gate.open(target)
