"""Shapes in signatures, checked while the tests run: `--jaxtyping-packages=evolute,typecheck.shapes` in pyproject.toml.

Only functions whose annotations speak of shapes are checked. For the others pyright is the judge, and what a user hands
in wrongly has to meet the library's own message.
"""

import re
from collections.abc import Callable
from typing import Any

from beartype import beartype

SHAPED = re.compile(r"jaxtyping|\b(Shaped|Num|Inexact|Float|Complex|Int|UInt|Bool)\[")


def shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or one that compares its arguments and its result with their jaxtyping shapes."""
    hints = getattr(function, "__annotations__", {})
    return beartype(function) if any(SHAPED.search(str(hint)) for hint in hints.values()) else function
