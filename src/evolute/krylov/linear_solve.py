"""(A + δI) x = b: conjugate gradients, and minimal residuals where A + δI turns out not to be positive definite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evolute.errors import NonFiniteError, VectorError
from evolute.krylov.checkpoint import State
from evolute.krylov.orthogonal import inner
from evolute.krylov.results import Result
from evolute.krylov.storage import saveable
from evolute.krylov.work import Work, at_least_one
from evolute.linop.operator import LinearOperator


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Solution(Result):
    """x, and `residual` ‖(H + damping I)x − b‖ / ‖b‖, of a product taken anew.

    `curvature` is None, or the least vᵀ(H + damping I)v ≤ 0 of a unit vector that the solver met, and `direction` is v:
    then the matrix is indefinite or singular, x is the solution of least residual, and no minimum of the quadratic.
    """

    x: Tensor | Mapping[str, Tensor]
    residual: float
    tol: float
    damping: float
    curvature: float | None
    direction: Tensor | None

    @property
    def converged(self) -> bool:
        return self.status == "converged"

    @property
    def indefinite(self) -> bool:
        return self.curvature is not None

    def __str__(self) -> str:
        sign = f", not positive definite (vᵀAv = {self.curvature:.2g})" if self.curvature is not None else ""
        return f"x with relative residual {self.residual:.1e}{sign}  [{self._footer()}]"


def solve(
    H: LinearOperator,
    b: Tensor | Mapping[str, Tensor],
    damping: float = 0.0,
    *,
    tol: float = 1e-5,
    max_products: int | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> Solution:
    """(H + damping·I) x = b, up to ‖(H + damping·I) x − b‖ ≤ tol·‖b‖.

    >>> import evolute as ev
    >>> H = ev.from_dense(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
    >>> ev.solve(H, torch.ones(3)).x
    tensor([1.0000, 0.5000, 0.2500])
    >>> print(ev.solve(H, torch.ones(3), damping=-3).status, ev.solve(H, torch.ones(3), damping=-3).indefinite)
    converged True

    Conjugate gradients while curvature is positive. At the first direction where it is not, that direction is kept, and
    the system is solved by minimal residuals (MINRES), which needs no sign.

    Args:
        H: A symmetric operator.
        b: A vector (n,), or name → tensor; x has the same form.
        damping: δ of H + δI.
        tol: Relative to ‖b‖.
        max_products: Stop there, "not converged"; 10 n but at most 1000 without it.
        dtype: Of the vectors: float32 or float64, whatever the operator computes in.
        progress: A line on a terminal, once the work has lasted some seconds.
        checkpoint: A file to which the state goes now and then; when it is there, the work goes on from it.
    """
    work = Work(H, "solution", total=0, dtype=dtype, progress=progress)
    right = _vector(work, b)
    if not isinstance(tol, Real) or not 0 < tol < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"tol: expected a relative residual between 0 and 1, such as 1e-5, got {tol!r}.")
    if not isinstance(damping, Real) or not math.isfinite(damping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"damping: expected a finite number δ of H + δI, got {damping!r}.")
    at_least_one(max_products)
    system = System(work, right, float(damping), tol, max_products or min(1000, 10 * work.n))
    with work.running():
        settings = {"damping": system.damping, "tol": system.tol, "b": [float(right.sum()), norm(right)]}
        saved = work.resume(checkpoint, settings)
        x, met = conjugate_gradients(system, saved)
        if met is not None:
            x = minimal_residuals(system, met, saved)
        return _solution(system, x, met, isinstance(b, Mapping))


def _vector(work: Work, b: Any) -> Tensor:
    flat = work.op.space.flatten(b) if isinstance(b, Mapping) else b
    if not isinstance(flat, Tensor) or flat.shape != (work.n,):
        got = tuple(flat.shape) if isinstance(flat, Tensor) else type(flat).__name__
        raise VectorError(f"b: expected a vector ({work.n},) or name → tensor, got {got}.")
    if flat.is_complex():
        raise VectorError(f"b: expected real entries, got {flat.dtype}.")
    if not bool(torch.isfinite(flat).all()):
        raise NonFiniteError("b has entries that are NaN or infinite.")
    return flat.detach().to(work.op.device, work.dtype)


@dataclass
class System:
    """A + δI, b, and when to stop."""

    work: Work
    b: Tensor
    damping: float
    tol: float
    limit: int

    def __post_init__(self) -> None:
        self.goal = self.tol * norm(self.b)

    def __call__(self, v: Tensor) -> Tensor:
        return self.work(v[None])[0].add_(v, alpha=self.damping)

    def goes_on(self, residual: float) -> bool:
        """Neither solved nor out of products nor stopped."""
        self.work.known = lambda: self._known(residual)
        return residual > self.goal and self.work.products < self.limit and not self.work.stopped

    def _known(self, residual: float) -> str:
        self.work.meter.expect(self.work.products, residual, self.goal, self.tol)
        return f"residual {residual:.1e}, wanted {self.goal:.1e}"

    def finite(self, value: float) -> float:
        self.work.finite(torch.tensor(value))
        return value


def dot(a: Tensor, b: Tensor) -> float:
    return float(inner(a[None], b[None]))


def norm(a: Tensor) -> float:
    return dot(a, a) ** 0.5


@dataclass(frozen=True)
class Met:
    """A direction without positive curvature."""

    curvature: float
    direction: Tensor


def _loaded(saved: State, name: str, system: System) -> Tensor:
    """In memory of its own: the last bits of a sum depend on where its terms lie."""
    return saved.tensors[name].to(system.b).clone()


def conjugate_gradients(system: System, saved: State | None = None) -> tuple[Tensor, Met | None]:
    """Hestenes and Stiefel; stops at the first direction p with pᵀAp ≤ 0."""
    if saved is not None and "direction" in saved.tensors:
        return system.b, Met(saved.values["curvature"], _loaded(saved, "direction", system))
    x, r = torch.zeros_like(system.b), system.b.clone()
    p = r.clone()
    if saved is not None:
        x, r, p = (_loaded(saved, name, system) for name in "xrp")
    squared = dot(r, r)
    while system.goes_on(squared**0.5):
        image = system(p)
        form, length = system.finite(dot(p, image)), norm(p)
        if form <= system.work.resolution * length * norm(image):
            return x, Met(form / length**2, p / length)
        step = squared / form
        x, r = x.add_(p, alpha=step), r.sub_(image, alpha=step)
        before, squared = squared, dot(r, r)
        p = r + (squared / before) * p
        system.work.save(lambda x=x, r=r, p=p: State({"x": x, "r": r, "p": p}, {}))
    system.work.save(lambda: State({"x": x, "r": r, "p": p}, {}), now=True)
    return x, None


@dataclass
class Residuals:
    """Where minimal residuals are: `past` are the last two (p, s), all that symmetric A asks for."""

    x: Tensor
    r: Tensor
    p: Tensor
    s: Tensor
    past: list[tuple[Tensor, Tensor]]
    largest: float = 0.0

    @classmethod
    def begin(cls, system: System, saved: State | None) -> Residuals:
        if saved is None or "direction" not in saved.tensors:
            p = system.b / norm(system.b)
            return cls(torch.zeros_like(system.b), system.b.clone(), p, system(p), [])
        x, r, p, s = (_loaded(saved, name, system) for name in "xrps")
        pairs = range(saved.values["past"])
        past = [(_loaded(saved, f"p{i}", system), _loaded(saved, f"s{i}", system)) for i in pairs]
        return cls(x, r, p, s, past, saved.values["largest"])

    def state(self, met: Met) -> State:
        old = {f"{name}{i}": each for i, pair in enumerate(self.past) for name, each in zip("ps", pair, strict=True)}
        here = {"x": self.x, "r": self.r, "p": self.p.clone(), "s": self.s, "direction": met.direction}  # p is a past s
        return State({**here, **old}, {"largest": self.largest, "curvature": met.curvature, "past": len(self.past)})


def minimal_residuals(system: System, met: Met, saved: State | None = None) -> Tensor:
    """Each step makes ‖b − Ax‖ least along one more direction p; the images s = Ap are orthogonal to one another."""
    at = Residuals.begin(system, saved)
    while system.goes_on(norm(at.r)):
        p, s = at.p, at.s
        for old_p, old_s in at.past:
            share = dot(s, old_s)
            p, s = p - share * old_p, s - share * old_s
        size = system.finite(norm(s))
        at.largest = max(at.largest, size / norm(p))
        if size <= system.work.rounding * at.largest * norm(p):
            break  # p is in the null space: no step along it makes the residual less
        p, s = p / size, s / size
        step = dot(at.r, s)
        at.x, at.r = at.x.add_(p, alpha=step), at.r.sub_(s, alpha=step)
        at.past = [*at.past[-1:], (p, s)]
        at.p, at.s = s, system(s)
        system.work.save(lambda: at.state(met))
    system.work.save(lambda: at.state(met), now=True)
    return at.x


def _solution(system: System, x: Tensor, met: Met | None, named: bool) -> Solution:
    work, size = system.work, norm(system.b)
    partial = work.stopped
    residual = norm(system(x) - system.b) / size if size else 0.0
    return Solution(
        products=work.products,
        status="converged" if residual <= 2 * system.tol else "interrupted" if partial else "not converged",
        method="conjugate gradients" if met is None else "minimal residuals",
        provenance=work.provenance(random=False),
        x=work.op.space.unflatten(x) if named else x,
        residual=residual,
        tol=system.tol,
        damping=system.damping,
        curvature=None if met is None else met.curvature,
        direction=None if met is None else met.direction,
    )
