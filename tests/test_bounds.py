"""Bounds of the closed forms: above the true norm, whatever the block, the tokens and the loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import evolute as ev
from evolute.calculus.closed_form import ClosedForm
from evolute.linop.exact import SMALL, spectral
from evolute.zoo import Block, BlockConfig

ROOM = 1 + 1e-9  # rounding, where a bound is attained

options = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post", "none"]),
        "norm_kind": st.sampled_from(["layer", "rms"]),
        "attention": st.sampled_from(["softmax", "linear", "sigmoid", "relu"]),
        "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]),
        "gated": st.booleans(),
        "mlp": st.booleans(),
        "output": st.booleans(),
        "residual": st.booleans(),
        "bias": st.booleans(),
        "causal": st.booleans(),
        "heads": st.sampled_from([1, 2]),
    }
)


def _closed(config: dict[str, object], seed: int, size: float, weight: float) -> ClosedForm:
    generator = torch.Generator().manual_seed(seed)
    block = Block(BlockConfig(width=4, hidden=5, **config)).double()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * weight)
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) * size
    return ev.closed_form(block, x, torch.randn(2, 3, 4, generator=generator, dtype=torch.float64))


def _whole(op: ClosedForm) -> float:
    return float(torch.linalg.matrix_norm(ev.to_dense(op), 2))


@settings(max_examples=40, deadline=None)
@given(options, st.integers(0, 99), st.sampled_from([0.1, 1.0, 5.0]), st.sampled_from([0.2, 1.0]))
def test_no_norm_is_above_its_bound(config: dict[str, object], seed: int, size: float, weight: float) -> None:
    op = _closed(config, seed, size, weight)
    for part in (op, op.outer, op.functional):
        table = part.bounds()
        assert table.norm is not None
        assert bool((table.norm.values_ <= table.bound.values_ * ROOM + 1e-14).all()), f"{table}"
        assert _whole(part) <= table.whole * ROOM + 1e-14
        assert table.whole <= table.by_count * ROOM


def test_the_looseness_is_bound_over_norm() -> None:
    table = _closed({}, 0, 1.0, 1.0).bounds(["q", "v"])
    assert table.norm is not None
    assert table.looseness["q", "v"] == pytest.approx(table.bound["q", "v"] / table.norm["q", "v"])
    assert table.looseness["v", "v"] >= 1


def test_tables_of_no_group_at_all() -> None:
    table = _closed({}, 0, 1.0, 1.0).bounds([])
    assert table.whole == table.by_count == 0 and str(table).startswith("bound")


def test_a_linear_map_under_mse_has_a_tight_bound() -> None:
    """One token, attention alone without W_O: H(V,V) = 2/d · x xᵀ ⊗ I, and its bound is its norm."""
    block = Block(BlockConfig(width=3, mlp=False, output=False, norm="none", residual=False)).double()
    x = torch.tensor([[[1.0, 2.0, 2.0]]], dtype=torch.float64)
    table = ev.closed_form(block, x, torch.zeros_like(x)).bounds(["v"])
    assert table.bound["v", "v"] == pytest.approx(6.0)
    assert table.looseness["v", "v"] == pytest.approx(1.0)


def test_norms_are_those_of_the_entries() -> None:
    op = _closed({"bias": True, "heads": 2}, 1, 1.0, 0.5)
    for kind, order in (("fro", "fro"), ("spectral", 2)):
        table = op.norms(kind)
        for a, b in table:
            matrix = ev.to_dense(op.block(a, b))
            assert table[a, b] == pytest.approx(float(torch.linalg.matrix_norm(matrix, order)), rel=1e-9, abs=1e-13)


def test_a_large_block_takes_lanczos() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.linspace(0, 1, SMALL + 1, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(SMALL + 1, 3, generator=generator, dtype=torch.float64))[0]
    matrix = torch.diag(values) + 4 * basis[:, :1] @ basis[:, :1].T
    expected = float(torch.linalg.eigvalsh(matrix)[-1])
    assert spectral(ev.from_dense(matrix)) == pytest.approx(expected, rel=1e-8)


def test_an_unknown_norm_and_absent_norms_say_so() -> None:
    op = _closed({}, 0, 1.0, 1.0)
    with pytest.raises(ev.VectorError, match="'fro' or 'spectral'"):
        op.norms("nuclear")
    with pytest.raises(ValueError, match="norms=True"):
        _ = op.bounds(norms=False).looseness
    with pytest.raises(ev.UnknownGroupError, match="no group 'z'"):
        op.norms("fro", ["q", "v"])["q", "z"]


def test_the_hessian_in_the_input_against_autograd() -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).double().eval()
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)

    def loss(tokens: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.mse_loss(layer(tokens), y)

    truth = torch.autograd.functional.hessian(loss, x).reshape(24, 24)  # pyright: ignore[reportAttributeAccessIssue]
    op = ev.closed_form(layer, x, y)
    v = torch.randn(24, 2, dtype=torch.float64)
    assert torch.allclose(ev.to_dense(op.input), truth, atol=1e-13)
    assert torch.allclose(op.input @ v, truth @ v, atol=1e-13)
    outer, functional = ev.to_dense(op.outer.input), ev.to_dense(op.functional.input)
    assert torch.allclose(outer + functional, truth, atol=1e-13)
    assert float(torch.linalg.eigvalsh(outer)[0]) > -1e-13


def test_the_gradient_against_autograd() -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True).double().eval()
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    op = ev.closed_form(layer, x, y)
    loss = torch.nn.functional.mse_loss(layer(x), y)
    loss.backward()
    truth = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
    assert torch.allclose(op.gradient(), truth, atol=1e-14)
    assert op.value == pytest.approx(loss.item())
