"""Texts that are told, so bounded that no tenant's can make a report unacceptable."""

from gpupool.model.limits import NAME_CHARS_MAX

TEXT_CHARS_MAX = 4096
"""Longest reason or evidence that is told; an allocator accepts sixteen times as much."""


def sendable(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """The text cut at ``chars_max`` characters, with what the wire does not carry replaced."""
    if len(text) <= chars_max and text.isascii() and "\0" not in text:
        return text
    cut = text if len(text) <= chars_max else f"{text[: chars_max - 3]}..."
    return cut.replace("\0", " ").encode("utf-8", "replace").decode("utf-8")


def sendable_name(text: str) -> str:
    """The same for what names something."""
    return sendable(text, NAME_CHARS_MAX)
