"""The documents say what is so: settings are current, links lead somewhere, commands exist."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gpupool.cli.main import cli as gpupool_cli
from gpupool_agent.helper.settings import HelperSettings
from gpupool_agent.settings import AgentSettings
from gpupool_allocator.settings import AllocatorSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\[[^\]]+\]\(([^)#]+?)(?:#[^)]*)?\)")
FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages(*, handwritten: bool = False) -> list[Path]:
    return [page for page in PAGES if not (handwritten and page.name == "cli.md")]


def commands_shown() -> list[tuple[Path, list[str]]]:
    """Words of every line of a code block that calls one of our programs."""
    found: list[tuple[Path, list[str]]] = []
    for page in pages(handwritten=True):
        for block in FENCED.findall(page.read_text()):
            for line in block.splitlines():
                words = line.strip().removeprefix("$ ").split()
                if words and words[0] in ("gpupool", "scripts/test", "scripts/demo"):
                    found.append((page, words))
    return found


def test_the_settings_page_is_what_the_settings_classes_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "settings_reference.py"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert (ROOT / "docs" / "settings.md").read_text() == done.stdout, (
        "run: python scripts/settings_reference.py > docs/settings.md"
    )


@pytest.mark.parametrize(
    ("settings", "example"),
    [
        (AllocatorSettings, "allocator.toml"),
        (AgentSettings, "agent.toml"),
        (HelperSettings, "helper.toml"),
    ],
)
def test_every_setting_is_explained_and_stands_in_the_example_file(
    settings: type, example: str
) -> None:
    text = (ROOT / "systemd" / example).read_text()
    for field in dataclasses.fields(settings):
        assert field.metadata.get("text") or field.metadata["meaning"], field.name
        # A key, or a table for those that are one.
        assert re.search(rf"^#? ?({field.name} =|\[{field.name}\])", text, re.MULTILINE), field.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_command_and_flag_shown_exists() -> None:
    wrong: list[str] = []
    for page, words in commands_shown():
        if words[0] != "gpupool":
            continue
        command: click.Command = gpupool_cli
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            rest = rest[2:]
        while rest and isinstance(command, click.Group):
            found = command.commands.get(rest[0])
            if found is None:
                break
            command, rest = found, rest[1:]
        known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
        if isinstance(command, click.Group):
            wrong.append(f"{page.name}: {' '.join(words)}: no such command")
        own = rest[: rest.index("--")] if "--" in rest else rest
        flags = [word.split("=")[0] for word in own if word.startswith("--")]
        wrong += [f"{page.name}: {' '.join(words)}: {flag}" for flag in flags if flag not in known]
    assert wrong == []


def test_decisions_are_numbered_once_and_open_with_their_number() -> None:
    numbers: list[int] = []
    for page in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        number = int(page.name.split("-", 1)[0])
        assert page.read_text().startswith(f"# {number}. "), page.name
        numbers.append(number)
    assert numbers == list(range(1, len(numbers) + 1))
