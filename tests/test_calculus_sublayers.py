"""Each sublayer alone: value, Jacobian and curvature against autodiff, finite differences and plain loops."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import hessian, jacrev
from torch.nn import functional as F

import evolute as ev
from evolute.calculus.activations import ACTIVATIONS
from evolute.calculus.local import LocalMap

D = torch.float64
SMOOTH = [name for name, phi in ACTIVATIONS.items() if not phi.kinked]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
KINDS = ["softmax", "linear", "sigmoid", "relu"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def agree(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= tolerance * max(1.0, float(theirs.norm()))


def slopes(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Token after token: ∂f/∂x, (n, q, p)."""
    return torch.stack([jacrev(lambda token: f(token[None])[0])(token) for token in x])


def bends(f: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    """Token after token: Σ g ∂²f, (n, p, p)."""
    pairs = zip(x, g, strict=True)
    return torch.stack([hessian(lambda token, up=up: (f(token[None])[0] * up).sum())(token) for token, up in pairs])


def check_local(point: LocalMap, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Everything that a token-wise map says."""
    g = normal(*point.value.shape, seed=9)
    tangent = normal(2, *x.shape, seed=8)
    J, C = slopes(f, x), bends(f, x, g)
    agree(point.value, f(x))
    agree(point.jacobian, J)
    agree(point.curvature(g), C)
    agree(point.push(tangent), torch.einsum("tqp,ktp->ktq", J, tangent))
    agree(point.pull(g), torch.einsum("tqp,tq->tp", J, g))
    agree(point.bend(g, tangent), torch.einsum("tpr,ktr->ktp", C, tangent))


def check_by_differences(point: LocalMap, make: Callable[[Tensor], LocalMap], x: Tensor, step: float = 1e-5) -> None:
    """The value's own word on the Jacobian, and the Jacobian's on the curvature."""
    direction, g = normal(*x.shape, seed=7), normal(*point.value.shape, seed=6)
    up, down = make(x + step * direction), make(x - step * direction)
    agree(point.push(direction[None])[0], (up.value - down.value) / (2 * step), 1e-7)
    agree(point.bend(g, direction[None])[0], (up.pull(g) - down.pull(g)) / (2 * step), 1e-7)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))  # tokens, features, seed


# ---------------------------------------------------------------- activations


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_against_autodiff(name: str) -> None:
    x = torch.linspace(-6, 6, 41, dtype=D).add(0.013)[:, None]
    check_local(ev.calculus.activation(x, name), TORCH[name], x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_against_finite_differences(name: str) -> None:
    x = torch.linspace(-3, 3, 12, dtype=D).add(0.013).reshape(4, 3)
    check_by_differences(ev.calculus.activation(x, name), lambda x: ev.calculus.activation(x, name), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_slope_is_above_the_steepest(name: str) -> None:
    x = torch.linspace(-8, 8, 4001, dtype=D)
    phi, steepest = ACTIVATIONS[name], ACTIVATIONS[name].slope(x).abs().max()
    assert steepest <= phi.steepest <= 1.05 * max(float(steepest), 0.25)


@pytest.mark.parametrize("name", SMOOTH)
def test_activations_are_finite_far_out(name: str) -> None:
    point = ev.calculus.activation(torch.tensor([[-60.0, 60.0]], dtype=D), name)
    assert all(each.isfinite().all() for each in (point.value, point.slope, point.second))


def test_an_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ev.ModelError, match=r"out of relu, gelu, gelu_tanh.*got 'mish'"):
        ev.calculus.activation(torch.ones(1, 1), "mish")


# ---------------------------------------------------------------- normalisation


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """From primitive operations: PyTorch's own has a wrong batching rule for second derivatives."""
    c = x - x.mean(-1, keepdim=True)
    z = c / (c.square().mean(-1, keepdim=True) + eps).sqrt()
    z = z if weight is None else z * weight
    return z if bias is None else z + bias


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    z = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return z if weight is None else z * weight


@pytest.mark.parametrize("affine", ["none", "weight", "both"])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1, 1.0])
@given(shape=shapes)
def test_layernorm_against_autodiff(shape: tuple[int, int, int], affine: str, eps: float) -> None:
    n, d, seed = shape
    d += 2 * (eps == 0)  # two features without ε are ±1, one is 0/0
    x = normal(n, d, seed=seed)
    weight = None if affine == "none" else normal(d, seed=1)
    bias = normal(d, seed=2) if affine == "both" else None
    point = ev.calculus.layernorm(x, weight, bias, eps)
    check_local(point, lambda x: layer_norm(x, weight, bias, eps), x)
    agree(point.value, F.layer_norm(x, (d,), weight, bias, eps))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
@given(shape=shapes, scaled=st.booleans())
def test_rmsnorm_against_autodiff(shape: tuple[int, int, int], scaled: bool, eps: float) -> None:
    n, d, seed = shape
    x, weight = normal(n, d + 1, seed=seed), normal(d + 1, seed=1) if scaled else None
    point = ev.calculus.rmsnorm(x, weight, eps)
    check_local(point, lambda x: rms_norm(x, weight, eps), x)
    agree(point.value, F.rms_norm(x, (d + 1,), weight, eps))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_normalisation_against_finite_differences(kind: str) -> None:
    make = ev.calculus.layernorm if kind == "layer" else ev.calculus.rmsnorm
    x, weight = normal(3, 5), normal(5, seed=1)
    check_by_differences(make(x, weight), lambda x: make(x, weight), x)


@pytest.mark.parametrize("centred", [True, False])
def test_normalisation_against_plain_loops(centred: bool) -> None:
    """Entry by entry, from the derivatives of c and of σ."""
    x, g, eps = normal(2, 4), normal(2, 4, seed=1), 0.1
    point = ev.calculus.layernorm(x, eps=eps) if centred else ev.calculus.rmsnorm(x, eps=eps)
    n, d = x.shape
    jacobian, curvature = torch.zeros(n, d, d, dtype=D), torch.zeros(n, d, d, dtype=D)
    for t in range(n):
        mean = sum(x[t].tolist()) / d if centred else 0.0
        c = [float(x[t, i]) - mean for i in range(d)]
        s = math.sqrt(sum(each**2 for each in c) / d + eps)
        C = [[(i == j) - (1 / d if centred else 0.0) for j in range(d)] for i in range(d)]
        for i in range(d):
            for j in range(d):
                jacobian[t, i, j] = C[i][j] / s - c[i] * c[j] / (d * s**3)
                for k in range(d):
                    first = C[k][i] * c[j] + C[k][j] * c[i] + c[k] * C[i][j]
                    curvature[t, i, j] += g[t, k] * (3 * c[k] * c[i] * c[j] / (d**2 * s**5) - first / (d * s**3))
    agree(point.jacobian, jacobian)
    agree(point.curvature(g), curvature)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 10.0, 1e3])
def test_curvature_is_passed_on_as_one_over_variance(scale: float) -> None:
    """x → c x: σ → c σ, J → J/c, so J G J and Σ g ∂²z go as 1/c² = 1/σ²."""
    x, g = normal(3, 5), normal(3, 5, seed=1)
    G = torch.eye(5, dtype=D)
    near, far = (ev.calculus.layernorm(c * x, eps=0.0) for c in (1.0, scale))
    agree(far.sigma, scale * near.sigma, 1e-12 * max(1, scale))
    passed = [norm.jacobian @ G @ norm.jacobian + norm.curvature(g) for norm in (near, far)]
    assert torch.allclose(passed[1] * scale**2, passed[0], rtol=1e-10, atol=1e-10)


def test_what_a_norm_does_not_see_has_no_slope() -> None:
    x = normal(3, 5)
    J = ev.calculus.layernorm(x, eps=0.0).jacobian
    agree(J @ torch.ones(5, dtype=D), torch.zeros(3, 5, dtype=D))
    agree((J @ x[..., None])[..., 0], torch.zeros(3, 5, dtype=D))
    agree((ev.calculus.rmsnorm(x, eps=0.0).jacobian @ x[..., None])[..., 0], torch.zeros(3, 5, dtype=D))


def test_the_affine_map_has_derivatives_of_its_own() -> None:
    x, weight, bias, g = normal(3, 4), normal(4, seed=1), normal(4, seed=2), normal(3, 4, seed=3)
    point = ev.calculus.layernorm(x, weight, bias)
    by_weight = jacrev(lambda w: layer_norm(x, w, bias, 1e-5))(weight)
    mixed = jacrev(lambda x: jacrev(lambda w: (layer_norm(x, w, bias, 1e-5) * g).sum())(weight))(x)
    agree(point.weight_jacobian, by_weight)
    agree(point.weight_input_curvature(g), mixed.transpose(0, 1))


def test_a_row_without_variance_needs_epsilon() -> None:
    x = torch.stack([normal(4), torch.full((4,), 2.0, dtype=D)])
    with pytest.raises(ev.NonFiniteError, match=r"token 1 has zero variance and ε is 0.*Use ε > 0"):
        ev.calculus.layernorm(x, eps=0.0)
    with pytest.raises(ev.NonFiniteError, match="token 0 has zero variance"):
        ev.calculus.rmsnorm(torch.zeros(1, 3, dtype=D), eps=0.0)
    check_local(ev.calculus.layernorm(x, eps=0.1), lambda x: layer_norm(x, None, None, 0.1), x)


@pytest.mark.parametrize("shapes", [((2, 3, 4), None, None), ((3, 4), (3,), None), ((3, 4), (4,), (5,))])
def test_norms_refuse_shapes_that_do_not_fit(shapes: tuple[Any, ...]) -> None:
    x, weight, bias = (None if shape is None else torch.ones(shape) for shape in shapes)
    with pytest.raises(ev.VectorError, match=r"expected tokens \(n, d\), and weight and bias \(d,\); got"):
        ev.calculus.layernorm(x, weight, bias)


# ---------------------------------------------------------------- softmax and other scores


@given(shape=shapes)
def test_softmax_against_autodiff(shape: tuple[int, int, int]) -> None:
    n, d, seed = shape
    x = 2 * normal(n, d, seed=seed)
    check_local(ev.calculus.softmax(x), lambda x: x.softmax(-1), x)


def test_softmax_against_the_printed_forms() -> None:
    """Diag(A) − A Aᵀ, and diag(w) − w Aᵀ − A wᵀ with w = A ⊙ (g − A·g)."""
    point, g = ev.calculus.softmax(normal(3, 4)), normal(3, 4, seed=1)
    A = point.value
    w = A * (g - (A * g).sum(-1, keepdim=True))
    outer = w[:, :, None] * A[:, None]
    agree(point.jacobian, torch.diag_embed(A) - A[:, :, None] * A[:, None])
    agree(point.curvature(g), torch.diag_embed(w) - outer - outer.mT)


def test_softmax_of_large_scores_is_finite() -> None:
    point = ev.calculus.softmax(torch.tensor([[0.0, 1e4, -1e4]], dtype=D))
    assert all(each.isfinite().all() for each in (point.jacobian, point.curvature(torch.ones(1, 3, dtype=D))))


# ---------------------------------------------------------------- feed-forward


def feed_forward(
    y: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    gate: Tensor | None,
    gate_bias: Tensor | None,
    activation: str,
    residual: bool,
) -> Tensor:
    phi, h = TORCH[activation], F.linear(y, w1, b1)
    out = F.linear(phi(h) if gate is None else phi(F.linear(y, gate, gate_bias)) * h, w2, b2)
    return y + out if residual else out


@st.composite
def feed_forwards(draw: st.DrawFn) -> tuple[Any, ...]:
    """y, w1, w2, b1, b2, gate, gate_bias, activation, residual."""
    n, d, f, q = (draw(st.integers(1, 3)) for _ in range(4))
    seed, residual, gated = draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans())
    q = d if residual else q
    bias, bias2 = draw(st.booleans()), draw(st.booleans())
    return (
        normal(n, d, seed=seed),
        normal(f, d, seed=seed + 1),
        normal(q, f, seed=seed + 2),
        normal(f, seed=seed + 3) if bias else None,
        normal(q, seed=seed + 4) if bias2 else None,
        normal(f, d, seed=seed + 5) if gated else None,
        normal(f, seed=seed + 6) if gated and bias else None,
        draw(st.sampled_from([*ACTIVATIONS])),
        residual,
    )


@given(feed_forwards())
def test_ffn_against_autodiff(problem: tuple[Any, ...]) -> None:
    y, *rest = problem
    check_local(ev.calculus.ffn(*problem), lambda y: feed_forward(y, *rest), y)


@pytest.mark.parametrize("gated", [False, True])
def test_ffn_against_finite_differences(gated: bool) -> None:
    y, w1, w2 = normal(3, 4), normal(6, 4, seed=1), normal(4, 6, seed=2)
    gate = normal(6, 4, seed=3) if gated else None

    def make(y: Tensor) -> LocalMap:
        return ev.calculus.ffn(y, w1, w2, gate=gate, activation="silu")

    check_by_differences(make(y), make, y)


@given(feed_forwards())
def test_factors_of_ffn_make_the_hessian_in_its_weights(problem: tuple[Any, ...]) -> None:
    """Of a loss with gradient g and curvature G at the output; weights (out, in), gate stacked under W_1."""
    y, w1, w2, b1, b2, gate, gate_bias, activation, residual = problem
    point = ev.calculus.ffn(*problem)
    g, half = normal(*point.value.shape, seed=5), normal(len(y), *[point.value.shape[1]] * 2, seed=6)
    G, f, at = half + half.mT, len(w1), point.value

    def loss(taps: Tensor, down: Tensor, y: Tensor) -> Tensor:
        own = (taps[:f], down, b1, b2, None if gate is None else taps[f:], gate_bias)
        s = feed_forward(y, *own, activation, residual)
        return (g * s).sum() + torch.einsum("ti,tij,tj->", s - at, G, s - at) / 2

    taps = w1 if gate is None else torch.cat([w1, gate])
    (H11, H12, H1y), (_, H22, _), (_, _, Hyy) = hessian(loss, (0, 1, 2))(taps, w2, y)
    factors, slope = point.factors(g, G), point.slopes.movedim(0, 1).flatten(1)  # D, (n, F)
    agree(torch.einsum("tab,ti,tj->aibj", factors.T_hh, y, y), H11, 1e-11)
    agree(torch.einsum("tab,ti,tj->aibj", G, factors.a, factors.a), H22, 1e-11)
    same = torch.eye(f, dtype=D).repeat(len(taps) // f, 1)  # which feature of a a tap feeds
    crossed = torch.einsum("ta,ti,tb,ac->aibc", slope, y, g, same)
    agree(torch.einsum("tab,ti,tc->aibc", factors.T_hs, y, factors.a) + crossed, H12, 1e-11)
    own = torch.einsum("ta,ij->aitj", factors.g_h, torch.eye(y.shape[1], dtype=D))
    agree(torch.einsum("taj,ti->aitj", factors.T_hy, y) + own, H1y, 1e-11)
    agree(factors.G_y, torch.stack([Hyy[t, :, t] for t in range(len(y))]), 1e-11)
    agree(factors.g_y, point.pull(g))


def test_kappa_of_a_relu_vanishes_and_that_of_a_gate_ties_two_taps() -> None:
    y, w1, w2, gate = normal(2, 3), normal(4, 3, seed=1), normal(3, 4, seed=2), normal(4, 3, seed=3)
    g, G = normal(2, 3, seed=4), torch.zeros(2, 3, 3, dtype=D)
    assert not ev.calculus.ffn(y, w1, w2).factors(g, G).kappa.any()
    kappa = ev.calculus.ffn(y, w1, w2, gate=gate).factors(g, G).kappa
    assert not kappa[:, :4, :4].any() and not kappa[:, 4:, 4:].any() and kappa[:, 4:, :4].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": (3,)}, r"expected tokens \(n, d\), got \(3,\)"),
        ({"w1": (5, 2)}, r"w1: expected \(5, 3\)"),
        ({"w2": (4, 5)}, r"w2: expected \(3, 5\) for tokens \(2, 3\) that are added to the output, got \(4, 5\)"),
        ({"b1": (3,)}, r"b1: expected \(5,\)"),
        ({"b2": (5,)}, r"b2: expected \(3,\)"),
        ({"gate": (3, 5)}, r"gate: expected \(5, 3\)"),
        ({"gate_bias": (3,)}, r"gate_bias: expected \(5,\)"),
    ],
)
def test_ffn_refuses_shapes_that_do_not_fit(changes: dict[str, tuple[int, ...]], message: str) -> None:
    given = {"y": (2, 3), "w1": (5, 3), "w2": (3, 5), **changes}
    with pytest.raises(ev.VectorError, match=message):
        ev.calculus.ffn(**{name: torch.ones(shape) for name, shape in given.items()})


def test_a_pre_activation_at_the_kink_is_told_once() -> None:
    y, w = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    with pytest.warns(
        ev.CurvatureWarning, match="1 entries lie exactly at the kink of a ReLU.*almost-everywhere"
    ) as all_:
        point = ev.calculus.ffn(y, w, w, residual=False)
    assert len(all_) == 1 and all_[0].filename == __file__
    assert point.jacobian.tolist() == [[[1.0, 0.0], [0.0, 0.0]]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ev.calculus.ffn(y, w, w, activation="gelu")


# ---------------------------------------------------------------- attention


def plain_attention(x: Tensor, weights: dict[str, Tensor | None], heads: int, hidden: Tensor, kind: str) -> Tensor:
    """One sequence (L, d), one head and one query after the other."""
    q, k, v = (F.linear(x, weights[f"w_{name}"], weights[f"b_{name}"]).chunk(heads, -1) for name in "qkv")
    rows = [
        torch.cat([_row(q[h][t], k[h], v[h], hidden[t], kind) for h in range(heads)], -1)  # (H·d_V,)
        for t in range(len(x))
    ]
    c = torch.stack(rows)
    return c if weights["w_o"] is None else F.linear(c, weights["w_o"], weights["b_o"])


def _row(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, kind: str) -> Tensor:
    scores = k @ q / math.sqrt(len(q))
    if kind == "softmax":
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    value = {"linear": scores, "sigmoid": scores.sigmoid(), "relu": scores.relu()}[kind]
    return value.masked_fill(hidden, 0) @ v


def drawn(seed: int, d: int, d_K: int, d_V: int, heads: int, bias: bool, q: int | None) -> dict[str, Tensor | None]:
    """Weights of `attention` by name."""
    out = {"w_q": (heads * d_K, d), "w_k": (heads * d_K, d), "w_v": (heads * d_V, d), "w_o": q and (q, heads * d_V)}
    weights = {name: normal(*shape, seed=seed + i) if shape else None for i, (name, shape) in enumerate(out.items())}
    biases = {
        f"b_{name[-1]}": normal(len(w), seed=seed + 9 + i) if bias and w is not None else None
        for i, (name, w) in enumerate(weights.items())
    }
    return weights | biases


def check_attention(point: Any, x: Tensor, plain: Callable[[Tensor, int], Tensor]) -> None:
    """Each sequence of (B, L, d) by itself."""
    g, tangent = normal(*point.value.shape, seed=5), normal(2, *x.shape, seed=6)
    pushed, pulled, bent = point.push(tangent), point.pull(g), point.bend(g, tangent)
    jacobian, curvature = point.jacobian, point.curvature(g)
    for b, tokens in enumerate(x):
        J = jacrev(lambda x, b=b: plain(x, b).flatten())(tokens).flatten(1)
        C = hessian(lambda x, b=b: (plain(x, b) * g[b]).sum())(tokens).reshape(tokens.numel(), -1)
        agree(point.value[b], plain(tokens, b))
        agree(jacobian[b], J)
        agree(curvature[b], C)
        agree(pushed[:, b].flatten(1), tangent[:, b].flatten(1) @ J.T)
        agree(pulled[b].flatten(), g[b].flatten() @ J)
        agree(bent[:, b].flatten(1), tangent[:, b].flatten(1) @ C)


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    heads=st.integers(1, 2),
    kind=st.sampled_from(KINDS),
    causal=st.booleans(),
    bias=st.booleans(),
    out=st.sampled_from([None, 2]),
    seed=st.integers(0, 99),
)
def test_attention_against_autodiff(
    sizes: tuple[int, ...], heads: int, kind: str, causal: bool, bias: bool, out: int | None, seed: int
) -> None:
    B, L, d, d_K, d_V = sizes
    x, weights = normal(B, L, d, seed=seed), drawn(seed, d, d_K, d_V, heads, bias, out)
    hidden = torch.ones(L, L).triu(1).bool() if causal else torch.zeros(L, L).bool()
    point = ev.calculus.attention(x, heads=heads, kind=kind, causal=causal, **weights)  # pyright: ignore
    check_attention(point, x, lambda x, b: plain_attention(x, weights, heads, hidden, kind))
    alone = ev.calculus.attention(x[0], heads=heads, kind=kind, causal=causal, **weights)  # pyright: ignore
    g = normal(*alone.value.shape)
    for ours, theirs in (
        (alone.value, point.value[0]),
        (alone.weights, point.weights[0]),
        (alone.jacobian, point.jacobian[0]),
        (alone.curvature(g), point.curvature(torch.stack([g] * B))[0]),
        (alone.M1, point.M1[0]),
        (alone.J_Q, point.J_Q[0]),
    ):
        agree(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_with_masks(kind: str) -> None:
    """A boolean mask, the same as −inf, and padding, which differs from sequence to sequence."""
    x, weights = normal(2, 4, 3), drawn(0, 3, 2, 2, 2, True, 3)
    mask = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    padding = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]]).bool()
    padding[1, 2] = True
    hidden = mask | padding[:, None]
    point = ev.calculus.attention(x, heads=2, kind=kind, mask=mask, padding=padding, **weights)  # pyright: ignore
    check_attention(point, x, lambda x, b: plain_attention(x, weights, 2, hidden[b], kind))
    assert not point.weights[hidden[:, None].expand(-1, 2, -1, -1)].any()
    added = torch.zeros(4, 4, dtype=D).masked_fill(mask, -math.inf)
    same = ev.calculus.attention(x, heads=2, kind=kind, mask=added, padding=padding, **weights)  # pyright: ignore
    agree(same.jacobian, point.jacobian)


def test_numbers_in_a_mask_are_added_to_the_scores() -> None:
    x, weights, added = normal(3, 2), drawn(0, 2, 2, 2, 1, False, None), normal(3, 3, seed=1)
    point = ev.calculus.attention(x, mask=added, **weights)  # pyright: ignore
    q, k, v = (x @ weights[f"w_{name}"].T for name in "qkv")  # pyright: ignore
    agree(point.value, (q @ k.T / math.sqrt(2) + added).softmax(-1) @ v)


def test_moments_are_those_of_the_tokens_under_each_row() -> None:
    x, weights = normal(2, 4, 3), drawn(0, 3, 2, 2, 2, True, None)
    point = ev.calculus.attention(x, heads=2, causal=True, **weights)  # pyright: ignore
    for b, h, t in [(b, h, t) for b in range(2) for h in range(2) for t in range(4)]:
        A, tokens = point.weights[b, h, t], x[b]
        m = sum((A[s] * tokens[s] for s in range(4)), torch.zeros(3, dtype=D))
        c = tokens - m
        agree(point.M1[b, h, t], m)
        agree(point.M2[b, h, t], sum((A[s] * torch.outer(c[s], c[s]) for s in range(4)), torch.zeros(3, 3, dtype=D)))
        third = sum((A[s] * torch.einsum("i,j,k", c[s], c[s], c[s]) for s in range(4)), torch.zeros(3, 3, 3, dtype=D))
        agree(point.M3[b, h, t], third)


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_per_query(kind: str) -> None:
    """J_Q = ∂c_t/∂q_t with keys and values held fixed; J_K ∂W_K q is what a change of W_K does."""
    x, weights, heads = normal(1, 4, 3), drawn(0, 3, 2, 2, 2, False, None), 2
    hidden = torch.ones(4, 4).triu(1).bool()
    point = ev.calculus.attention(x, heads=heads, kind=kind, causal=True, **weights)  # pyright: ignore
    w_q, w_k, w_v = (weights[f"w_{name}"].chunk(heads) for name in "qkv")  # pyright: ignore
    for h in range(heads):
        q, k, v = (x[0] @ w[h].T for w in (w_q, w_k, w_v))
        moved = normal(3, 2, seed=3)  # of W_K, (d, d_K)
        for t in range(4):
            row = hidden[t]
            agree(point.J_Q[0, h, t], jacrev(lambda q, k=k, v=v, row=row: _row(q, k, v, row, kind))(q[t]))
            along = jacrev(lambda s, q=q[t], k=k, v=v, row=row, m=moved: _row(q, k + s * x[0] @ m, v, row, kind))
            agree(point.J_K[0, h, t] @ (moved @ q[t]), along(torch.zeros((), dtype=D)))


def test_J_K_is_the_covariance_of_the_tokens() -> None:
    """W_V M2/√d_K: Theorem 3.1 in one line."""
    x, weights = normal(4, 3), drawn(0, 3, 2, 5, 1, True, None)
    point = ev.calculus.attention(x, **weights)  # pyright: ignore
    agree(point.J_K, weights["w_v"] @ point.M2 / math.sqrt(2))  # pyright: ignore


def test_attention_of_one_token_is_linear() -> None:
    x, weights = normal(1, 3), drawn(0, 3, 2, 3, 1, True, None)
    point = ev.calculus.attention(x, **weights)  # pyright: ignore
    agree(point.jacobian, weights["w_v"])  # pyright: ignore
    assert not point.curvature(torch.ones(1, 3, dtype=D)).any() and not point.M2.any()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_rows_that_do_not_sum_to_one_have_no_central_moments(kind: str) -> None:
    x, weights = normal(3, 2), drawn(0, 2, 2, 2, 1, False, None)
    point = ev.calculus.attention(x, kind=kind, **weights)  # pyright: ignore
    agree(point.M1, point.weights @ x)
    for name in ("M2", "M3"):
        with pytest.raises(ev.ModelError, match=f"{name} is a central moment .* kind '{kind}' has none"):
            getattr(point, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (4,)}, r"expected tokens \(B, L, d\) or \(L, d\), none of them empty; got \(4,\)"),
        ({"x": (0, 4)}, r"none of them empty; got \(0, 4\)"),
        ({"w_q": (6, 3)}, r"w_q: expected \(H·width, 4\), a multiple of 2 rows; got \(6, 3\)"),
        ({"w_v": (5, 4)}, r"w_v: expected .*got \(5, 4\)"),
        ({"w_k": (4, 4)}, r"w_q and w_k meet in the scores: \(6, 4\) and \(4, 4\)"),
        ({"w_o": (4, 5)}, r"w_o: expected \(q, 6\), got \(4, 5\)"),
        ({"b_q": (4,)}, r"the bias of w_q: expected \(6,\), got \(4,\)"),
        ({"b_o": (4,)}, "b_o is the bias of w_o, which is not given"),
        ({"mask": (3, 2)}, r"expected a mask \(3, 3\) of bool.*got torch.float32 \(3, 2\)"),
        ({"padding": (2,)}, r"expected padding \(1, 3\) of bool"),
    ],
)
def test_attention_refuses_shapes_that_do_not_fit(changes: dict[str, tuple[int, ...]], message: str) -> None:
    given: dict[str, Any] = {"x": (3, 4), "w_q": (6, 4), "w_k": (6, 4), "w_v": (6, 4), **changes}
    with pytest.raises(ev.VectorError, match=message):
        ev.calculus.attention(heads=2, **{name: torch.ones(shape) for name, shape in given.items()})


def test_attention_refuses_what_has_no_meaning() -> None:
    x, w = normal(3, 2), normal(2, 2, seed=1)
    with pytest.raises(ev.ModelError, match="of a kind out of softmax, linear, sigmoid, relu; got 'cosine'"):
        ev.calculus.attention(x, w, w, w, kind="cosine")
    with pytest.raises(ev.NonFiniteError, match="query 1 may look at no key at all"):
        ev.calculus.attention(x, w, w, w, mask=torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0]]).bool())
    with pytest.raises(ev.NonFiniteError, match="the mask has entries nan"):
        ev.calculus.attention(x, w, w, w, mask=torch.full((3, 3), torch.nan, dtype=D))
    with pytest.raises(ev.VectorError, match=r"expected g of the shape of the output, \(3, 2\); got \(3, 3\)"):
        ev.calculus.attention(x, w, w, w).curvature(normal(3, 3))
    with pytest.warns(ev.CurvatureWarning, match="9 entries lie exactly at the kink"):
        ev.calculus.attention(x, 0 * w, w, w, kind="relu")


def test_a_row_that_looks_nowhere_is_zero_where_rows_need_not_sum_to_one() -> None:
    x, w = normal(2, 2), normal(2, 2, seed=1)
    point = ev.calculus.attention(x, w, w, w, kind="linear", mask=torch.tensor([[1, 1], [0, 0]]).bool())
    assert not point.value[0].any() and point.value[1].any()


# ---------------------------------------------------------------- losses

LOSSES = {
    "mse": (ev.losses.mse(), lambda z, y: F.mse_loss(z, y)),
    "token": (
        ev.losses.token(
            lambda z, y: (z - y).pow(4).sum(-1),
            lambda z, y: 4 * (z - y) ** 3,
            lambda z, y: torch.diag_embed(12 * (z - y) ** 2),
        ),
        lambda z, y: (z - y).pow(4).sum(-1).mean(),
    ),
    "autodiff": (
        ev.losses.autodiff(lambda z, y: torch.log(torch.cosh(z - y)).prod() + z[0] * z[-1] ** 2),
        lambda z, y: (torch.log(torch.cosh(z - y)).prod(-1) + z[:, 0] * z[:, -1] ** 2).mean(),
    ),
}


def check_loss(loss: Any, plain: Callable[[Tensor], Tensor], z: Tensor, target: Tensor) -> None:
    point, (n, d) = loss.at(z, target), z.shape
    H = hessian(plain)(z)
    C = torch.stack([H[t, :, t] for t in range(n)])
    tangent = normal(2, n, d, seed=4)
    agree(point.value, plain(z))
    agree(point.gradient, jacrev(plain)(z))
    agree(point.curvature, C)
    agree(point.curve(tangent), torch.einsum("tij,ktj->kti", C, tangent))
    assert float((H - torch.einsum("tij,ts->tisj", C, torch.eye(n, dtype=D))).norm()) < 1e-12, "tokens are apart"


@pytest.mark.parametrize("name", LOSSES)
@given(shape=shapes)
def test_losses_against_autodiff(shape: tuple[int, int, int], name: str) -> None:
    n, d, seed = shape
    loss, plain = LOSSES[name]
    z, y = normal(n, d, seed=seed), normal(n, d, seed=seed + 1)
    check_loss(loss, lambda z: plain(z, y), z, y)


@given(shape=shapes, vocabulary=st.integers(1, 5), bias=st.booleans(), ignored=st.integers(0, 3))
def test_cross_entropy_is_that_of_torch(shape: tuple[int, int, int], vocabulary: int, bias: bool, ignored: int) -> None:
    n, d, seed = shape
    U, b = normal(d, vocabulary, seed=seed), normal(vocabulary, seed=seed + 1) if bias else None
    z, y = normal(n, d, seed=seed + 2), torch.randint(vocabulary, (n,), generator=torch.Generator().manual_seed(seed))
    y[: min(ignored, n - 1)] = -100
    check_loss(ev.losses.cross_entropy(U, b), lambda z: nn.CrossEntropyLoss()(z @ U + (0 if b is None else b), y), z, y)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_entropy_of_a_linear_unembedding_with_another_ignored_index(bias: bool) -> None:
    head = nn.Linear(3, 4, bias=bias).double()
    z, y = normal(5, 3), torch.tensor([0, 3, 2, 2, 1])
    loss = ev.losses.cross_entropy(head, ignore_index=2)
    plain = nn.CrossEntropyLoss(ignore_index=2)
    check_loss(loss, lambda z: plain(F.linear(z, head.weight.detach(), head.bias.detach() if bias else None), y), z, y)
    assert not loss.at(z, y).gradient[2:4].any()


@pytest.mark.parametrize("index", [-100, -1, 4, 255])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_any_ignored_index_and_any_integers(index: int, dtype: torch.dtype) -> None:
    if index < 0 and dtype == torch.uint8:
        return
    U, z, y = normal(3, 4), normal(5, 3), torch.tensor([0, 3, index, 2, index]).to(dtype)
    loss = ev.losses.cross_entropy(U, ignore_index=index)
    flat = loss.flat_target(y[None], torch.Size((1, 5, 3)))
    check_loss(loss, lambda z: nn.CrossEntropyLoss(ignore_index=index)(z @ U, y.long()), z, flat)


def test_cross_entropy_of_sure_logits_is_finite_and_its_curvature_positive() -> None:
    U, z = 1e3 * torch.eye(3, dtype=D), torch.tensor([[1.0, 0, 0], [0, 0, 0]], dtype=D)
    point = ev.losses.cross_entropy(U).at(z, torch.tensor([1, 2]))
    assert point.curvature.isfinite().all() and float(torch.linalg.eigvalsh(point.curvature).min()) > -1e-6


def test_losses_are_resolved_or_refused() -> None:
    assert ev.losses.resolve("mse") == ev.losses.resolve(nn.MSELoss()) == ev.losses.mse()
    for wrong in ("mae", nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss()):
        with pytest.raises(ev.LossError, match=r"expected 'mse', ev.losses.cross_entropy\(unembedding\)"):
            ev.losses.resolve(wrong)
    with pytest.raises(ev.VectorError, match=r"expected an unembedding \(d, V\) or an nn.Linear; got shape \(3,\)"):
        ev.losses.cross_entropy(torch.ones(3))


def test_formulas_of_the_wrong_shape_are_told() -> None:
    loss = ev.losses.token(lambda z, y: z.sum(), lambda z, y: z, lambda z, y: z)
    with pytest.raises(ev.LossError, match=r"must be \(2,\), \(2, 3\), \(2, 3, 3\); got \(\), \(2, 3\), \(2, 3\)"):
        loss.at(torch.ones(2, 3), torch.ones(2, 3))
