"""The one error of the door."""

_VALUE_CHARS_MAX = 80


class BadField(ValueError):  # noqa: N818 - named for what it reports, as refusals read
    """A field of a message is outside what is accepted; nothing was changed.

    ``field`` is its path ("spec.groups[0].slice.share_pct"), ``value`` what came
    (shortened, with its ``unit``), ``accepted`` the accepted range in words.
    """

    def __init__(self, field: str, value: object, accepted: str, *, unit: str = "") -> None:
        self.field = field
        self.value = f"{_shown(value)} {unit}" if unit else _shown(value)
        self.accepted = accepted
        super().__init__(f"{field}: {self.value} is not in {accepted}")


def _shown(value: object) -> str:
    # The value may be ten megabytes of somebody's anger: it is cut before it is
    # quoted, and quoted so that control characters do nothing on a terminal.
    if isinstance(value, str):
        return ascii(value if len(value) <= _VALUE_CHARS_MAX else value[:_VALUE_CHARS_MAX] + "...")
    text = str(value)
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "..."
