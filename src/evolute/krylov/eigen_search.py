"""Eigenvalues at the ends of the spectrum, by Lanczos with thick restarts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from evolute.errors import CurvatureWarning, VectorError
from evolute.krylov.checkpoint import State
from evolute.krylov.eigenpairs import Eigenpairs
from evolute.krylov.lanczos import Lanczos, Ritz, fits
from evolute.krylov.matrix import matrix
from evolute.krylov.quadrature import clusters
from evolute.krylov.randomness import normal, signs
from evolute.krylov.work import Work, at_least_one
from evolute.linop.operator import LinearOperator

SMALL = 4096  # entries up to which a matrix may be written down
RESTARTS = 4.0  # roundings of a product, which is what those of many restarts add up to
Which = Literal["both", "largest", "smallest", "magnitude"]


def eigsh(
    H: LinearOperator,
    k: int = 10,
    which: Which = "both",
    tol: float = 1e-3,
    *,
    generator: torch.Generator | None = None,
    vectors: bool = False,
    block: int | None = None,
    basis: int | None = None,
    max_products: int | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> Eigenpairs:
    """λ and v with ‖Hv − λv‖ ≤ tol·|λ|: k at the upper end, the lower end, both (k each), or largest in magnitude.

    >>> import evolute as ev
    >>> H = ev.from_dense(torch.diag(torch.arange(-100.0, 101.0)))
    >>> ends = ev.eigsh(H, k=2)
    >>> [round(x, 3) for x in ends.values.tolist()], ends.status
    ([-100.0, -99.0, 99.0, 100.0], 'converged')

    Block Lanczos with thick restarts; every vector is kept and orthogonalised twice. A random block of b vectors meets
    an eigenspace in b dimensions at most: where b values coincide, new random vectors join until all copies are found.
    Where the operator is no larger than the basis would be, or no larger than the products that it took in vain, its
    matrix is written down instead ("exact").

    Args:
        H: A symmetric operator.
        k: How many; "both" gives k at each end.
        which: Signs are kept: "smallest" are the most negative ones.
        tol: Relative to each |λ| itself. What is smaller than the rounding of a product has converged at that.
        generator: Where the starting vectors come from; seed 0 without one.
        vectors: Also the eigenvectors, as columns.
        block: Vectors per step, at least 2 so that double eigenvalues are seen.
        basis: Vectors that are kept; more memory, fewer products.
        max_products: Stop there, with what is known ("not converged"); 200 for each eigenvalue without it.
        dtype: Of the vectors: float32 or float64, whatever the operator computes in.
        progress: A line on a terminal, once the work has lasted some seconds.
        checkpoint: A file to which the state goes now and then; when it is there, the work goes on from it.
    """
    _check(k, which, tol, block, basis)
    at_least_one(max_products)
    work = Work(H, "eigenvalues", generator=generator, dtype=dtype, progress=progress)
    wanted = Wanted(k, which)
    b = block or min(2, work.n)
    kept = basis or fits(work, max(6 * wanted.count, 40) + 2 * b, wanted.count + 4 * b)
    with work.running():
        if work.n <= kept:
            return _dense(work, wanted, tol, vectors)
        usual, small = 200 * wanted.count, work.n <= SMALL and max_products is None
        search = Search(work, wanted, tol, b, kept, max_products or (min(usual, work.n) if small else usual))
        settings = {"k": k, "which": which, "tol": tol, "block": block, "basis": basis}
        search.resume(work.resume(checkpoint, settings))
        search.run()
        if small and search.gave_up:
            return _dense(work, wanted, tol, vectors)  # n more products, and all is known
        return search.result(vectors)


def _check(k: int, which: str, tol: float, block: int | None, basis: int | None) -> None:
    if which not in get_args(Which):
        raise VectorError(f"which: expected one of {', '.join(map(repr, get_args(Which)))}, got {which!r}.")
    if not isinstance(k, int) or k < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"k: expected how many eigenvalues, at least 1, got {k!r}.")
    if not isinstance(tol, Real) or not 0 < tol < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"tol: expected a relative residual between 0 and 1, such as 1e-3, got {tol!r}.")
    if block is not None and block < 1:
        raise VectorError(f"block: expected at least 1 vector per step, got {block}.")
    least = (2 * k if which == "both" else k) + 4 * (block or 2)
    if basis is not None and basis < least:
        raise VectorError(f"basis: expected at least {least} vectors for this k and block, got {basis}.")


@dataclass(frozen=True)
class Wanted:
    """Which of the values that are there."""

    k: int
    which: str

    @property
    def count(self) -> int:
        return 2 * self.k if self.which == "both" else self.k

    def of(self, values: Tensor, more: int = 0) -> Tensor:
        """Places of the wanted ones among ascending values, and of `more` that come next to them."""
        n, k = len(values), self.k + (more // 2 if self.which == "both" else more)
        if self.which == "both":
            return torch.cat([torch.arange(min(k, n)), torch.arange(max(min(k, n), n - k), n)])
        if self.which == "magnitude":
            return values.abs().argsort(descending=True, stable=True)[:k].sort().values
        return torch.arange(max(0, n - k), n) if self.which == "largest" else torch.arange(min(k, n))

    def inner(self, values: Tensor) -> list[float]:
        """The values at which "wanted" ends: more copies of these would change nothing."""
        if self.which == "both":
            lower, upper = values[: (len(values) + 1) // 2], values[(len(values) + 1) // 2 :]
            return [float(each) for each in (*lower[-1:], *upper[:1])]
        if self.which == "magnitude":
            return [float(values[values.abs().argmin()])]
        return [float(values[0] if self.which == "largest" else values[-1])]


# ---------------------------------------------------------------- Lanczos


@dataclass
class Search:
    """The state of a run.

    `met`: how many random vectors have gone in; `steps`: since the last of them did; `needed`: how many these take.
    """

    work: Work
    wanted: Wanted
    tol: float
    block: int
    capacity: int
    limit: int
    met: int = 0
    steps: int = 0
    needed: int = 0
    lanczos: Lanczos = field(init=False)

    def __post_init__(self) -> None:
        self.lanczos = Lanczos(self.work, self.capacity)

    def run(self) -> Search:
        """Until all wanted ones have converged, with all their copies."""
        self.work.known = self.known
        while not self.finished():
            self.advance()
            self.work.save(self.state)
        self.work.save(self.state, now=True)
        return self

    def advance(self) -> None:
        """One block of products; room is made and random vectors are added where needed."""
        if self.lanczos.full or (self.lanczos.exhausted and self.lanczos.m + self.block > self.capacity):
            self.shrink()
        if self.lanczos.exhausted:
            self.meet()
        self.lanczos.step()
        self.steps += 1

    def shrink(self) -> None:
        """Keep what is wanted, and half of what comes next to it."""
        ritz, lanczos = self.lanczos.ritz(), self.lanczos
        room = self.capacity - self.wanted.count - 3 * max(lanczos.width, self.block)
        lanczos.compress(ritz, self.wanted.of(ritz.values, max(0, min(room, room // 2 + 1))))

    def meet(self) -> None:
        """New random vectors join the next block."""
        more = min(self.block, self.capacity - self.lanczos.m - self.lanczos.width)
        self.lanczos.add(normal(more, self.work.n, self.work.generator, self.work.like))
        self.met += more
        self.needed, self.steps = max(self.needed, self.steps), 0

    def finished(self) -> bool:
        if self.work.stopped or self.work.products >= self.limit or self.lanczos.m == self.work.n:
            return True
        if self.lanczos.m < min(self.wanted.count, self.work.n):
            return False
        ritz = self.lanczos.ritz()
        here = self.wanted.of(ritz.values)
        if not bool(self._converged(ritz.values, ritz.bounds)[here].all()):
            return False
        return self._complete(ritz, here)

    @property
    def gave_up(self) -> bool:
        """Out of products, not stopped, and not there."""
        ritz = self.lanczos.ritz()
        here = self.wanted.of(ritz.values)
        there = bool(self._converged(ritz.values, ritz.bounds)[here].all()) and len(here) == self.wanted.count
        return not self.work.stopped and not there

    def _complete(self, ritz: Ritz, here: Tensor) -> bool:
        """Fewer copies of each than random vectors, the last of which have had as much time as the first took."""
        if self.steps < self.needed and not self.lanczos.exhausted:
            return False
        if not _hidden(self.wanted, ritz, here, self.met, self.margin):
            return True
        self._more()
        return False

    def _more(self) -> None:
        if self.lanczos.full or self.lanczos.m + self.lanczos.width + self.block > self.capacity:
            self.shrink()
        self.meet()

    @property
    def margin(self) -> float:
        """The error of one product."""
        return self.work.rounding * self.lanczos.scale

    def _converged(self, values: Tensor, residuals: Tensor, roundings: float = 1.0) -> Tensor:
        return (residuals <= self.tol * values.abs()) | (residuals <= roundings * self.margin)

    def known(self) -> str:
        """For the line of progress."""
        if self.lanczos.m == 0:
            return ""
        ritz = self.lanczos.ritz()
        here = self.wanted.of(ritz.values)
        values, bounds = ritz.values[here], ritz.bounds[here]
        count = int(self._converged(values, bounds).sum())
        worst = int((bounds / values.abs().clamp_min(self.margin / self.tol)).nan_to_num().argmax())
        goal = max(self.tol * float(values[worst].abs()), self.margin)
        self.work.meter.expect(self.work.products, float(bounds[worst]), goal, self.tol)
        ends = f"λ from {float(ritz.values[0]):.3g} to {float(ritz.values[-1]):.3g}"
        return f"{count} of {self.wanted.count} converged, {ends}"

    # ---- on disk

    def state(self) -> State:
        inner = self.lanczos.state()
        mine = {"met": self.met, "steps": self.steps, "needed": self.needed, "capacity": self.capacity}
        return State(inner.tensors, {**inner.values, **mine})

    def resume(self, state: State | None) -> None:
        if state is None:
            return
        self.met, self.steps, self.needed = (state.values[name] for name in ("met", "steps", "needed"))
        if state.values["capacity"] != self.capacity:
            self.capacity = state.values["capacity"]
            self.lanczos = Lanczos(self.work, self.capacity)
        self.lanczos.restore(state)

    # ---- the answer

    def result(self, vectors: bool) -> Eigenpairs:
        ritz = self.lanczos.ritz()
        here = self.wanted.of(ritz.values)
        values, bounds = ritz.values[here], ritz.bounds[here]
        partial = self.work.stopped
        residuals = bounds if partial else self._residuals(values, bounds, ritz.coordinates[:, here])
        converged = self._converged(values, residuals, RESTARTS)
        done = "converged" if bool(converged.all()) and len(values) == self.wanted.count else "not converged"
        return Eigenpairs(
            products=self.work.products,
            status="interrupted" if partial else done,
            method=f"thick-restart Lanczos, {self.block} vectors per step, {self.capacity} kept",
            provenance=self.work.provenance(),
            values=values,
            residuals=residuals,
            converged=converged,
            vectors=self.lanczos.vectors(ritz.coordinates[:, here]).mT if vectors else None,
            which=self.wanted.which,
            tol=self.tol,
            rounding=RESTARTS * self.margin,
            orthogonality=self.lanczos.orthogonality(),
        )

    def _residuals(self, values: Tensor, bounds: Tensor, coordinates: Tensor) -> Tensor:
        """Those of the recurrence, plus what one product taken anew adds; if that is more than rounding, all anew.

        For z = Σ ± y the recurrence says A z = Σ ± θ y + Vᵀ B s; the square of the rest is that of all vectors.
        """
        flips = signs(1, len(values), self.work.generator, values)[0]
        z = (coordinates * flips).sum(1, keepdim=True)
        image = self.lanczos.vectors((coordinates * flips * values).sum(1, keepdim=True))
        image += (self.lanczos.coupling @ z).mT.to(image) @ self.lanczos.V
        apart = self.work(self.lanczos.vectors(z)) - image
        more = float(torch.linalg.vector_norm(apart, dtype=torch.float64)) ** 2 / len(values)
        if more**0.5 > self.margin and bool((more**0.5 > self.tol * values.abs()).any()):
            return self._anew(values, bounds, coordinates)
        return (bounds.square() + more).sqrt()

    def _anew(self, values: Tensor, bounds: Tensor, coordinates: Tensor) -> Tensor:
        """‖A y − θ y‖, a block of vectors at a time; a warning where the recurrence was wrong about convergence."""
        width = max(1, self.work.op.preferred_block)
        pieces = zip(values.split(width), coordinates.split(width, dim=1), strict=True)
        residuals = torch.cat([_residual(self.work, each, self.lanczos.vectors(s)) for each, s in pieces])
        if bool((self._converged(values, bounds) & ~self._converged(values, residuals, RESTARTS)).any()):
            warnings.warn(
                "eigenvectors have a larger residual than the Lanczos recurrence says: products differ from call to "
                "call, or are coarser than tol. Look for dropout and shuffling; or use a wider dtype.",
                CurvatureWarning,
                stacklevel=5,
            )
        return residuals


def _residual(work: Work, values: Tensor, rows: Tensor) -> Tensor:
    out = work(rows).addcmul_(rows, values[:, None].to(rows), value=-1)
    lengths = [torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in (out, rows)]
    return (lengths[0] / lengths[1]).cpu()


def _hidden(wanted: Wanted, ritz: Ritz, here: Tensor, met: int, margin: float) -> bool:
    """Some cluster is as large as the number of random vectors, and copies of it would displace another value."""
    values, bounds = ritz.values[here], ritz.bounds[here]
    inner = wanted.inner(values)
    for start, stop in clusters(values, bounds, margin):
        low, high = float(values[start]), float(values[stop - 1])
        if stop - start >= met and not any(low <= edge <= high for edge in inner):
            return True
    return False


# ---------------------------------------------------------------- small operators


def _dense(work: Work, wanted: Wanted, tol: float, vectors: bool) -> Eigenpairs:
    A = matrix(work)
    every, U = torch.linalg.eigh(A)
    here = wanted.of(every)
    values, Y = every[here], U[:, here]
    return Eigenpairs(
        products=work.products,
        status="exact",
        method=f"the {work.n}×{work.n} matrix, written down",
        provenance=work.provenance(random=False),
        values=values,
        residuals=torch.linalg.vector_norm(A @ Y - Y * values, dim=0),
        converged=torch.ones(len(values), dtype=torch.bool),
        vectors=Y.to(work.op.device, work.dtype) if vectors else None,
        which=wanted.which,
        tol=tol,
        rounding=work.rounding * float(A.norm()),
        orthogonality=float((Y.mT @ Y - torch.eye(len(values), dtype=Y.dtype)).abs().max()),
    )
