"""Renders docs/settings.md from the programs' settings classes.

usage: python scripts/settings_reference.py > docs/settings.md
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from gpupool_agent.helper.settings import ENVIRONMENT_PREFIX as HELPER_PREFIX
from gpupool_agent.helper.settings import HelperSettings
from gpupool_agent.settings import ENVIRONMENT_PREFIX as AGENT_PREFIX
from gpupool_agent.settings import AgentSettings
from gpupool_allocator.settings import ENVIRONMENT_PREFIX as ALLOCATOR_PREFIX
from gpupool_allocator.settings import AllocatorSettings

INTRODUCTION = """\
# Settings

Generated from the settings classes by `scripts/settings_reference.py`; a test compares.

A setting comes from the TOML file (`--config FILE`), then from the environment, then from
a flag; the later one wins. A key that does not exist, or a value out of range, stops the
program at its start (exit status 78) with the key, the value and what is accepted. The
flag of a key is the key with dashes: `grain_pct` is `--grain-pct`.

Commented example files: `systemd/allocator.toml`, `systemd/agent.toml` and
`systemd/helper.toml`.
"""


def render() -> str:
    """The whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            *section("gpupool-allocator", ALLOCATOR_PREFIX, AllocatorSettings),
            *section("gpupool-agent", AGENT_PREFIX, AgentSettings),
            *section("gpupool-helper", HELPER_PREFIX, HelperSettings),
        ]
    )


def section(program: str, prefix: str, settings: type) -> list[str]:
    """One program's table."""
    return [
        f"## {program}",
        "",
        f"In the environment: `{prefix}` and the key in capitals.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
        *(
            f"| `{field.name}` | {shown(field)} | {explained(field)} |"
            for field in dataclasses.fields(settings)
        ),
        "",
    ]


def explained(field: dataclasses.Field[object]) -> str:
    """What a setting means and what it accepts."""
    if "text" in field.metadata:
        return str(field.metadata["text"])
    return f"{field.metadata['meaning']} Accepted: {field.metadata['accepted']}."


def shown(field: dataclasses.Field[object]) -> str:
    """A default as it would stand in the file."""
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case int() | float():
            return f"`{value:_}`" if isinstance(value, int) else f"`{value:g}`"
        case None:
            return "unset"
        case Path() | str():
            return f'`"{value}"`' if str(value) else "empty"
        case tuple() | list() | dict():
            return f"`{list(value)}`" if value else "empty"
        case _:
            return f'`"{value}"`'


if __name__ == "__main__":
    sys.stdout.write(render())
