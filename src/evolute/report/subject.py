"""What was analysed, and how it came to be: what the caller says, else what the objective and the result tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evolute.engine.objective import Objective
from evolute.errors import ReportError
from evolute.report.analysis import Subject, Training

POINTS = 400  # of a loss curve that is kept
KNOWN = ("model", "data", "fingerprint", "dtype", "device")


def checked(about: Mapping[str, Any]) -> dict[str, Any]:
    """Before the work, not after it."""
    unknown = sorted(set(about) - set(KNOWN))
    if unknown:
        raise ReportError(f"about: no field {unknown[0]!r}; there are {', '.join(KNOWN)}.")
    return dict(about)


def subject_of(objective: Objective, about: Mapping[str, Any], terms: float) -> Subject:
    space, model = objective.space, objective.model
    return Subject(
        model=str(about.get("model", type(model).__name__)),
        data=str(about.get("data", "")),
        fingerprint=str(about.get("fingerprint") or objective.batches.digest()),
        parameters=space.size,
        terms=terms,
        batches=len(objective.batches.prints or []),
        dtype=str(about.get("dtype", space.dtype)).removeprefix("torch."),
        device=str(about.get("device", space.device)),
    )


def training_of(told: object) -> Training | None:
    """From a mapping, or from whatever has such attributes.

    >>> training_of({"optimizer": "sgd", "lr": 0.1}).lr
    0.1
    """
    if told is None or isinstance(told, Training):
        return told
    fields: Mapping[str, Any] = told if isinstance(told, Mapping) else _attributes(told)
    unknown = sorted(set(fields) - set(Training.__dataclass_fields__))
    if unknown:
        raise ReportError(f"training: no field {unknown[0]!r}; there are {', '.join(Training.__dataclass_fields__)}.")
    given: dict[str, Any] = {**fields, "losses": _thinned(fields.get("losses") or ())}
    return Training(**given)


def _attributes(told: object) -> dict[str, Any]:
    return {name: getattr(told, name) for name in Training.__dataclass_fields__ if hasattr(told, name)}


def _thinned(losses: Sequence[float]) -> tuple[float, ...]:
    """Means of neighbours, so that no more than POINTS are kept."""
    width = -(-len(losses) // POINTS) or 1
    pieces = [losses[start : start + width] for start in range(0, len(losses), width)]
    return tuple(float(sum(piece) / len(piece)) for piece in pieces)
