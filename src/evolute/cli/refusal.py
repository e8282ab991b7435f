"""What the command cannot do, as one sentence."""

from __future__ import annotations

import re
from typing import NoReturn

from typer.exceptions import TyperException

from evolute.errors import EvoluteError

LONGEST = 400  # characters


class Refusal(EvoluteError):
    """What was asked cannot be done; nothing has been written."""


def refuse(why: str) -> NoReturn:
    raise Refusal(why)


def sentence(error: EvoluteError | TyperException) -> str:
    r"""On one line; an example of code that follows after an empty line is for those who write code.

    >>> sentence(Refusal("There is nothing\nto do.\n\n    ev.Loss(...)"))
    'There is nothing to do.'
    >>> sentence(Refusal("Nothing to do?"))
    'Nothing to do?'
    """
    told = error.format_message() if isinstance(error, TyperException) else str(error)
    told = " ".join(told.partition("\n\n")[0].split()).rstrip(".:")
    return told if told.endswith("?") else f"{told}."


def first_sentence(error: BaseException) -> str:
    r"""What another library says, as the end of a sentence.

    >>> first_sentence(OSError("No such\n file. Try this."))
    'No such file'
    """
    told = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"[.:] ", told + " ", maxsplit=1)[0].strip().rstrip(".:")[:LONGEST]
