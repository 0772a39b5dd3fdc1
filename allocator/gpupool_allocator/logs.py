"""Logs: one event with fields per line, JSON unless a person is looking."""

import logging
import sys

import structlog


def set_up(level: str, form: str) -> None:
    """Sends everything, also what libraries log, to standard error.

    ``form``: "json", "console", or "auto" for console on a terminal and else JSON.
    """
    to_person = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    last: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if to_person
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Drops what is less severe, from now on."""
    logging.getLogger().setLevel(level.upper())


def flush() -> None:
    """Writes out what is buffered: the next thing may be the end of the process."""
    for handler in logging.getLogger().handlers:
        handler.flush()
