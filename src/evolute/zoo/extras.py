"""Packages that only some data need, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from evolute.errors import MissingExtraError


def extra(module: str, package: str, what: str) -> Any:
    """The module, or the command that installs it.

    >>> extra("no_such_module", "such-a-package", "This")
    Traceback (most recent call last):
    evolute.errors.MissingExtraError: This needs such-a-package: pip install such-a-package
    """
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtraError(f"{what} needs {package}: pip install {package}") from None
