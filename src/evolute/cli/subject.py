"""What a report is about: an objective and how to speak of it, whichever way it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from evolute import Objective
from evolute.cli.refusal import refuse
from evolute.engine.groups import groups


@dataclass(frozen=True)
class Options:
    """What is asked of every subject; None leaves it to the subject."""

    seed: int = 0
    memory: int | None = None
    params: str | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    samples: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, eq=False)
class Subject:
    """An objective, its name, words about model and data, and how it was trained, if that was here.

    A `small` one is looked at by one thread: several would only wait for one another. `source` is the code of the
    user's that it comes from, if it does.
    """

    objective: Objective
    name: str
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    training: Any = None
    small: bool = False
    source: str | None = None


def chosen(model: nn.Module, pattern: str | None) -> list[str] | None:
    """The groups or parameters that a pattern such as `layers.*.attn` stands for."""
    if pattern is None:
        return None
    names = {*groups(model), *(name for name, _ in model.named_parameters())}
    found = [
        name for part in pattern.split(",") for name in sorted(names) if fnmatchcase(name, part) or _below(name, part)
    ]
    if not found:
        refuse(f"--params: nothing matches {pattern!r}; there are, for example, {', '.join(sorted(names)[:5])}")
    return found


def _below(name: str, pattern: str) -> bool:
    return fnmatchcase(name, f"{pattern}.*")


def refuse_non_finite(model: nn.Module, name: str) -> None:
    """A model with NaN has no curvature; it is told before anything is computed."""
    for key, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            bad = int((~torch.isfinite(parameter)).sum())
            refuse(f"'{name}' has weights that are not finite: {bad:,} of {parameter.numel():,} in '{key}'")
