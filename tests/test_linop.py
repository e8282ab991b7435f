"""Spaces, parts and selections; operators from matrices, functions and SciPy, and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import diags
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import aslinearoperator, cg
from torch import Tensor

import evolute as ev
from evolute.linop import memory
from evolute.linop.space import Selection

SPACE = ev.Space({"w": (2, 3), "s": (), "b": (4,), "e": (0, 5)}, {"all": (ev.Part("w"), ev.Part("b"))}, torch.float64)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _symmetric(size: int, seed: int = 0) -> Tensor:
    m = _random(size, size, seed=seed)
    return m + m.T


# ---------------------------------------------------------------- spaces


def test_flat_order_is_the_order_of_the_names() -> None:
    """Scalars and empty tensors have their place too."""
    pieces = SPACE.unflatten(torch.arange(11.0))
    assert SPACE.size == 11 and SPACE.sizes == (6, 1, 4, 0) and SPACE.offsets() == {"w": 0, "s": 6, "b": 7, "e": 11}
    assert pieces["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and pieces["s"].shape == () and pieces["s"] == 6
    assert pieces["b"].tolist() == [7, 8, 9, 10] and pieces["e"].shape == (0, 5)
    assert torch.equal(SPACE.flatten(pieces), torch.arange(11.0))


def test_many_vectors_unflatten_along_the_last_axis() -> None:
    V = _random(2, 3, 11)
    pieces = SPACE.unflatten(V)
    assert pieces["w"].shape == (2, 3, 2, 3) and pieces["s"].shape == (2, 3)
    assert torch.equal(pieces["b"][1, 2], V[1, 2, 7:])
    pieces["b"].zero_()  # views: what is written to a piece is in the vector
    assert not V[..., 7:].any()


def test_flatten_names_what_is_wrong() -> None:
    good = SPACE.unflatten(torch.zeros(11))
    with pytest.raises(ev.VectorError, match=r"'w': expected shape \(2, 3\), got \(3, 2\)"):
        SPACE.flatten(good | {"w": torch.zeros(3, 2)})
    with pytest.raises(ev.VectorError, match="unknown name 'ww'; near matches: 'w'"):
        SPACE.flatten(good | {"ww": torch.zeros(2)})
    with pytest.raises(ev.VectorError, match=r"1 names? .*missing, 'b'"):
        SPACE.flatten({name: piece for name, piece in good.items() if name != "b"})
    with pytest.raises(ev.VectorError, match="ndarray"):
        SPACE.flatten(good | {"w": np.zeros((2, 3))})  # pyright: ignore


def test_labels_say_which_slice() -> None:
    assert ev.Part("w").label == "w"
    assert ev.Part("w", 0, 0, 64).label == "w[0:64]"
    assert ev.Part("w", 1, 64).label == "w[:, 64:]"
    assert ev.Part("w", 2, None, 5).label == "w[:, :, 0:5]"


def test_a_slice_along_an_axis_that_is_not_there() -> None:
    for dim in (2, -1):
        with pytest.raises(ev.UnknownGroupError, match=rf"no dimension {dim} in 'w' of shape \(2, 3\)"):
            _ = SPACE.resolve(ev.Part("w", dim, 0, 1)).size


def test_groups_names_parts_and_prefixes_resolve() -> None:
    space = ev.Space(
        {"a": (2,), "b": (3,)}, {"x.q": (ev.Part("b", 0, 0, 1),), "x.k": (ev.Part("b", 0, 1),), "y": (ev.Part("a"),)}
    )
    labels = {
        "x.q": ["b[0:1]"],
        "x": ["b[0:1]", "b[1:]"],
        "b": ["b"],
        ev.Part("b", 0, 1, 2): ["b[1:2]"],
        ("y", "x.k"): ["a", "b[1:]"],
        ("y", "a", ev.Part("a")): ["a"],
    }
    for select, expected in labels.items():
        assert list(space.resolve(select).shapes) == expected


def test_unknown_groups_come_with_near_matches() -> None:
    space = ev.Space({"layers.0.q": (2,)}, {"layers.0.attn.q": (ev.Part("layers.0.q"),)})
    with pytest.raises(
        ev.UnknownGroupError, match=r"'layers\.0\.attn\.v'; near matches: .*'layers\.0\.attn\.q'"
    ) as caught:
        space.resolve("layers.0.attn.v")
    assert not str(caught.value).startswith('"'), "a KeyError shows the repr of its message"
    with pytest.raises(ev.UnknownGroupError, match=r"'#'.*there are 'layers\.0\.attn\.q', 'layers\.0\.q'"):
        space.resolve("#")
    with pytest.raises(ev.UnknownGroupError, match="'q'"):
        space.resolve(ev.Part("q", 0, 0, 1))
    with pytest.raises(ev.UnknownGroupError, match="at least one"):
        space.resolve([])


@pytest.mark.parametrize("twice", [["w", ev.Part("w", 0, 0, 1)], [ev.Part("w", 1, 0, 2), ev.Part("w", 0, 1, 2)]])
def test_an_entry_selected_twice_is_refused(twice: list[str | ev.Part]) -> None:
    with pytest.raises(ev.UnknownGroupError, match="twice"):
        SPACE.resolve(twice)


# ---------------------------------------------------------------- selections

_bounds = st.tuples(st.integers(0, 1), st.integers(-5, 5) | st.none(), st.integers(-5, 5) | st.none())


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    """Any slice of the matrix, then some whole names around it, in any order."""
    part = ev.Part("w", *draw(_bounds))
    around = draw(st.lists(st.sampled_from(["s", "b", "e"]), unique=True))
    return SPACE.resolve(draw(st.permutations([part, *around])))


@given(selections(), st.integers(1, 3))
def test_take_is_indexing(selection: Selection, k: int) -> None:
    index = SPACE.unflatten(torch.arange(11))
    places = torch.cat([part.of(index[part.name]).reshape(-1) for part in selection.parts])
    V, x = _random(k, 11), _random(k, selection.size, seed=1)
    assert selection.size == len(places) == selection.space.size
    assert torch.equal(selection.take(V), V[:, places]) and torch.equal(selection.take(V[0]), V[0, places])
    assert torch.equal(selection.put(x), torch.zeros(k, 11, dtype=x.dtype).index_copy(1, places, x))


@given(selections(), st.integers(1, 3))
def test_smallest_selects_the_same_from_less(selection: Selection, k: int) -> None:
    small, V = selection.smallest(), _random(k, 11)
    assert set(small.parent.shapes) == {part.name for part in selection.parts}
    kept = torch.cat([SPACE.unflatten(V)[name].reshape(k, -1) for name in small.parent.shapes], 1)
    assert torch.equal(small.take(kept), selection.take(V))
    assert [name for name in SPACE.shapes if name in small.parent.shapes] == list(small.parent.shapes)


def test_groups_inside_a_selection_keep_their_names() -> None:
    space = ev.Space(
        {"p": (6,), "o": (2,)}, {"q": (ev.Part("p", 0, 0, 3),), "k": (ev.Part("p", 0, 3, 6),), "o": (ev.Part("o"),)}
    )
    op = ev.from_dense(_symmetric(8), space=ev.Space(space.shapes, space.groups, torch.float64))
    inner = op.restrict(["k", "q"])
    assert set(inner.space.groups) == {"q", "k"}
    assert torch.equal(ev.to_dense(inner.block("q", "k")), ev.to_dense(op.block("q", "k")))


# ---------------------------------------------------------------- matrices, functions, SciPy


def test_from_dense_takes_numpy_and_keeps_the_dtype() -> None:
    M = _symmetric(4).float().numpy()
    op = ev.from_dense(M)
    assert op.dtype == torch.float32 and np.array_equal(ev.to_dense(op).numpy(), M)
    ev.to_dense(op).zero_()
    assert np.array_equal(ev.to_dense(op).numpy(), M), "a dense copy is the caller's own"


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_from_dense_forgives_rounding_only(scale: float) -> None:
    """Relative to the size of the matrix, however small that is."""
    M = _symmetric(4) * scale
    bent = M.clone()
    bent[0, 1] *= 1 + 1e-15
    ev.from_dense(bent)
    bent[0, 1] *= 1 + 1e-9
    with pytest.raises(ev.VectorError, match="symmetric matrix"):
        ev.from_dense(bent)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 3), torch.zeros(4), torch.eye(3, dtype=torch.int64), torch.full((2, 2), torch.nan)]
)
def test_from_dense_refuses_what_is_no_symmetric_matrix(wrong: Tensor) -> None:
    with pytest.raises(ev.VectorError, match=r"expected a .*matrix"):
        ev.from_dense(wrong)


def test_from_dense_refuses_a_space_of_another_size() -> None:
    with pytest.raises(ev.VectorError, match=r"11.*3|3.*11"):
        ev.from_dense(torch.eye(3, dtype=torch.float64), space=SPACE)


def test_from_matvec_calls_with_vectors_of_its_own() -> None:
    """A function that writes to its argument does not write to the user's vector."""
    M, v = _symmetric(5), _random(5)
    before, op = v.clone(), ev.from_matvec(lambda x: x.mul_(2), 5, dtype=torch.float64)
    assert torch.equal(op @ v, 2 * before) and torch.equal(v, before)
    assert torch.allclose(ev.from_matvec(lambda x: M @ x, 5, dtype=torch.float64) @ _random(5, 3), M @ _random(5, 3))
    with torch.enable_grad():
        assert not (ev.from_matvec(lambda x: M.requires_grad_() @ x, 5, dtype=torch.float64) @ v).requires_grad


def test_from_matvec_says_what_is_wrong() -> None:
    with pytest.raises(ev.VectorError, match="size is needed"):
        ev.from_matvec(lambda v: v)
    with pytest.raises(ev.VectorError, match=r"function .*SciPy LinearOperator, got Tensor"):
        ev.from_matvec(torch.eye(2), 2)  # pyright: ignore
    with pytest.raises(ev.VectorError, match=r"shape \(3,\), got \(1, 3\)"):
        _ = ev.from_matvec(lambda v: v[None], 3) @ torch.ones(3)


def test_scipy_operators_come_in_and_go_out() -> None:
    band = diags([-1.0, 2.5, -1.0], [-1, 0, 1], shape=(20, 20)).tocsr()
    op, b = ev.from_matvec(aslinearoperator(band)), np.ones(20)
    assert op.dtype == torch.float64
    assert np.allclose((op @ torch.from_numpy(b)).numpy(), band @ b)
    x, info = cg(op.to_scipy(), b, rtol=1e-12)
    assert info == 0 and np.allclose(band @ x, b)
    with pytest.raises(ev.VectorError, match=r"square .*\(2, 3\)"):
        ev.from_matvec(aslinearoperator(np.ones((2, 3))))


def test_scipy_operators_without_a_dtype_or_of_integers_are_float64() -> None:
    for dtype in (None, np.int64):
        op = ev.from_matvec(ScipyOperator((2, 2), matvec=lambda v: 2.0 * v, dtype=dtype))
        assert torch.equal(op @ torch.ones(2, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_to_scipy_of_any_precision(dtype: torch.dtype) -> None:
    """NumPy has no bfloat16: half precision is float32 outside."""
    out = ev.from_dense(torch.eye(3, dtype=dtype) * 2).to_scipy() @ np.ones(3)
    assert np.array_equal(out, [2, 2, 2]) and out.dtype == (np.float64 if dtype == torch.float64 else np.float32)


# ---------------------------------------------------------------- algebra


def test_sums_and_products_check_sizes_and_dtypes() -> None:
    A, B = ev.from_dense(_symmetric(3)), ev.from_dense(_symmetric(4))
    for wrong in (lambda: A + B, lambda: A - ev.from_dense(_symmetric(3).float()), lambda: A @ B):
        with pytest.raises(ev.VectorError, match=r"3×3.*4×4|3×3.*float32|4×4.*3×3|float32.*3×3"):
            wrong()


def test_only_operators_are_added() -> None:
    """A tensor has a shape and a dtype too; the error comes where it is added, not at the first product."""
    A = ev.from_dense(_symmetric(3))
    for other in (_symmetric(3), _symmetric(3).numpy(), 1.0):
        with pytest.raises((ev.VectorError, TypeError)):
            _ = A + other  # pyright: ignore


def test_factors_of_any_kind_scale() -> None:
    M = _symmetric(3)
    A = ev.from_dense(M)
    for scaled in (2 * A, A * 2.0, np.float64(2) * A, A * torch.tensor(2.0), A + A):
        assert isinstance(scaled, ev.LinearOperator) and torch.allclose(ev.to_dense(scaled), 2 * M)


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 3)), min_size=1, max_size=5), st.booleans())
def test_combinations_of_combinations(terms: list[tuple[float, int]], nest: bool) -> None:
    ops, matrices = [ev.from_dense(_symmetric(4, i)) for i in range(4)], [_symmetric(4, i) for i in range(4)]
    total, matrix = ops[0], matrices[0]
    for factor, i in terms:
        total = 0.5 * (total - factor * ops[i]) if nest else total + ops[i] * factor
        matrix = 0.5 * (matrix - factor * matrices[i]) if nest else matrix + matrices[i] * factor
    assert torch.allclose(ev.to_dense(total), matrix, atol=1e-12) and total.symmetric


# ---------------------------------------------------------------- memory


def test_too_large_a_matrix_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    op = ev.from_matvec(lambda v: v, 40, dtype=torch.float64)
    with pytest.raises(ev.TooLargeError, match=r"40×40 .*needs 13\.1 kB; 1\.0 kB .*free on cpu.*restrict"):
        ev.to_dense(op)
    assert torch.equal(ev.to_dense(op.restrict(ev.Part("v", 0, 3, 8))), torch.eye(5, dtype=torch.float64))


def test_too_large_is_a_memory_error_and_nothing_was_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 0)
    calls: list[int] = []
    with pytest.raises(MemoryError):
        ev.to_dense(ev.from_matvec(lambda v: calls.append(1) or v, 3))
    assert not calls


def test_to_dense_of_something_else() -> None:
    with pytest.raises(ev.VectorError, match="expected an operator, got Tensor; see from_dense"):
        ev.to_dense(torch.eye(2))


def test_words_for_bytes() -> None:
    assert [memory.human(n) for n in (0, 999, 1000, 34_359_738_368, 7e12, 7e15)] == [
        "0 B", "999 B", "1.0 kB", "34.4 GB", "7.0 TB", "7000.0 TB",
    ]  # fmt: skip
