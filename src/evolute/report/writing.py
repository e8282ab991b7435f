"""The page, its figures and the JSON they are made from, in one folder: all of it, or nothing."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evolute.errors import ReportError
from evolute.report.analysis import Analysis
from evolute.report.storage import FILE, to_text

FORMATS = ("svg", "png", "pdf")
NAME = "report.html"


def write(
    analyses: Analysis | Sequence[Analysis],
    folder: str | Path,
    *,
    overwrite: bool = False,
    formats: Sequence[str] = ("svg", "png"),
) -> Path:
    """report.html, figures/ and report.json of one analysis, or of several side by side; the path of the page.

    Files that are there and would change are kept, with an error, unless `overwrite`. All is written beside the
    folder first and moved into it in the end.
    """
    runs = [analyses] if isinstance(analyses, Analysis) else list(analyses)
    _check(runs, formats)
    folder = Path(folder)
    try:
        made = _made(runs, formats)
        _refuse_to_replace(folder, made, overwrite)
        _put(folder, made)
    except OSError as error:
        raise ReportError(f"cannot write the report to '{folder}': {error.strerror or error}.") from error
    return folder / NAME


def _check(runs: Sequence[Analysis], formats: Sequence[str]) -> None:
    if not runs:
        raise ReportError("there is no analysis to write; pass at least one.")
    for each in formats:
        if each not in FORMATS:
            raise ReportError(f"formats: expected any of {', '.join(FORMATS)}, got {each!r}.")


def _made(runs: Sequence[Analysis], formats: Sequence[str]) -> dict[str, bytes]:
    """Relative path → content."""
    from evolute.report.figures import FIGURES
    from evolute.report.figures.style import bytes_of
    from evolute.report.page import page

    files = {NAME: page(runs).encode()}
    for drawing in FIGURES:
        kept = [run for run in runs if drawing.there(run)]
        if kept:
            figure = drawing.figure(kept)
            files |= {f"figures/{drawing.name}.{kind}": bytes_of(figure, kind) for kind in formats}
    return files | {_json_name(run, place, len(runs)): to_text(run).encode() for place, run in enumerate(runs)}


def _json_name(run: Analysis, place: int, count: int) -> str:
    """`report.json`, or `report-2-after-training.json`."""
    if count == 1:
        return FILE
    slug = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:40]
    return f"report-{place + 1}{'-' + slug if slug else ''}.json"


def _refuse_to_replace(folder: Path, files: dict[str, bytes], overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ReportError(f"'{folder}' is a file; name a folder.")
    there = [name for name, content in files.items() if _differs(folder / name, content)]
    if there and not overwrite:
        raise ReportError(
            f"'{folder / there[0]}' is there already; nothing was written. Pass overwrite=True (--overwrite), or "
            "another folder."
        )


def _differs(path: Path, content: bytes) -> bool:
    return path.exists() and (path.is_dir() or path.read_bytes() != content)


def _put(folder: Path, files: dict[str, bytes]) -> None:
    """Written in full beside its place, where a full disk or a closed folder shows; then moved, the page last."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder, prefix=".report-"))
    try:
        for name, content in files.items():
            (beside / name).parent.mkdir(exist_ok=True)
            (beside / name).write_bytes(content)
        for name in sorted(files, key=NAME.__eq__):
            (folder / name).parent.mkdir(exist_ok=True)
            (beside / name).replace(folder / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
