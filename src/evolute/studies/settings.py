"""`--set key=value` → a configuration, with the types that its fields have."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar, cast, get_type_hints

from evolute.errors import StudyError
from evolute.studies.study import Config

C = TypeVar("C", bound=Config)


def configured(kind: type[C], pairs: Iterable[str]) -> C:
    """The default configuration, with what was set.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Widths(Config):
    ...     widths: tuple[int, ...] = (8, 16)
    >>> configured(Widths, ["widths=4,8", "seed=3"])
    Widths(seed=3, widths=(4, 8))
    """
    hints: dict[str, Any] = get_type_hints(kind)
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise StudyError(f"expected key=value, got {pair!r}.")
        if key not in hints:
            raise StudyError(f"no setting {key!r}{_near(key, hints)}.")
        given[key] = _value(key, text, hints[key])
    return kind(**given)


def plain(config: Config) -> dict[str, Any]:
    """As JSON has it: tuples are lists."""
    return json.loads(json.dumps(asdict(config)))


def restored(kind: type[C], settings: Mapping[str, Any]) -> C:
    """What `plain` made, back."""
    known = {field.name for field in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name in known:
            values[name] = tuple(cast("list[Any]", value)) if isinstance(value, list) else value
    return kind(**values)


def _value(key: str, text: str, hint: Any) -> Any:
    inner: tuple[Any, ...] = getattr(hint, "__args__", ())
    try:
        if getattr(hint, "__origin__", None) is tuple:
            return tuple(_scalar(part.strip(), inner[0]) for part in text.split(",") if part.strip())
        return _scalar(text, hint)
    except ValueError as error:
        wanted = f"{inner[0].__name__} values with commas between" if inner else hint.__name__
        raise StudyError(f"{key}: expected {wanted}, got {text!r}.") from error


def _scalar(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    value = kind(text)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(text)
    return value


def _near(key: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(key, list(known), n=2)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else f"; there are {', '.join(known)}"
