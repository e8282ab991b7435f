"""Tables and text on standard output."""

from __future__ import annotations

from rich.console import Console

WIDE = 170  # columns, where the output goes to a file or a pipe


def console() -> Console:
    """A terminal as wide as it is; a file or a pipe wide enough for every table."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDE)


def plain(text: str) -> str:
    r"""Square brackets are mathematics here, not markup.

    >>> plain("[x]")
    '\\[x]'
    """
    return text.replace("[", r"\[")
