"""LayerNorm's second derivative in closed form against autograd's own, and against a plain formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from evolute.engine.layer_norm import layer_norm, supported


def plain(x, weight, bias, eps):
    """(x − mean)/√(var + ε) ⊙ γ + β, from primitive operations."""
    centred = x - x.mean(-1, keepdim=True)
    z = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z if weight is None else z * weight
    return z if bias is None else z + bias


def hessian_product(function, leaves, upstream, vector):
    """∂(∇⟨upstream, f⟩·vector): the product that the engine needs, upstream's own derivative included."""
    leaves = [leaf.clone().requires_grad_() for leaf in [*leaves, upstream]]
    total = (function(*leaves[:-1]) * leaves[-1]).sum()
    gradient = torch.autograd.grad(total, leaves, create_graph=True)
    return torch.autograd.grad(gradient, leaves, vector)


@settings(max_examples=30, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    d=st.integers(1, 7),
    affine=st.sampled_from(["both", "weight", "none"]),
    eps=st.sampled_from([1e-5, 1e-1]),
    seed=st.integers(0, 99),
)
def test_second_derivative_is_that_of_the_formula(lead, d, affine, eps, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [draw(*lead, d)] + [draw(d) for _ in range({"both": 2, "weight": 1, "none": 0}[affine])]
    pad = [None] * (3 - len(leaves))
    upstream = draw(*lead, d)
    vector = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in [*leaves, upstream]]
    ours = hessian_product(lambda *a: layer_norm(*a, *pad, eps), leaves, upstream, vector)
    theirs = hessian_product(lambda *a: plain(*a, *pad, eps), leaves, upstream, vector)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-9, atol=1e-9 * (1 + other.abs().max()))


def test_gradcheck_once_and_twice():
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (4,), (4,)))
    assert gradcheck(lambda *a: layer_norm(*a, 1e-5), (x, w, b))
    assert gradgradcheck(lambda *a: layer_norm(*a, 1e-5), (x, w, b))


def test_only_part_of_the_inputs_need_a_gradient():
    """Frozen weights and a frozen input: what is not wanted is not computed, what is wanted stays right."""
    x, w, b = torch.randn(3, 5).double(), torch.randn(5).double(), torch.randn(5).double()
    for chosen in (0, 1, 2):
        leaves = [x.clone(), w.clone(), b.clone()]
        leaves[chosen].requires_grad_()
        results = []
        for function in (layer_norm, plain):
            (gradient,) = torch.autograd.grad(function(*leaves, 1e-5).square().sum(), leaves[chosen], create_graph=True)
            (second,) = torch.autograd.grad(gradient.sum(), leaves[chosen])
            results.append(second)
        assert torch.allclose(*results, rtol=1e-9)


def test_mixed_precision_is_left_to_pytorch():
    assert supported(torch.ones(2, 3), (3,), torch.ones(3), None)
    assert not supported(torch.ones(2, 3).bfloat16(), (3,), torch.ones(3), None)
    assert not supported(torch.ones(2, 3), (2, 3), None, None)


@pytest.mark.parametrize("rows", [1, 4])
def test_constant_rows_stay_finite(rows):
    """A row without variance: σ = √ε, no division by zero."""
    x = torch.ones(rows, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer_norm(x, None, None, 1e-5)[:, 0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient[:, 1].sum(), x)
    assert torch.isfinite(second).all()
