"""Words for counts, in what people read."""


def counted(count: int, noun: str) -> str:
    """A count with its noun, as "1 GPU" or "2 GPUs"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counted_are(count: int, noun: str) -> str:
    """The same with the verb that follows, as "1 GPU is" or "2 GPUs are"."""
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'}"
