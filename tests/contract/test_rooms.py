"""Rules of the layout that the import linter cannot express."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("client", "agent", "allocator")
LINES_MAX = 500
VAGUE_NAMES = {"utils", "util", "common", "helpers", "manager", "managers", "misc"}
GENERATED = Path("client/gpupool/v1")
TEXT = {".py", ".pyi", ".proto", ".toml", ".md", ".service", ".svg", ".yaml", ""}


def files(*suffixes: str) -> Iterator[Path]:
    """Every file of the tree that git does not ignore, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    # An exported tree has no git folder; everything in the rooms counts then.
    names = (
        listing.stdout.split("\0")
        if listing.returncode == 0
        else [
            str(p.relative_to(ROOT))
            for room in (*ROOMS, "protos", "scripts", "docs", "tests", "systemd")
            for p in (ROOT / room).rglob("*")
            if "__pycache__" not in p.parts
        ]
    )
    for name in sorted(filter(None, names)):
        path = Path(name)
        if (not suffixes or path.suffix in suffixes) and (ROOT / path).is_file():
            yield path


def handwritten() -> Iterator[Path]:
    return (path for path in files(".py") if GENERATED not in path.parents)


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    vague = [str(p) for p in files() if {part.split(".")[0] for part in p.parts} & VAGUE_NAMES]
    assert vague == []


def test_no_handwritten_file_is_longer_than_500_lines() -> None:
    lengths = {str(p): len((ROOT / p).read_text().splitlines()) for p in handwritten()}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_only_the_simulation_and_its_tests_name_the_simulation() -> None:
    """Importing it inside a function or by name would pass the import linter."""
    guilty = [
        str(path)
        for path in handwritten()
        if path.parts[0] in ROOMS
        and "simulated" not in path.parts
        and "gpupool_agent.simulated" in (ROOT / path).read_text()
    ]
    assert guilty == []


def test_every_ignore_comment_names_its_rule_and_in_the_product_its_reason() -> None:
    bare: list[str] = []
    # The rule's code (ruff) or its name in brackets (type checkers), then the reason.
    ruled = re.compile(r"#\s*(noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*|(type|pyright): ?ignore\[[\w, -]+\])")
    ignoring = re.compile(r"#\s*(noqa|type: ?ignore|pyright: ?ignore)")
    for path in handwritten():
        tokens = tokenize.generate_tokens(io.StringIO((ROOT / path).read_text()).readline)
        for token in tokens:
            if token.type != tokenize.COMMENT or not ignoring.search(token.string):
                continue
            rule = ruled.search(token.string)
            reason = rule is not None and token.string[rule.end() :].strip()
            if rule is None or not (reason or path.parts[0] == "tests"):
                bare.append(f"{path}:{token.start[0]}: {token.string}")
    assert bare == []


def test_no_failure_is_swallowed() -> None:
    """``except Exception: pass`` hides the one error that would have explained an outage."""
    swallowed: list[str] = []
    for path in handwritten():
        if path.parts[0] not in (*ROOMS, "scripts"):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ExceptHandler):
                names = {n.id for n in ast.walk(node.type or node) if isinstance(n, ast.Name)}
                broad = node.type is None or names & {"Exception", "BaseException"}
                if broad and all(isinstance(line, ast.Pass) for line in node.body):
                    swallowed.append(f"{path}:{node.lineno}")
    assert swallowed == []


def test_nothing_is_left_for_later() -> None:
    """The pattern is put together here so that this file does not match itself."""
    later = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X:"]))
    unfinished = [
        f"{path}:{number}"
        for path in files(*TEXT)
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1)
        if later.search(line)
    ]
    assert unfinished == []


def test_every_room_is_typed_for_its_users() -> None:
    for room in ("client/gpupool", "agent/gpupool_agent", "allocator/gpupool_allocator"):
        assert (ROOT / room / "py.typed").is_file(), room
