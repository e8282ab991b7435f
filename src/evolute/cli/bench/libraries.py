"""How each library is asked, in the way that its own documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from evolute import GaussNewton, Hessian, Objective
from evolute.cli.bench.jax_model import with_jax
from evolute.cli.bench.problem import Asked, Problem
from evolute.krylov import eigsh

TOLERANCE = 1e-3


def with_evolute(problem: Problem) -> Asked:
    objective = Objective(problem.model(), [(problem.x, problem.y)], problem.loss)
    H, G = Hessian(objective), GaussNewton(objective)

    def top() -> float:
        return float(eigsh(H, k=1, which="largest", tol=TOLERANCE, block=1, progress=False).values[-1])

    return Asked(lambda: H @ problem.v, lambda: G @ problem.v, top)


def with_curvlinops(problem: Problem) -> Asked:
    curvlinops, model = import_module("curvlinops"), problem.model()
    arguments = model, problem.loss, list(model.parameters()), [(problem.x, problem.y)]
    H = curvlinops.HessianLinearOperator(*arguments, check_deterministic=False)
    G = curvlinops.GGNLinearOperator(*arguments, check_deterministic=False)
    return Asked(lambda: H @ problem.v, lambda: G @ problem.v, lambda: _scipy_top(H.to_scipy()))


def with_pyhessian(problem: Problem) -> Asked:
    """It has no Gauss–Newton matrix; its eigenvalues come from power iteration."""
    product = import_module("pyhessian.utils").hessian_vector_product
    H = import_module("pyhessian").hessian(problem.model(), problem.loss, data=(problem.x, problem.y), cuda=False)
    v = problem.pieces(problem.v)
    top: Callable[[], float] = lambda: H.eigenvalues(maxIter=500, tol=TOLERANCE, top_n=1)[0][0]  # noqa: E731
    return Asked(lambda: product(H.gradsH, H.params, v), None, top)


def with_eigenthings(problem: Problem) -> Asked:
    he, model, batches = import_module("hessian_eigenthings"), problem.model(), [(problem.x, problem.y)]
    H = he.HessianOperator(model, batches, he.supervised_loss(problem.loss))
    G = he.GGNOperator(model, batches, he.supervised_forward, he.supervised_loss_of_output(problem.loss))

    def top() -> float:
        return float(he.lanczos(H, k=1, max_iter=60, which="LA", tol=TOLERANCE, reorthogonalize=True).eigenvalues[0])

    return Asked(lambda: H @ problem.v, lambda: G @ problem.v, top)


def _scipy_top(A: Any) -> float:
    from scipy.sparse.linalg import eigsh as scipy_eigsh

    found = scipy_eigsh(A, k=1, which="LA", tol=TOLERANCE, return_eigenvectors=False)  # pyright: ignore
    return float(found[0])


def _jax(problem: Problem) -> Asked:
    hessian, gauss_newton, flat = with_jax(problem)
    from scipy.sparse.linalg import LinearOperator

    shape = problem.size, problem.size
    A = LinearOperator(shape, matvec=lambda v: flat(torch.from_numpy(v.reshape(-1))), dtype="float32")  # pyright: ignore
    return Asked(hessian, gauss_newton, lambda: _scipy_top(A))


LIBRARIES: dict[str, Callable[[Problem], Asked]] = {
    "evolute": with_evolute,
    "curvlinops": with_curvlinops,
    "pyhessian": with_pyhessian,
    "hessian_eigenthings": with_eigenthings,
    "jax": _jax,
}
