"""What every operator has to be, and what the curvature operators are: against oracles, for every family of models."""

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator, eigsh
from torch import Tensor, nn

import evolute as ev
import oracles
from evolute.calculus.closed_block import ClosedBlock
from evolute.calculus.closed_form import ClosedForm
from evolute.engine.operators import CurvatureOperator
from evolute.linop import LinearOperator
from evolute.linop.kronecker import KroneckerSum
from evolute.report.clock import Clock, Stage, bar
from families import FAMILIES, Family

KINDS: dict[str, type[CurvatureOperator]] = {
    "H": ev.Hessian,
    "G": ev.GaussNewton,
    "F": ev.FunctionalHessian,
    "E": ev.EmpiricalFisher,
}


def _objective(name: str = "mlp, mse", **options: Any) -> ev.Objective:
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


def _closed() -> ClosedForm:
    """A post-norm block with biases: 8 groups of weights, 8 of biases and norms."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, activation="gelu").double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return ev.closed_form(layer, *(torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2)))


def _kronecker(rows: list[str], cols: list[str]) -> KroneckerSum:
    block = _closed().block(rows, cols)
    assert isinstance(block, ClosedBlock)
    return block.kronecker


def _watched() -> LinearOperator:
    """As a report multiplies: counted, within a budget."""
    clock = Clock(None, bar(wanted=False, total=1))
    return Stage(clock, "products", 1).watched(ev.Hessian(_objective()))


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
    "CurvatureBlock, slices": lambda: ev.GaussNewton(_objective()).block(
        ev.Part("2.weight", 1, 1, 4), ev.Part("0.weight", 0, 2)
    ),
    "Watched": _watched,
    "ClosedForm": _closed,
    "ClosedForm, outer": lambda: _closed().outer,
    "ClosedForm, functional": lambda: _closed().functional,
    "ClosedBlock": lambda: _closed().block(["w1", "q", "norm1.bias"], ["k", "w2.bias", "norm2.weight"]),
    "ClosedBlock, principal": lambda: _closed().restrict(["v", "norm1.weight", "k"]),
    "KroneckerSum": lambda: _kronecker(["w1", "k", "norm1.bias"], ["q", "w2.bias"]),
    "KroneckerSum, principal": lambda: _kronecker(["v", "norm1.weight", "k"], ["v", "norm1.weight", "k"]),
    "InputHessian": lambda: _closed().input,
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
    assert {key: tuple(value.shape) for key, value in out.items()} == {
        k: tuple(s) for k, s in A.row_space.shapes.items()
    }
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
    for ours, theirs in (
        (A + A, 2 * M),
        (-A * 3, -3 * M),
        (0.5 * A - 2 * A, -1.5 * M),
        (A @ A.T, M @ M.T),
        (A.T @ A, M.T @ M),
    ):
        _close(ev.to_dense(ours), theirs)
        _close(ev.to_dense(ours.T), theirs.T)


def test_repr_says_size_and_dtype(name: str) -> None:
    m, n = _made(name).shape
    assert f"{m}×{n}" in repr(_made(name)) and "float64" in repr(_made(name))


# ---------------------------------------------------------------- curvature: every family against the oracles


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    with oracles.double(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "2 parameters are not used", ev.CurvatureWarning)
        yield FAMILIES[request.param]()


def _of(family: Family, **options: Any) -> ev.Objective:
    return ev.Objective(family.model, family.batches, family.loss, **options)


def _references(family: Family) -> dict[str, Tensor]:
    H, G = oracles.hessian(family), oracles.gauss_newton(family)
    has_terms = not isinstance(family.loss, ev.Loss) or family.loss.terms is not None
    return {"H": H, "G": G, "F": H - G} | ({"E": oracles.empirical_fisher(family)} if has_terms else {})


def _agrees(op: LinearOperator, matrix: Tensor, vectors: int) -> None:
    """Of the size of H for F, which may vanish."""
    V = _random(op.shape[1], vectors)
    V = V if vectors > 1 else V[:, 0]
    assert (op @ V - matrix @ V).norm() <= 1e-10 * max(matrix.norm(), 1e-3) * V.norm(), op


def test_the_two_oracles_agree(family: Family) -> None:
    """Forward over reverse and reverse over reverse go through other rules of PyTorch."""
    _close(oracles.hessian(family), oracles.hessian_in_reverse(family), 1e-13)


def test_families_kept(family: Family) -> None:
    """Vectors one at a time, less than a block, and two blocks with a remainder."""
    objective = _of(family)
    for kind, matrix in _references(family).items():
        op = KINDS[kind](objective)
        for vectors in (1, 3, 2 * op.preferred_block + 3):
            _agrees(op, matrix, vectors)
        assert op.plan is not None and op.plan.kept == op.plan.batches and not op.plan.notes, f"{kind}: {op.plan}"


def test_families_recomputed(family: Family) -> None:
    objective = _of(family, memory=0)
    for kind, matrix in _references(family).items():
        op = KINDS[kind](objective)
        _agrees(op, matrix, 1)
        _agrees(op, matrix, 4)
        assert op.plan is not None and op.plan.kept == 0


def test_some_batches_kept_and_some_recomputed() -> None:
    family = FAMILIES["gpt2"]()
    whole = ev.Hessian(_of(family))
    assert whole.preferred_block and whole.plan
    op = ev.Hessian(_of(family, memory=whole.plan.kept_bytes * 3 // 4))
    _agrees(op, oracles.hessian(family), 40)
    assert op.plan and 0 < op.plan.kept < op.plan.batches and op.plan.kept_bytes <= op.plan.budget


def test_families_gradient_and_value(family: Family) -> None:
    assert _of(family).value() == pytest.approx(oracles.value(family)(oracles.flat(family.model)).item(), rel=1e-12)
    _close(_of(family).gradient(), oracles.gradient(family), 1e-10)


def test_families_finite_differences(family: Family) -> None:
    objective = _of(family)
    u = _random(objective.space.size)
    assert oracles.relative(ev.Hessian(objective) @ u, oracles.difference(objective, u)) < 1e-6


@pytest.mark.parametrize("memory", [None, 0])
def test_families_blocks(family: Family, memory: int | None) -> None:
    """Each group against itself and the next, from rows of the full product: a block skips what it does not need."""
    H = ev.Hessian(_of(family, memory=memory))
    names = list(H.space.groups)
    for row, col in [
        (name, other) for name, follow in zip(names, names[1:] + names[:1], strict=True) for other in (name, follow)
    ]:
        rows, cols = H.space.resolve(row), H.space.resolve(col)
        V = _random(cols.size, 2)
        theirs = rows.take((H @ cols.put(V.T).T).T).T
        assert (H.block(row, col) @ V - theirs).norm() <= 1e-11 * max(theirs.norm(), V.norm() * 1e-3), (row, col)


def test_families_hessian_is_the_sum_of_its_parts(family: Family) -> None:
    objective = _of(family)
    V = _random(objective.space.size, 2)
    H, G, F = (KINDS[kind](objective) for kind in "HGF")
    assert (H @ V - (G + F) @ V).norm() <= 1e-11 * (H @ V).norm()


@pytest.mark.parametrize("kind", ["G", "E"])
@pytest.mark.parametrize("name", ["mlp, mse", "mlp, bce", "two towers, contrastive", "tied embeddings", "gpt2, lora"])
def test_positive_semidefinite(name: str, kind: str) -> None:
    values = torch.linalg.eigvalsh(ev.to_dense(KINDS[kind](_objective(name))))
    assert values[-1] > 0 and values[0] >= -1e-12 * values[-1]


# ---------------------------------------------------------------- scale, tied, unused, frozen, scalar


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_scaled_loss_scales_the_operator(kind: str, factor: float) -> None:
    """To rounding, over twelve orders of magnitude: no ε is added to anything. E is quadratic in the loss."""
    family = FAMILIES["mlp, mse"]()

    def terms(output: Tensor, batch: Any) -> Tensor:
        return factor * (output - batch[1]).square().reshape(-1)

    loss = ev.Loss(lambda model, batch: model(batch[0]), lambda out, b: (terms(out, b).sum(), out.numel()), terms)
    scaled = KINDS[kind](ev.Objective(family.model, family.batches, loss))
    plain = KINDS[kind](_of(family))
    V = _random(plain.shape[1], 4)
    _close(scaled @ V, (factor**2 if kind == "E" else factor) * (plain @ V), 1e-13)
    _close(scaled @ V[:, 0], (factor**2 if kind == "E" else factor) * (plain @ V[:, 0]), 1e-13)


def test_sum_is_the_mean_times_the_number_of_terms() -> None:
    family = FAMILIES["mlp, mse"]()
    count = sum(y.numel() for _, y in family.batches)
    total = ev.Objective(family.model, family.batches, nn.MSELoss(reduction="sum"))
    assert total.value() == pytest.approx(count * _of(family).value(), rel=1e-13)
    for op in KINDS.values():
        _close(ev.to_dense(op(total)), count * ev.to_dense(op(_of(family))), 1e-13)


def test_tied_weights_count_once() -> None:
    """The curvature along both of its uses together; twice in the space would be another operator."""
    objective = _objective("tied embeddings")
    assert objective.space.names == ("embed.weight", "mix.weight", "mix.bias", "unembed.bias")
    with torch.no_grad():
        assert objective.model.unembed.weight is objective.model.embed.weight  # pyright: ignore


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [None, 0])
def test_unused_parameters_are_zero_rows_and_named_once(kind: str, memory: int | None) -> None:
    objective = _objective("unused parameter", memory=memory)
    op = KINDS[kind](objective)
    with pytest.warns(ev.CurvatureWarning, match=r"2 parameters .*unused\.weight, unused\.bias") as caught:
        matrix = op @ torch.eye(op.shape[1], dtype=op.dtype)
    assert len(caught) == 1 and objective.unused == ("unused.weight", "unused.bias")
    places = _places(op.space, [ev.Part(name) for name in objective.unused])
    assert not matrix[places].any() and not matrix[:, places].any() and matrix.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ev.CurvatureWarning)
        objective.gradient()


def test_unused_parameters_are_named_by_the_gradient_too() -> None:
    objective = _objective("unused parameter")
    with pytest.warns(ev.CurvatureWarning, match=r"unused\.weight"):
        gradient = objective.space.unflatten(objective.gradient())
    assert not gradient["unused.weight"].any() and gradient["used.weight"].any()


def test_frozen_parameters_are_left_out_and_params_chooses() -> None:
    """The space is the trainable parameters unless the user says otherwise; flags are as they were afterwards."""
    family = FAMILIES["mlp, mse"]()
    whole, names = ev.to_dense(ev.Hessian(_of(family))), list(dict(family.model.named_parameters()))
    family.model[2].requires_grad_(False)
    places = {name: _places(_of(family, params=names).space, [ev.Part(name)]) for name in names}
    for params, expected in (
        (None, [n for n in names if not n.startswith("2")]),
        ("2", ["2.weight", "2.bias"]),
        (names, names),
    ):
        objective = _of(family, params=params)
        index = torch.cat([places[name] for name in expected])
        assert list(objective.space.names) == expected
        _close(ev.to_dense(ev.Hessian(objective)), whole[index][:, index], 1e-11)
        _close(ev.to_dense(ev.Hessian(_of(family, params=params, memory=0))), whole[index][:, index], 1e-11)
    assert [p.requires_grad for p in family.model.parameters()] == [not n.startswith("2") for n in names]


def test_adapters_are_the_space_of_a_low_rank_model() -> None:
    assert all("lora_" in name for name in _objective("gpt2, lora").space.names)


class _Hollow(nn.Module):
    """A parameter without entries, as `nn.Linear(0, …)` has one."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.some = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.some).exp() + self.none.sum()


@pytest.mark.parametrize("memory", [None, 0])
def test_a_parameter_without_entries_takes_no_part(memory: int | None) -> None:
    objective = ev.Objective(_Hollow(), [(torch.ones(3, 2), torch.ones(3, 2))], nn.MSELoss(), memory=memory)
    op = ev.Hessian(objective)
    expected = (2 * torch.e**2 - torch.e) * torch.eye(2)  # of the mean of (eʷ − 1)² over two entries, at w = 1
    assert torch.allclose(ev.to_dense(op), expected) and torch.allclose(op @ torch.eye(2), expected)
    assert torch.allclose(op @ torch.ones(2, 35), expected.sum(1, keepdim=True).expand(2, 35))
