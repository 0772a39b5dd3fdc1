"""/healthz, /readyz and /metrics.

/healthz answers while the process and its event loop live: restart it when not.
/readyz answers 200 while changes are taken: send it no new work when not.
"""

import asyncio
import socket

from aiohttp import web

from gpupool.model.views import PoolSummary
from gpupool_allocator.engine import Engine, RefusedError
from gpupool_allocator.metrics import Metrics
from gpupool_allocator.settings import Address
from gpupool_allocator.telemetry import TelemetryBook

ANSWER_S = 2.0
"""Longest wait for the engine: a probe must be told, not hang."""

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpServer:
    """The HTTP endpoints; ``port`` is the real one once started."""

    def __init__(self, engine: Engine, metrics: Metrics, telemetry: TelemetryBook) -> None:
        self.port = 0
        self._engine = engine
        self._metrics = metrics
        self._telemetry = telemetry
        self._stopping = False
        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._serve_metrics),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)

    async def start(self, address: Address) -> None:
        """Listens. OSError when it cannot."""
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family)
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    def begin_stop(self) -> None:
        """Says not ready from now on, so that nobody sends new work."""
        self._stopping = True

    async def stop(self) -> None:
        """Stops listening."""
        await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        reason = "the allocator is stopping" if self._stopping else await self._unready_reason()
        if reason:
            return web.json_response({"ready": False, "reason": reason}, status=503)
        return web.json_response({"ready": True, "epoch": self._engine.epoch})

    async def _unready_reason(self) -> str:
        try:
            return (await self._summary()).read_only_reason
        except RefusedError as error:
            return error.refused.message
        except TimeoutError:
            return f"the engine has not answered for {ANSWER_S:g} s"

    async def _serve_metrics(self, _request: web.Request) -> web.Response:
        try:
            summary = await self._summary()
        except RefusedError as error:
            return web.Response(status=503, text=error.refused.message)
        except TimeoutError:
            return web.Response(status=503, text="the engine does not answer")
        text = self._metrics.render(summary, self._telemetry.totals())
        return web.Response(body=text, headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _summary(self) -> PoolSummary:
        async with asyncio.timeout(ANSWER_S):
            return await self._engine.read(lambda pool: pool.summary())
