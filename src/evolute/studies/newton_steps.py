"""Steps d = (|A| + δ)⁻¹ g, how they lie to one another, and how far the loss itself falls along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import functional_call

from evolute.apps.curvature_approximations import Approximation
from evolute.engine.objective import Objective
from evolute.linop.space import Selection

LENGTHS = (0.3, 1.0, 3.0)  # of the best one of the quadratic model


def damped(approximation: Approximation, g: Tensor, damping: float) -> Tensor:
    """(|A| + δ)⁻¹ g with δ = damping · mean |λ(A)|: the same direction for A and for c·A.

    >>> from evolute.apps.curvature_approximations import Diagonal
    >>> damped(Diagonal(torch.tensor([1.0, -3.0])), torch.tensor([2.0, 4.0]), 0.5)
    tensor([1., 1.])
    """
    size = float(approximation.eigenvalues.abs().mean())
    return approximation.solve(g, damping * size) if size else g.clone()


def cosine(a: Tensor, b: Tensor) -> float:
    """a·b/(‖a‖ ‖b‖); 0 where one of them is zero."""
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size else 0.0


def errors(approximation: Tensor, true: Tensor) -> tuple[float, float]:
    """‖A − B‖/‖B‖, and min over c ≥ 0 of ‖cA − B‖/‖B‖ = √(1 − cos²): what is wrong but for the size.

    >>> errors(3 * torch.eye(2), torch.eye(2))
    (2.0, 0.0)
    """
    size = float(true.norm())
    factor = max(float((approximation * true).sum()), 0.0) / (float(approximation.square().sum()) or 1.0)
    error, shape = (float((c * approximation - true).norm()) / size for c in (1.0, factor))
    return error, shape


@dataclass(frozen=True, eq=False)
class Slope:
    """The loss around a point, as some of the parameters move, taken in the order `order` of theirs."""

    objective: Objective
    chosen: Selection
    order: Tensor

    @cached_property
    def gradient(self) -> Tensor:
        return self.chosen.take(self.objective.gradient())[self.order]

    @cached_property
    def start(self) -> Tensor:
        return self.objective.space.flatten({name: p.detach() for name, p in self.objective.parameters.items()})

    @cached_property
    def value(self) -> float:
        return self.after(torch.zeros_like(self.gradient))

    def after(self, step: Tensor) -> float:
        """L(w − step)."""
        named = self.objective.space.unflatten(self.start - self.chosen.put(step[self.order.argsort()]))
        total, terms = 0.0, 0.0
        with torch.no_grad():
            for _, batch in self.objective.batches:
                outputs = functional_call(self.objective.model, named, (batch[0],)).flatten(0, -2)
                summed, count = self.objective.judge(outputs, batch)
                total, terms = total + float(summed), terms + count
        return total / terms

    def decrease(self, directions: Sequence[Tensor], curvature: Tensor) -> tuple[float, int]:
        """How far the loss itself falls at most along one of them, and along which; 0 if it falls along none.

        The lengths are some around the best one on the quadratic of g and of `curvature` ⪰ 0.
        """
        falls = [self._fall(d, curvature) for d in directions]
        best = max(range(len(falls)), key=falls.__getitem__)
        return falls[best], best

    def _fall(self, d: Tensor, curvature: Tensor) -> float:
        slope, bend = float(self.gradient @ d), float(d @ curvature @ d)
        if slope <= 0 or bend <= 0:
            return 0.0
        return max(0.0, self.value - min(self.after(factor * slope / bend * d) for factor in LENGTHS))
