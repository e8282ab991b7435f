"""The published theorems on random sizes, the bounds where they are nearly attained, and the counterexamples."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evolute import verify
from evolute.calculus.published import attention, block, bounds, counterexamples, derivatives, layernorm
from evolute.calculus.published.algebra import by_left, by_right, commutation, khatri_rao, kron, norm, spread, vec
from evolute.calculus.published.attention import SelfAttention
from evolute.calculus.published.block import Block
from evolute.verify import attention as autodiff
from evolute.verify import block as block_autodiff
from evolute.verify import oracle
from evolute.verify.statement import Sampler, relative_error

PAIRS = [(i, j) for i in derivatives.GROUPS for j in derivatives.GROUPS]
ROOM = 1 + 1e-10


def close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool((ours - theirs).norm() <= 1e-11 * (1 + theirs.norm()))


@st.composite
def attentions(draw: st.DrawFn) -> SelfAttention:
    """L, d_V and d_K from 1; small and large weights; tokens that repeat; targets that are met."""
    sampler = Sampler(draw(st.integers(0, 2**31)))
    a = autodiff.with_sizes(sampler, draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    size, X = draw(st.sampled_from([0.1, 1.0, 3.0])), draw(st.sampled_from([a.X, a.X[:1].expand_as(a.X)]))
    Y = draw(st.sampled_from([a.Y, torch.zeros_like(a.Y)]))
    return SelfAttention(X, size * a.W_Q, size * a.W_K, a.W_V, Y)


# ---------------------------------------------------------------- the algebra


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_vec_of_products_and_of_kronecker_products(m: int, n: int, p: int, q: int) -> None:
    draw = Sampler(m + 10 * n + 100 * p)
    A, B, C = draw.normal(m, n), draw.normal(p, q), draw.normal(n, p)
    assert close(vec(A @ C @ B), kron(A, B.T) @ vec(C))
    assert torch.equal(commutation(n, m) @ vec(A), vec(A.T))
    assert torch.equal(spread(m, n, p, q) @ kron(vec(A), vec(B)), vec(kron(A, B)))
    assert close(by_left(m, n, B) @ vec(A), vec(kron(A, B)))
    assert close(by_right(A, p, q) @ vec(B), vec(kron(A, B)))
    assert torch.equal(kron(A, B), torch.kron(A, B))


def test_khatri_rao_is_a_kronecker_product_for_each_block() -> None:
    A, B = torch.randn(3, 1, 2), torch.randn(3, 4, 5)
    assert torch.equal(khatri_rao(A, B)[4:8], torch.kron(A[1], B[1]))


# ---------------------------------------------------------------- attention


@given(attentions())
def test_moments_are_those_of_each_row(a: SelfAttention) -> None:
    for i in range(a.L):
        m = sum(a.A[i, j] * a.X[j] for j in range(a.L))
        cs = [a.X[j] - m for j in range(a.L)]
        assert close(a.M1[i], m)
        assert close(a.M2[i], sum(a.A[i, j] * torch.outer(c, c) for j, c in enumerate(cs)))
        third = sum(a.A[i, j] * torch.kron(c[:, None].contiguous(), torch.outer(c, c)) for j, c in enumerate(cs))
        assert close(a.M3[i], third)


@given(attentions(), st.sampled_from([*attention.OUTER]))
def test_the_printed_blocks_are_those_of_autograd(a: SelfAttention, pair: str) -> None:
    assert close(attention.OUTER[pair](a), autodiff.outer(a, *pair))
    assert close(attention.FUNCTIONAL[pair](a), autodiff.functional(a, *pair))


@given(attentions())
def test_all_nine_blocks_make_the_hessian(a: SelfAttention) -> None:
    H = derivatives.hessian(a)
    assert close(H, oracle.hessian(autodiff.loss(a), autodiff.weights(a))) and close(H, H.T)


@pytest.mark.parametrize(("i", "j"), PAIRS)
def test_second_derivatives_of_every_output(i: str, j: str) -> None:
    a = autodiff.sample(Sampler(5))
    theirs = oracle.second(autodiff.forward(a), autodiff.weights(a), autodiff.PLACE[i], autodiff.PLACE[j])
    assert close(derivatives.second(a, i, j), theirs)


# ---------------------------------------------------------------- LayerNorm


@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([1e-5, 0.1, 10.0]), st.integers(0, 1000))
def test_layernorm_twice_differentiated(L: int, d: int, eps: float, seed: int) -> None:
    X = Sampler(seed).normal(L, d)

    def theirs(X: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(X, (d,), eps=eps)

    assert close(layernorm.layernorm(X, eps), theirs(X))
    J, H = layernorm.jacobian(X, eps), layernorm.hessian(X, eps)
    J_theirs, H_theirs = oracle.jacobian(theirs, [X], 0), oracle.second(theirs, [X], 0, 0)
    scale = eps**-0.5, 1 / eps  # one feature, or two: the derivative nearly vanishes, its terms do not
    assert (J - J_theirs).norm() <= 1e-12 * (J_theirs.norm() + scale[0])
    assert (H - H_theirs).norm() <= 1e-12 * (H_theirs.norm() + scale[1])


def test_layernorm_of_a_token_without_variance() -> None:
    """Exact for ε > 0: J = C/√ε and no curvature."""
    X = torch.full((1, 4), 3.0, dtype=torch.float64)
    C = torch.eye(4, dtype=torch.float64) - 0.25
    assert close(layernorm.jacobian(X, 0.25), 2 * C) and not layernorm.hessian(X, 0.25).any()


def test_the_jacobian_without_scale_is_right_where_the_scale_is_constant() -> None:
    """The other way round: the term left out vanishes where ε outweighs the variance."""
    X = Sampler(0).normal(2, 4)
    near = relative_error(layernorm.jacobian_without_scale(X, 1e8), layernorm.jacobian(X, 1e8))
    far = relative_error(layernorm.jacobian_without_scale(X, 1e-5), layernorm.jacobian(X, 1e-5))
    assert near < 1e-7 and far > 0.1


# ---------------------------------------------------------------- the block


@settings(max_examples=6)
@given(st.integers(0, 1000), st.sampled_from(block.GROUPS), st.sampled_from(block.GROUPS))
def test_the_block_is_that_of_autograd(seed: int, i: str, j: str) -> None:
    b = block_autodiff.sample(Sampler(seed))
    Z, w, places = block_autodiff.forward(b), block_autodiff.weights(b), [*block.GROUPS]
    assert close(b.Z, Z(*w))
    assert close(block.jacobian_block(b, i), oracle.jacobian(Z, w, places.index(i)))
    ours, theirs = block.hessian_block(b, i, j), oracle.second(Z, w, places.index(i), places.index(j))
    assert relative_error(ours, theirs) < 1e-9


def test_the_oracle_is_that_of_one_cotangent_after_the_other() -> None:
    """Batched reverse passes go through other rules of PyTorch; here they agree with plain ones."""
    b = block_autodiff.sample(Sampler(1))
    Z, w = block_autodiff.forward(b), block_autodiff.weights(b)

    def slopes(W_V: Tensor) -> Tensor:
        at = [w[0], w[1], W_V, w[3], w[4]]
        out = torch.autograd.functional.jacobian(lambda W1: Z(*at[:3], W1, at[4]), at[3], create_graph=True)
        assert isinstance(out, Tensor)
        return out.reshape(-1)

    plain = torch.autograd.functional.jacobian(slopes, w[2])
    assert isinstance(plain, Tensor)
    assert relative_error(oracle.second(Z, w, 3, 2), plain.reshape(-1, w[2].numel())) < 1e-12


def test_the_second_derivative_is_that_of_finite_differences() -> None:
    b = block_autodiff.sample(Sampler(4))
    h, moved = 1e-6, torch.zeros_like(b.W1)
    moved[0, 0] = h
    up, down = (block.jacobian_block(Block(b.attention, b.W1 + s * moved, b.W2, b.eps), "Q") for s in (1, -1))
    assert torch.allclose(block.hessian_block(b, "Q", "1")[:, 0], ((up - down) / (2 * h)).reshape(-1), atol=1e-6)


# ---------------------------------------------------------------- bounds


@given(attentions())
def test_no_block_is_above_its_bound(a: SelfAttention) -> None:
    for pair in attention.OUTER:
        assert norm(attention.OUTER[pair](a)) <= bounds.CORRECTED_OUTER[pair](a) * ROOM
        assert norm(attention.FUNCTIONAL[pair](a)) <= bounds.FUNCTIONAL[pair](a) * ROOM
    size = norm(a.X)
    assert norm(a.Z1) <= size**3 / 2 * ROOM <= bounds.first_moment(a)
    assert norm(a.Z2) <= math.sqrt(3) / 2 * size**5 * ROOM


@given(attentions())
def test_the_whole_is_below_the_matrix_of_bounds_and_that_below_three_times_the_maximum(a: SelfAttention) -> None:
    b = bounds.block_bounds(a, bounds.CORRECTED_OUTER)
    assert norm(derivatives.hessian(a)) <= bounds.whole(b) * ROOM
    assert bounds.whole(b) <= bounds.whole_by_count(b) * ROOM == 3 * float(b.max()) * ROOM


@settings(max_examples=5)
@given(st.integers(0, 1000))
def test_the_block_is_below_its_bounds(seed: int) -> None:
    b = block_autodiff.sample(Sampler(seed))
    for i, j in ("QQ", "QK", "VQ", "V1", "22", "12"):
        assert norm(block.hessian_block(b, i, j)) <= bounds.block_second(b, i, j) * ROOM
    assert norm(layernorm.jacobian(b.S, b.eps)) <= bounds.layernorm_jacobian(b.S, b.eps) * ROOM
    assert norm(layernorm.hessian(b.S, b.eps)) <= bounds.layernorm_hessian(b.S, b.eps) * ROOM


def test_the_corrected_bounds_are_nearly_attained() -> None:
    """They cannot be improved by more than a few percent without more knowledge of the tokens."""
    a, b = counterexamples.one_token_that_all_look_at(), counterexamples.ten_tokens_that_look_at_two()
    assert norm(attention.outer_vv(a)) > 0.98 * bounds.outer_vv_corrected(a)
    assert norm(attention.outer_vq(b)) > 0.98 * bounds.outer_vq_corrected(b)


# ---------------------------------------------------------------- errata


def test_every_erratum_fails_at_its_counterexample_by_autograd() -> None:
    errata = [statement for statement in verify.registered() if statement.erratum]
    assert len(errata) == 7
    for outcome in verify.run(errata, trials=1):
        assert not outcome.holds and outcome.largest_error > 0.1, outcome.name
        assert ("shapes cannot be multiplied" in outcome.note) is ("⊗ before the product" in outcome.says)
        assert outcome.note == "" or "⊗ before the product" in outcome.says, "a number, not an accident"


@pytest.mark.parametrize("name", ["one_token_that_all_look_at", "ten_tokens_that_look_at_two", "orthogonal_tokens"])
def test_what_holds_holds_at_the_counterexamples_too(name: str) -> None:
    a: SelfAttention = getattr(counterexamples, name)()
    for pair in attention.OUTER:
        assert close(attention.OUTER[pair](a), autodiff.outer(a, *pair))
        assert norm(attention.OUTER[pair](a)) <= bounds.CORRECTED_OUTER[pair](a) * ROOM
    whole = norm(oracle.hessian(autodiff.loss(a), autodiff.weights(a)))
    assert whole <= bounds.whole(bounds.block_bounds(a, bounds.CORRECTED_OUTER)) * ROOM


@pytest.mark.parametrize(("d_V", "d_K", "agree"), [(2, 2, True), (3, 1, True), (2, 3, False), (3, 2, False)])
def test_where_the_two_commutation_matrices_differ(d_V: int, d_K: int, agree: bool) -> None:
    a = autodiff.with_sizes(Sampler(0), 3, d_V, d_K)
    assert (relative_error(attention.outer_qk_rowwise(a), attention.outer_qk(a)) < 1e-12) is agree


def test_the_tight_reading_fits_for_one_key_feature_only() -> None:
    a = autodiff.with_sizes(Sampler(0), 3, 3, 1)
    assert close(attention.functional_qk_tight(a), attention.functional_qk(a))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        attention.functional_qk_tight(autodiff.with_sizes(Sampler(0), 3, 3, 2))
