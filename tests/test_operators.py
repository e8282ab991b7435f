"""What every operator has to be, and what the curvature operators are: compared with oracles for every family of models."""

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import oracles
import pytest
import torch
from families import FAMILIES, Family
from scipy.sparse.linalg import aslinearoperator, eigsh
from torch import Tensor, nn

import evolute as ev
from evolute.engine.operators import CurvatureOperator
from evolute.linop import LinearOperator

KINDS: dict[str, type[CurvatureOperator]] = {
    "H": ev.Hessian,
    "G": ev.GaussNewton,
    "F": ev.FunctionalHessian,
    "E": ev.EmpiricalFisher,
}


def _objective(name: str = "mlp, mse", **options: object) -> ev.Objective:
    family = FAMILIES[name]()
    return ev.Objective(family.model, family.batches, family.loss, **options)


# ---------------------------------------------------------------- the registry: each concrete class, made once at least


def _matrix(size: int, seed: int = 0) -> Tensor:
    m = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return m + m.T


def _space() -> ev.Space:
    return ev.Space({"w": (2, 3), "b": (3,), "c": (1,)}, {"all": (ev.Part("w"), ev.Part("b"))}, torch.float64)


def _dense(seed: int = 0) -> LinearOperator:
    return ev.from_dense(_matrix(10, seed), space=_space())


def _matvec() -> LinearOperator:
    matrix = _matrix(10, 5)
    return ev.from_matvec(lambda v: matrix @ v, space=_space())


def _wide() -> LinearOperator:
    """7 × 3, so that rows taken for columns would show."""
    return _dense().block(["w", "c"], "b")


MAKERS: dict[str, Callable[[], LinearOperator]] = {
    "Hessian": lambda: ev.Hessian(_objective()),
    "Hessian, recomputed": lambda: ev.Hessian(_objective(memory=0)),
    "GaussNewton": lambda: ev.GaussNewton(_objective()),
    "GaussNewton, recomputed": lambda: ev.GaussNewton(_objective(memory=0)),
    "FunctionalHessian": lambda: ev.FunctionalHessian(_objective()),
    "EmpiricalFisher": lambda: ev.EmpiricalFisher(_objective()),
    "CurvatureBlock": lambda: ev.Hessian(_objective()).block(["2.weight", "0.bias"], ["0.weight", "4.bias"]),
    "CurvatureBlock, recomputed": lambda: ev.Hessian(_objective(memory=0)).block("2.weight", ["0.weight", "4.bias"]),
    "CurvatureBlock, principal": lambda: ev.Hessian(_objective()).restrict(["2.weight", "0.bias"]),
    "CurvatureBlock, slices": lambda: ev.GaussNewton(_objective()).block(ev.Part("2.weight", 1, 1, 4), ev.Part("0.weight", 0, 2)),
    "Dense": _dense,
    "Matvec": _matvec,
    "Matvec, from SciPy": lambda: ev.from_matvec(aslinearoperator(_matrix(6).numpy())),
    "Block": _wide,
    "Block, principal": lambda: _dense().restrict(["b", "w"]),
    "Combination": lambda: 2 * _dense() - 0.5 * _matvec() + -_dense(1),
    "Combination, rectangular": lambda: _wide() + 3 * _wide(),
    "Product": lambda: _dense() @ _dense(1),
    "Product, rectangular": lambda: _wide() @ _wide().T @ _wide(),
}


def _concrete(cls: type[LinearOperator] = LinearOperator) -> Iterator[type[LinearOperator]]:
    for each in cls.__subclasses__():
        yield from _concrete(each)
        unfinished = inspect.isabstract(each) or (issubclass(each, CurvatureOperator) and not hasattr(each, "make"))
        if each.__module__.startswith("evolute.") and not unfinished:
            yield each


def test_every_operator_is_registered() -> None:
    for module in pkgutil.walk_packages(ev.__path__, "evolute."):
        importlib.import_module(module.name)
    missing = {cls.__name__ for cls in _concrete()} - {type(make()).__name__ for make in MAKERS.values()}
    assert not missing, f"add a maker of {missing} to MAKERS"


@cache
def _made(name: str) -> LinearOperator:
    return MAKERS[name]()


@cache
def _as_matrix(name: str) -> Tensor:
    """The reference of each property: column after column."""
    return oracles.columns(_made(name))


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def _close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_matrix_is_not_trivial(name: str) -> None:
    assert _as_matrix(name).abs().max() > 1e-3
    assert _as_matrix(name).shape == _made(name).shape


def test_linear(name: str) -> None:
    A, u, v = _made(name), _random(_made(name).shape[1]), _random(_made(name).shape[1])
    _close(A @ (2e3 * u - 3e-3 * v), 2e3 * (A @ u) - 3e-3 * (A @ v))
    assert not (A @ torch.zeros_like(u)).any()


def test_adjoint(name: str) -> None:
    _close(oracles.columns(_made(name).T), _as_matrix(name).T)
    _close(oracles.columns(_made(name).T.T), _as_matrix(name))


def test_symmetric_says_what_is_true(name: str) -> None:
    A, M = _made(name), _as_matrix(name)
    if A.symmetric:
        _close(M, M.T)
    else:
        assert M.shape[0] != M.shape[1] or (M - M.T).norm() > 1e-6 * M.norm()


def test_dense_is_the_operator_on_the_identity(name: str) -> None:
    A = _made(name)
    _close(ev.to_dense(A), _as_matrix(name))
    _close(A @ torch.eye(A.shape[1], dtype=A.dtype), _as_matrix(name))


@pytest.mark.parametrize("extra", [-1, 0, 1, 3])
def test_many_vectors_are_columns(name: str, extra: int) -> None:
    """Less than a block, a whole one, and blocks with a ragged remainder."""
    A = _made(name)
    for blocks in (1, 2):
        V = _random(A.shape[1], max(1, blocks * A.preferred_block + extra))
        _close(A @ V, _as_matrix(name) @ V)


def test_no_vector_at_all(name: str) -> None:
    """The last block of a loop over columns may be empty."""
    m, n = _made(name).shape
    assert tuple((_made(name) @ _random(n, 0)).shape) == (m, 0)


def test_layout_and_gradients_of_the_vector_do_not_matter(name: str) -> None:
    A, V = _made(name), _random(2 * _made(name).shape[1], 3)
    _close(A @ V[::2], _as_matrix(name) @ V[::2])
    _close(A @ V[::2, 1], _as_matrix(name) @ V[::2, 1])
    out = A @ V[::2, 1].clone().requires_grad_()
    assert not out.requires_grad


def test_same_bits_again_and_vector_unchanged(name: str) -> None:
    A, V = _made(name), _random(_made(name).shape[1], 5)
    before, first = V.clone(), A @ V
    again = A @ V
    assert torch.equal(first, again) and torch.equal(V, before)
    first.zero_()  # the caller's own: writing to a result must not reach the operator or the vector
    assert torch.equal(A @ V, again) and torch.equal(V, before)


def test_mapping_in_mapping_out(name: str) -> None:
    A, v = _made(name), _random(_made(name).shape[1])
    out = A @ A.col_space.unflatten(v)
    assert list(out) == list(A.row_space.names)
    assert {key: tuple(value.shape) for key, value in out.items()} == {k: tuple(s) for k, s in A.row_space.shapes.items()}
    _close(A.row_space.flatten(out), _as_matrix(name) @ v)


def test_blocks_reassemble_the_whole(name: str) -> None:
    A = _made(name)
    rows = [torch.cat([ev.to_dense(A.block(r, c)) for c in A.col_space.names], 1) for r in A.row_space.names]
    _close(torch.cat(rows), _as_matrix(name))


def test_blocks_of_slices(name: str) -> None:
    """Slices along the last axis are strided in the flat vector; their order is the order in which they are named."""
    A = _made(name)
    row, col = A.row_space.names[0], A.col_space.names[-1]
    r = _slices(A.row_space, row)
    c = _slices(A.col_space, col)
    places = [_places(space, parts) for space, parts in ((A.row_space, r), (A.col_space, c))]
    _close(ev.to_dense(A.block(r, c)), _as_matrix(name)[places[0]][:, places[1]])


def _slices(space: ev.Space, name: str) -> list[ev.Part]:
    dim = len(space.shapes[name]) - 1
    half = (space.shapes[name][dim] + 1) // 2
    parts = [ev.Part(name, dim, half), ev.Part(name, dim, 0, half)]
    return [part for part in parts if part.shape(space.shapes[name]).numel()]


def _places(space: ev.Space, parts: list[ev.Part]) -> Tensor:
    index = space.unflatten(torch.arange(space.size))
    return torch.cat([part.of(index[part.name]).reshape(-1) for part in parts])


def test_restriction_is_the_principal_block(name: str) -> None:
    A = _made(name)
    if A.row_space != A.col_space:
        return
    chosen = list(A.space.names[::-1][:2])
    B, places = A.restrict(chosen), _places(A.space, [ev.Part(each) for each in chosen])
    _close(ev.to_dense(B), _as_matrix(name)[places][:, places])
    assert B.symmetric == A.symmetric
    _close(ev.to_dense(B.block(chosen[-1], chosen[0])), ev.to_dense(A.block(chosen[-1], chosen[0])))


def test_scipy(name: str) -> None:
    A, M = _made(name).to_scipy(), _as_matrix(name).numpy()
    rng = np.random.default_rng(0)
    x, y, X, Y = (rng.normal(size=s) for s in (M.shape[1], M.shape[0], (M.shape[1], 3), (M.shape[0], 3)))
    assert A.shape == M.shape and A.dtype == np.float64
    for ours, theirs in ((A @ x, M @ x), (A.rmatvec(y), M.T @ y), (A @ X, M @ X), (A.rmatmat(Y), M.T @ Y)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12 * np.abs(M).max())
    assert A.matvec(x[:, None]).shape == (M.shape[0], 1)


def test_scipy_finds_the_spectrum(name: str) -> None:
    if not _made(name).symmetric:
        return
    values = torch.linalg.eigvalsh(_as_matrix(name))
    for which, expected in (("LA", values[-1]), ("SA", values[0])):
        found = eigsh(_made(name).to_scipy(), k=1, which=which, return_eigenvectors=False)[0]
        assert found == pytest.approx(expected.item(), abs=1e-9 * values.abs().max().item())


def test_algebra(name: str) -> None:
    A, M = _made(name), _as_matrix(name)
    for ours, theirs in ((A + A, 2 * M), (-A * 3, -3 * M), (0.5 * A - 2 * A, -1.5 * M), (A @ A.T, M @ M.T), (A.T @ A, M.T @ M)):
        _close(ev.to_dense(ours), theirs)
        _close(ev.to_dense(ours.T), theirs.T)


def test_repr_says_size_and_dtype(name: str) -> None:
    m, n = _made(name).shape
    assert f"{m}×{n}" in repr(_made(name)) and "float64" in repr(_made(name))


# ---------------------------------------------------------------- curvature: every family against the oracles


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    with oracles.double(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "1 parameters|2 parameters", ev.CurvatureWarning)
        yield FAMILIES[request.param]()


def _has_terms(family: Family) -> bool:
    return not isinstance(family.loss, ev.Loss) or family.loss.terms is not None


def _references(family: Family) -> dict[str, Tensor]:
    H, G = oracles.hessian(family), oracles.gauss_newton(family)
    found = {"H": H, "G": G, "F": H - G}
    return found | {"E": oracles.empirical_fisher(family)} if _has_terms(family) else found


def test_families_kept(family: Family) -> None:
    """Every column of each operator, in blocks of many vectors; then vectors one at a time."""
    objective = ev.Objective(family.model, family.batches, family.loss)
    for kind, matrix in _references(family).items():
        op = KINDS[kind](objective)
        size = max(matrix.norm(), 1e-3)
        assert (ev.to_dense(op) - matrix).norm() <= 1e-10 * size, kind
        V = _random(op.shape[1], 3)
        one = torch.stack([op @ v for v in V.T], 1)
        assert (one - matrix @ V).norm() <= 1e-10 * size * V.norm(), kind
        assert op.plan is not None and op.plan.kept == op.plan.batches and not op.plan.notes, f"{kind}: {op.plan}"


def test_families_recomputed(family: Family) -> None:
    objective = ev.Objective(family.model, family.batches, family.loss, memory=0)
    for kind, matrix in _references(family).items():
        op, V = KINDS[kind](objective), _random(matrix.shape[0], 5)
        size = max(matrix.norm(), 1e-3) * V.norm()
        assert (op @ V - matrix @ V).norm() <= 1e-10 * size, kind
        assert (op @ V[:, 0] - matrix @ V[:, 0]).norm() <= 1e-10 * size, kind
        assert op.plan is not None and op.plan.kept == 0


def test_families_gradient_and_value(family: Family) -> None:
    objective = ev.Objective(family.model, family.batches, family.loss)
    assert objective.value() == pytest.approx(oracles.value(family)(oracles.flat(family.model)).item(), rel=1e-12)
    _close(objective.gradient(), oracles.gradient(family), 1e-10)


def test_families_finite_differences(family: Family) -> None:
    objective = ev.Objective(family.model, family.batches, family.loss)
    u = _random(objective.space.size)
    assert oracles.relative(ev.Hessian(objective) @ u, oracles.difference(objective, u)) < 1e-6


def test_families_blocks(family: Family) -> None:
    """Each group against the whole and against another, from the same rows of the full product."""
    objective = ev.Objective(family.model, family.batches, family.loss)
    H, names = ev.Hessian(objective), list(objective.space.groups)
    if len(names) < 2:
        return
    rows, cols = (objective.space.resolve(each) for each in (names[0], names[-1]))
    v = _random(cols.size)
    _close(H.block(names[0], names[-1]) @ v, rows.take(H @ cols.put(v)), 1e-10) if rows.take(H @ cols.put(v)).any() else None
    _close(H.restrict(names[0]) @ rows.take(_ones(H)), rows.take(H @ rows.put(rows.take(_ones(H)))), 1e-10)


def _ones(op: LinearOperator) -> Tensor:
    return torch.ones(op.shape[1], dtype=op.dtype)
