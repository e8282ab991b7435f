"""Where a page goes: checked before the work, and filled in one go, so that nothing is half-written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evolute.cli.refusal import Refusal, refuse
from evolute.errors import EvoluteError


def check_output(folder: Path, *, overwrite: bool) -> None:
    """It is new or empty, or may be overwritten; and there is a place to write to."""
    with writing_to(folder):
        if folder.exists() and not folder.is_dir():
            refuse(f"'{folder}' is a file, and the page needs a folder; choose another with --out")
        if folder.is_dir() and any(folder.iterdir()) and not overwrite:
            refuse(f"'{folder}' has files already, which are kept; choose another with --out, or add --overwrite")
    with filling(folder):
        pass


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """What the disk has against it, in a sentence."""
    try:
        yield
    except OSError as problem:
        refuse(f"cannot write to '{folder}': {problem.strerror or problem}")


@contextmanager
def filling(folder: Path) -> Generator[Path]:
    """A new folder nearby, whose files are moved into `folder` at the end: all of them, or none."""
    nearby = ""
    try:
        with writing_to(folder), tempfile.TemporaryDirectory(prefix=".evolute-", dir=_ground(folder)) as nearby:
            yield Path(nearby)
            _move(Path(nearby), folder)
    except EvoluteError as problem:  # it knows of the folder nearby only
        raise Refusal(str(problem).replace(str(nearby), str(folder)) if nearby else str(problem)) from problem


def _ground(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there: on the same disk."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _move(source: Path, target: Path) -> None:
    """Files of the same name are replaced, others stay."""
    for file in sorted(each for each in source.rglob("*") if each.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
