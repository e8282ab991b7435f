"""Which studies there are: a file or a folder each, found by name."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from evolute.errors import StudyError
from evolute.studies.study import Study

NAMES: tuple[str, ...] = (
    "growth",
    "growth_weights",
    "heterogeneity",
    "softmax",
    "sinks",
    "dominance",
    "gauss_newton",
    "landscape",
    "budget",
    "scaling",
    "layernorm",
    "approximations",
    "taylor",
    "flow",
    "dynamics",
    "beyond",
)
_added = dict[str, Study[Any]]()


def find(name: str) -> Study[Any]:
    """The study of that name; imported when it is asked for."""
    if name in _added:
        return _added[name]
    if name not in NAMES:
        near = difflib.get_close_matches(name, all_names(), n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(all_names())}."
        raise StudyError(f"no study {name!r}; {hint}")
    return import_module(f"evolute.studies.{name}").STUDY


def add(study: Study[Any]) -> None:
    """One of your own, in the process that runs it: with `workers=0`, or a module that the workers import."""
    _added[study.name] = study


def all_names() -> list[str]:
    """In the order in which they are listed."""
    return [*NAMES, *_added]
