"""`--json`: to standard output, with nothing else there; `--json FILE`: to a file, beside what is printed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from evolute.cli.refusal import refuse

STDOUT = Path("-")
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="[FILE]", help="JSON to FILE beside the text; without FILE, in its place."),
]


@contextmanager
def only_json(file: Path | None) -> Generator[None]:
    """Where standard output is for JSON, whatever others print goes to standard error."""
    check_writable(file)
    if file == STDOUT:
        with redirect_stdout(sys.stderr):
            yield
    else:
        yield


def check_writable(file: Path | None) -> None:
    """Before the work, not after it."""
    if file is not None and file != STDOUT and (file.is_dir() or not file.absolute().parent.is_dir()):
        refuse(f"--json: cannot write to {str(file)!r}: no such folder, or a folder itself")


def emit(document: object, file: Path | None) -> bool:
    """Write it where it was asked for; true if there is to be text too."""
    if file is None:
        return True
    text = json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False)
    if file == STDOUT:
        print(text)
        return False
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        refuse(f"cannot write to '{file}': {problem.strerror}")
    return True


def finite(value: Any) -> Any:
    """Null stands for a number that is not finite.

    >>> finite({"a": [1.0, float("inf")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
