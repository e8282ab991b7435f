"""Gradient descent on the quadratic model, for every rate and number of steps from one Lanczos run started at g.

    w_t − w = −ψ(H) g            ψ(λ) = (1 − (1−ηλ)^t)/λ          → ηt as λ → 0
    L_t − L = −gᵀ φ(H) g         φ(λ) = (1 − (1−ηλ)^{2t})/(2λ)    → ηt as λ → 0
    ‖g_t‖²  = gᵀ (I−ηH)^{2t} g

With Ritz values θ_j and ‖g‖² times the squares of the first entries of their vectors, gᵀ f(H) g = Σ_j ω_j f(θ_j): m
nodes are exact for polynomials of degree 2m − 1, so that the loss is exact for up to m steps; and for any number of
them where the run has exhausted the space. All derivatives of φ have one sign for 0 ≤ ηλ ≤ 1, each the other than the
next. So where no direction curves downwards the loss falls at least as far as those nodes say, and at most as far as
nodes say of which one is held at zero (Gauss and Radau): what is not resolved may have no curvature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.krylov.storage import saveable

LARGEST = 690.0  # e^x beyond is no float64


def fallen(eigenvalues: Tensor, rate: float, steps: int) -> Tensor:
    """φ(λ) = (1 − (1−ηλ)^{2t})/(2λ), accurate for small λ and for negative ones.

    >>> fallen(torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64), 0.5, 2).tolist()
    [1.0, 0.46875, 2.03125]
    """
    return rate * _series(rate * eigenvalues, 2 * steps) / 2


def walked(eigenvalues: Tensor, rate: float, steps: int) -> Tensor:
    """ψ(λ) = (1 − (1−ηλ)^t)/λ.

    >>> walked(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), 1.0, 3).tolist()
    [3.0, 1.0, 1.0]
    """
    return rate * _series(rate * eigenvalues, steps)


def _series(x: Tensor, power: int) -> Tensor:
    """(1 − (1−x)^n)/x = Σ_{k<n} (1−x)^k, without cancellation at small x."""
    size, odd = torch.expm1(power * _log(x)), power % 2 == 1
    above = torch.where(x > 1, 2 + size, -size) if odd else -size  # 1 − (±|1−x|)^n
    return torch.where(x == 0, float(power), above / x.where(x != 0, 1.0))


def _log(x: Tensor) -> Tensor:
    """log|1 − x|; finite, so that no steps at all are none at x = 1 too."""
    found = torch.where(x < 1, torch.log1p(-x.clamp(max=1)), torch.log1p((x - 2).clamp(min=-1)))
    return found.clamp(min=-1e300)


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Descent:
    """The measure of g on the spectrum of H: `nodes` θ ascending with `weights` ω, which add up to ‖g‖².

    `coarse_…`: of the first three quarters of the run, one product less at least; what differs, its length decides.
    `floor_…`: with a node at zero. `complete`: nothing is left out.
    """

    nodes: Tensor
    weights: Tensor
    coarse_nodes: Tensor
    coarse_weights: Tensor
    floor_nodes: Tensor
    floor_weights: Tensor
    complete: bool

    @classmethod
    def of(cls, projected: Tensor, square: float, complete: bool) -> Descent:
        """From T of a Lanczos run whose first vector is g/‖g‖, with ‖g‖²."""
        whole = len(projected)
        fine, coarse = (_measure(projected[:m, :m], square) for m in (whole, min((3 * whole + 3) // 4, whole - 1)))
        floor = _measure(_with_zero(projected), square)
        return cls(
            nodes=fine[0], weights=fine[1], coarse_nodes=coarse[0], coarse_weights=coarse[1],
            floor_nodes=floor[0], floor_weights=floor[1], complete=complete,
        )  # fmt: skip

    def change(self, rate: float, steps: int) -> tuple[float, float]:
        """L_t − L and how much of it the length of the run decides; infinite where it leaves float64.

        A direction that curves downwards and that the run has not seen can make it any amount.
        """
        value = _change(self.nodes, self.weights, rate, steps)
        rounding = 1e-14 * abs(value)
        if self.complete or steps <= len(self.nodes):
            return value, rounding
        others = (self.coarse_nodes, self.coarse_weights), (self.floor_nodes, self.floor_weights)
        found = [_change(*other, rate, steps) for other in others]
        finite = all(math.isfinite(each) for each in (value, *found))
        return value, max(abs(value - each) for each in found) + rounding if finite else math.inf

    def square(self, rate: float, steps: int) -> float:
        """‖g_t‖²."""
        return float((self.weights * torch.exp(2 * steps * _log(rate * self.nodes))).sum())


def _with_zero(T: Tensor) -> Tensor:
    """T whose last diagonal entry is changed so that zero is an eigenvalue; T itself where that needs a wild one."""
    if len(T) < 2:
        return torch.zeros_like(T)
    last = torch.zeros_like(T[0, :-1])
    last[-1] = T[-1, -2] ** 2
    found, failed = torch.linalg.solve_ex(T[:-1, :-1], last)
    changed = T.clone()
    changed[-1, -1] = found[-1]
    wild = bool(failed) or not float(found[-1].abs()) <= 2 * float(T.abs().sum(1).max())
    return T if wild else changed


def _measure(T: Tensor, square: float) -> tuple[Tensor, Tensor]:
    if len(T) == 0:
        return T.new_zeros(0), T.new_zeros(0)
    values, U = torch.linalg.eigh(T)
    return values, square * U[0].square()


def _change(nodes: Tensor, weights: Tensor, rate: float, steps: int) -> float:
    """−Σ ω φ(θ); where terms of both signs are beyond float64, the largest decides."""
    exponents = torch.where(weights > 0, 2 * steps * _log(rate * nodes), -torch.inf)
    if len(nodes) and float(exponents.max()) > LARGEST:
        return math.copysign(math.inf, float(nodes[int(exponents.argmax())]))
    return -float((weights * fallen(nodes, rate, steps)).sum())
