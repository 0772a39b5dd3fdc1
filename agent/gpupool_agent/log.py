"""The log: one event with fields a line; JSON unless someone watches a terminal."""

import sys
from typing import Any

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""Levels that can be set, by how severe they are."""

_least = {"level": LEVELS["info"]}


def set_level(level: str) -> None:
    """Drop what is less severe, from now on, also in loggers that exist already."""
    _least["level"] = LEVELS[level]


def _filter(_logger: Any, method: str, event: Any) -> Any:
    if LEVELS.get(method, LEVELS["error"]) < _least["level"]:
        raise structlog.DropEvent
    return event


def configure_log() -> None:
    """Set up structlog for this process, onto standard error."""
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            _filter,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
