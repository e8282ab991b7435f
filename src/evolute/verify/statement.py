"""A statement: what a closed form says, and what knows nothing of it. Adding one takes one call of `register`.

    register(Statement("RMSNorm · Jacobian", "J = (I − z zᵀ/d)/σ", sample, closed, oracle))

`sample` draws a problem of random size, `closed` and `oracle` each make a tensor of it. Names start with a family
(`Theorem 3.1 · …`), which is what `evolute verify --only` is used with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

P = TypeVar("P")
T = TypeVar("T")


class Sampler:
    """Random sizes and entries, from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self._generator)

    def choice(self, *options: T) -> T:
        return options[self.integer(0, len(options) - 1)]


def relative_error(closed: Tensor, oracle: Tensor) -> float:
    """‖closed − oracle‖ / ‖oracle‖; zero where both are zero, infinite where sizes differ."""
    if closed.shape != oracle.shape:
        return math.inf
    difference, size = float((closed - oracle).norm()), float(oracle.norm())
    return difference / size if size else (math.inf if difference else 0.0)


def excess(bound: Tensor, truth: Tensor) -> float:
    """truth/bound − 1: above zero, the bound is exceeded; below, there is room. Zero where both are zero."""
    attained = (truth == 0) & (bound == 0)  # every ReLU asleep, for one
    return float(torch.where(attained, 0.0, truth / bound - 1).max())


@dataclass(frozen=True)
class Statement(Generic[P]):
    """`closed(problem)` is `oracle(problem)`, up to `tolerance` in `error`; an erratum is one that must fail."""

    name: str
    says: str
    sample: Callable[[Sampler], P]
    closed: Callable[[P], Tensor]
    oracle: Callable[[P], Tensor]
    error: Callable[[Tensor, Tensor], float] = relative_error
    tolerance: float = 1e-9
    erratum: bool = False


_REGISTRY: dict[str, Statement[Any]] = {}


def register(*statements: Statement[Any]) -> None:
    """Add to what `evolute verify` runs."""
    for statement in statements:
        if statement.name in _REGISTRY:
            raise ValueError(f"there are two statements named {statement.name!r}; expected each name once.")
        _REGISTRY[statement.name] = statement


def registered() -> tuple[Statement[Any], ...]:
    """All statements, in the order in which they were added."""
    return tuple(_REGISTRY.values())


def first_line(function: Callable[..., Any]) -> str:
    """The equation that a docstring starts with, without the name of its theorem."""
    return (function.__doc__ or "").strip().partition("\n")[0].partition("  ")[0].rstrip(".")
