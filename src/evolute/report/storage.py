"""An analysis as JSON: {"format": "evolute report", "version": 2, "analysis": {…}}, the fields as in `analysis.py`.

Dataclasses are objects, tuples are arrays, what was not measured is null. Numbers come back bit by bit.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from evolute.errors import ReportError
from evolute.report.analysis import Analysis

FORMAT, VERSION, FILE = "evolute report", 2, "report.json"


def to_text(analysis: Analysis) -> str:
    """The JSON text."""
    document = {"format": FORMAT, "version": VERSION, "analysis": _plain(analysis)}
    return json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def save(analysis: Analysis, folder: Path) -> Path:
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(path, to_text(analysis))
    except OSError as error:
        raise ReportError(f"cannot write '{path}': {error.strerror or error}.") from error
    return path


def _replace(path: Path, text: str) -> None:
    """Beside the file first, then in its place: a reader sees the old one or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path) -> Analysis:
    path = path / FILE if path.is_dir() else path
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read '{path}': {error.strerror or error}.") from error
    except ValueError as error:
        raise ReportError(f"'{path}' is no report of evolute, or is damaged: {error}.") from error
    return _analysis(path, document)


def _analysis(path: Path, document: Any) -> Analysis:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ReportError(f"'{path}' is no report of evolute: expected the format '{FORMAT}'.")
    if document.get("version") != VERSION:
        raise ReportError(
            f"'{path}' is a report of version {document.get('version')!r}; this evolute reads version {VERSION}. "
            "Make it again with `evolute report`."
        )
    try:
        return _built(Analysis, document.get("analysis"), "analysis")
    except (TypeError, ValueError) as error:
        raise ReportError(f"'{path}' is damaged: {error}.") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _built(kind: Any, value: Any, where: str) -> Any:
    """The value as this type, or a TypeError that says where it is not."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(each for each in get_args(kind) if each is not type(None))
        return None if value is None else _built(inner, value, where)
    if get_origin(kind) is tuple:
        return _tuple(get_args(kind), value, where)
    if is_dataclass(kind):
        return _object(kind, value, where)
    return _scalar(kind, value, where)


def _object(kind: Any, value: Any, where: str) -> Any:
    names = [field.name for field in fields(kind)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise TypeError(f"{where} should have the fields {', '.join(names)}")
    hints = get_type_hints(kind)
    return kind(**{name: _built(hints[name], value[name], f"{where}.{name}") for name in names})


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{where} should be an array")
    each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else list(kinds)
    if len(each) != len(value):
        raise TypeError(f"{where} should have {len(each)} entries")
    return tuple(_built(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(each, value, strict=True)))


def _scalar(kind: Any, value: Any, where: str) -> Any:
    fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where} should be a {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where} is not finite")
    return kind(value)
