"""Packages that only some data need, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from evolute.errors import MissingExtraError


def extra(module: str, package: str, what: str) -> Any:
    """The module, or the command that installs it.

    >>> extra("no_such_module", "such-a-package", "Such data")
    Traceback (most recent call last):
    evolute.errors.MissingExtraError: Such data need such-a-package: pip install such-a-package
    """
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtraError(f"{what} need {package}: pip install {package}") from None
