"""The diagonal: exact where the structure gives it, else E v ⊙ Av with random signs v."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from evolute.errors import VectorError
from evolute.krylov.checkpoint import State
from evolute.krylov.matrix import matrix
from evolute.krylov.randomness import signs
from evolute.krylov.results import Estimates
from evolute.krylov.samples import Moments
from evolute.krylov.work import Work
from evolute.linop import exact
from evolute.linop.operator import LinearOperator


def diagonal(
    H: LinearOperator,
    products: int = 64,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> Estimates:
    """H_ii = E v_i (Hv)_i for random signs v, each entry with its own standard error: √(Σ_{j≠i} H_ij² / products).

    >>> import evolute as ev
    >>> H = ev.from_matvec(lambda v: torch.linspace(-1, 3, 100) * v, 100)
    >>> bool(torch.allclose(ev.diagonal(H, products=4).estimate, torch.linspace(-1, 3, 100)))
    True

    Exact (and marked so) where the structure of H gives its diagonal, and where `products` columns are all of it.
    """
    if not isinstance(products, int) or products < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"products: expected how many to spend, at least 1, got {products!r}.")
    work = Work(H, "diagonal", total=products, generator=generator, dtype=dtype, progress=progress)
    with suppress(exact.NoStructure):
        return _exact(work, exact.diagonal(H), "structure of the operator")
    with work.running():
        if work.n <= products:
            return _exact(work, matrix(work).diagonal().clone(), "the matrix, written down")
        state = work.resume(checkpoint, {"products": products})
        return _sampled(work, _sample(work, products, state), products)


def _exact(work: Work, entries: Tensor, method: str) -> Estimates:
    return Estimates(
        estimate=entries,
        standard_error=torch.zeros_like(entries),
        samples=0,
        solver_error=work.rounding * float(entries.abs().max()),
        products=work.products,
        status="exact",
        method=method,
        provenance=work.provenance(random=False),
    )


def _sample(work: Work, products: int, state: State | None) -> Moments:
    moments = _moments(work, state)
    work.known = lambda: f"‖diagonal‖ {float(moments.mean.norm()):.4g} ± {float(moments.error.norm()):.1g}"
    while moments.count < products and not (work.stopped and moments.count):
        width = min(max(1, work.op.preferred_block), products - moments.count)
        rows = signs(width, work.n, work.generator, work.like)
        moments.add(rows * work(rows))
        work.finite(moments.mean.sum())
        work.save(lambda: _state(moments))
    work.save(lambda: _state(moments), now=True)
    return moments


def _moments(work: Work, state: State | None) -> Moments:
    if state is None:
        return Moments.none(work.like.new_empty(work.n))
    mean, squares = (state.tensors[name].to(work.like) for name in ("mean", "squares"))
    return Moments(state.values["count"], mean, squares)


def _state(moments: Moments) -> State:
    return State({"mean": moments.mean, "squares": moments.squares}, {"count": moments.count})


def _sampled(work: Work, moments: Moments, products: int) -> Estimates:
    return Estimates(
        estimate=moments.mean,
        standard_error=moments.error,
        samples=moments.count,
        solver_error=work.rounding * float(moments.mean.abs().max()),
        products=work.products,
        status="interrupted" if moments.count < products else "sampled",
        method="random signs (Bekas, Kokiopoulou, Saad)",
        provenance=work.provenance(),
    )
