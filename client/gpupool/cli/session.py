"""What every command shares: where the pool is, and a client of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpupool.client import Client
    from gpupool.sdk.calls import OnOutage

_Command = TypeVar("_Command", bound=Callable[..., Any])

ADDRESS_HELP = (
    'Where the pool is: "host:port", or "unix:/path" of an agent\'s socket.  '
    "[default: $GPUPOOL_ADDRESS, else /run/gpupool/agent.sock if there, else 127.0.0.1:7070]"
)


@dataclass
class Session:
    """One run of the command line."""

    address: str | None = None

    def client(self, on_outage: OnOutage | None = None) -> Client:
        """A client of the pool, for ``with``. Raises InvalidRequestError."""
        from gpupool.client import Client

        return Client(self.address, on_outage=on_outage)


def takes_address(command: _Command) -> _Command:
    """Accepts --address after the command too, where people look for it."""
    return click.option(
        "--address",
        metavar="ADDRESS",
        expose_value=False,
        is_eager=True,
        callback=_remember,
        help=ADDRESS_HELP,
    )(command)


def _remember(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value:
        context.ensure_object(Session).address = value
