"""The token-wise sublayers against automatic differentiation: norms, activations, softmax, feed-forward.

Tokens are taken together, so that each statement also says that no token feels another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from evolute.calculus.activations import ACTIVATIONS, activation
from evolute.calculus.ffn import FeedForward, ffn
from evolute.calculus.local import LocalMap
from evolute.calculus.normalization import Normalization, layernorm, rmsnorm
from evolute.calculus.scores import softmax
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, register

PHI: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda h: h,
}


@dataclass(frozen=True, eq=False)
class Tokens:
    """A closed form at tokens x (n, p), the map of PyTorch that it is about, and an upstream gradient (n, q)."""

    point: LocalMap
    f: Callable[[Tensor], Tensor]
    x: Tensor
    g: Tensor


def _statements(name: str, J: str, C: str, sample: Callable[[Sampler], Tokens]) -> None:
    """Value and Jacobian, and curvature."""
    register(
        Statement(
            f"{name} · Jacobian",
            J,
            sample,
            lambda t: torch.cat([t.point.value.reshape(-1, 1), torch.block_diag(*t.point.jacobian)], 1),
            lambda t: torch.cat([t.f(t.x).reshape(-1, 1), oracle.jacobian(t.f, [t.x], 0)], 1),
        ),
        Statement(
            f"{name} · curvature",
            C,
            sample,
            lambda t: torch.block_diag(*t.point.curvature(t.g)),
            lambda t: oracle.hessian(lambda x: (t.g * t.f(x)).sum(), [t.x]),
        ),
    )


# ---- norms


def sample_layernorm(draw: Sampler) -> Tokens:
    """D from 3 (two features without ε are ±1), with an affine map; ε from zero."""
    n, d, eps = draw.integer(1, 4), draw.integer(3, 6), draw.choice(0.0, 1e-5, 0.1, 1.0)
    x, weight, bias = draw.normal(n, d), draw.normal(d), draw.normal(d)
    point = layernorm(x, weight, bias, eps)
    return Tokens(point, lambda x: F.layer_norm(x, (d,), weight, bias, eps), x, draw.normal(n, d))


def sample_rmsnorm(draw: Sampler) -> Tokens:
    n, d, eps = draw.integer(1, 4), draw.integer(2, 6), draw.choice(0.0, 1e-5, 0.1, 1.0)
    x, weight = draw.normal(n, d), draw.normal(d)
    return Tokens(rmsnorm(x, weight, eps), lambda x: F.rms_norm(x, (d,), weight, eps), x, draw.normal(n, d))


@dataclass(frozen=True, eq=False)
class Affine:
    """A LayerNorm with its γ."""

    x: Tensor
    weight: Tensor
    g: Tensor

    @property
    def point(self) -> Normalization:
        return layernorm(self.x, self.weight)


def _sample_affine(draw: Sampler) -> Affine:
    n, d = draw.integer(1, 4), draw.integer(3, 5)
    return Affine(draw.normal(n, d), draw.normal(d), draw.normal(n, d))


def _mixed(a: Affine) -> Tensor:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return (a.g * F.layer_norm(x, a.weight.shape, weight)).sum()

    return oracle.second(loss, [a.weight, a.x], 0, 1)


_statements("LayerNorm", "J = diag(γ)(C − z zᵀ/d)/σ", "−(z (Jg)ᵀ + (Jg) zᵀ + (g·z) J)/(σ d)", sample_layernorm)
_statements("RMSNorm", "J = diag(γ)(I − z zᵀ/d)/σ", "−(z (Jg)ᵀ + (Jg) zᵀ + (g·z) J)/(σ d)", sample_rmsnorm)
register(
    Statement(
        "LayerNorm · ∂²/∂γ∂x",
        "diag(g) J",
        _sample_affine,
        lambda a: a.point.weight_input_curvature(a.g).transpose(0, 1).flatten(1),
        _mixed,
    )
)


# ---- activations, softmax


def sample_activation(draw: Sampler) -> Tokens:
    name, x = draw.choice(*ACTIVATIONS), 2 * draw.normal(draw.integer(1, 4), draw.integer(1, 5))
    return Tokens(activation(x, name), PHI[name], x, draw.normal(*x.shape))


def sample_softmax(draw: Sampler) -> Tokens:
    x = 2 * draw.normal(draw.integer(1, 4), draw.integer(2, 6))
    return Tokens(softmax(x), lambda x: x.softmax(-1), x, draw.normal(*x.shape))


_statements("Activation", "diag(φ′)", "diag(φ″ ⊙ g)", sample_activation)
_statements("Softmax", "Σ = diag(A) − A Aᵀ", "diag(w) − w Aᵀ − A wᵀ, w = A ⊙ (g − A·g)", sample_softmax)


# ---- feed-forward


@dataclass(frozen=True, eq=False)
class Feed(Tokens):
    """A feed-forward sublayer, gated or not, with a gradient g and a curvature G at its output."""

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]  # W_1 (over W_g), W_2, y
    taps: Tensor
    w2: Tensor
    G: Tensor

    @property
    def closed(self) -> FeedForward:
        assert isinstance(self.point, FeedForward)
        return self.point


def sample_ffn(draw: Sampler) -> Feed:
    """d, f and q from 1 to 4; every activation, with and without gate and residual."""
    n, d, f = draw.integer(1, 3), draw.integer(1, 4), draw.integer(1, 4)
    residual, gated, name = draw.choice(True, False), draw.choice(True, False), draw.choice(*ACTIVATIONS)
    q = d if residual else draw.integer(1, 4)
    y, w1, w2, b1, b2 = draw.normal(n, d), draw.normal(f, d), draw.normal(q, f), draw.normal(f), draw.normal(q)
    gate, gate_bias = (draw.normal(f, d), draw.normal(f)) if gated else (None, None)

    def forward(taps: Tensor, down: Tensor, y: Tensor) -> Tensor:
        h = F.linear(y, taps[:f], b1)
        a = PHI[name](F.linear(y, taps[f:], gate_bias)) * h if gated else PHI[name](h)
        return F.linear(a, down, b2) + (y if residual else 0)

    half, taps = draw.normal(n, q, q), w1 if gate is None else torch.cat([w1, gate])
    point = ffn(y, w1, w2, b1, b2, gate, gate_bias, name, residual)
    return Feed(point, lambda y: forward(taps, w2, y), y, draw.normal(n, q), forward, taps, w2, half + half.mT)


def _loss(t: Feed) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """With gradient g and curvature G at the output."""
    at = t.closed.value

    def loss(taps: Tensor, w2: Tensor, y: Tensor) -> Tensor:
        s = t.forward(taps, w2, y)
        return (t.g * s).sum() + torch.einsum("ti,tij,tj->", s - at, t.G, s - at) / 2

    return loss


def _second(i: int, j: int) -> Callable[[Feed], Tensor]:
    return lambda t: oracle.second(_loss(t), [t.taps, t.w2, t.x], i, j)


def _w1_w1(t: Feed) -> Tensor:
    T = t.closed.factors(t.g, t.G).T_hh
    return torch.einsum("tab,ti,tj->aibj", T, t.x, t.x).flatten(2).flatten(0, 1)


def _w1_w2(t: Feed) -> Tensor:
    """Straight, and crossed: D at the feature of a that a tap feeds."""
    factors, point = t.closed.factors(t.g, t.G), t.closed
    taps, f = len(t.taps), t.w2.shape[1]
    feeds = torch.eye(f, dtype=t.x.dtype).repeat(taps // f, 1)
    slope = point.slopes.movedim(0, 1).flatten(1)
    straight = torch.einsum("tab,ti,tc->aibc", factors.T_hs, t.x, factors.a)
    crossed = torch.einsum("ta,ti,tb,ac->aibc", slope, t.x, t.g, feeds)
    return (straight + crossed).flatten(2).flatten(0, 1)


def _w2_w2(t: Feed) -> Tensor:
    a = t.closed.a
    return torch.einsum("tab,ti,tj->aibj", t.G, a, a).flatten(2).flatten(0, 1)


def _y_y(t: Feed) -> Tensor:
    return torch.block_diag(*t.closed.factors(t.g, t.G).G_y)


_statements("Feed-forward", "J = I + W_2 D W_1, gated too", "W_1ᵀ κ W_1, κ = φ″(h) ⊙ W_2ᵀ g", sample_ffn)
register(
    *(
        Statement(f"Feed-forward · {name}", says, sample_ffn, closed, _second(i, j))
        for name, says, closed, i, j in (
            ("H(W1,W1)", "Σ_t T_hh ⊗ y yᵀ, T_hh = D W_2ᵀ G W_2 D + κ", _w1_w1, 0, 0),
            ("H(W1,W2)", "Σ_t D W_2ᵀ G ⊗ y aᵀ + D crossed with y, g", _w1_w2, 0, 1),
            ("H(W2,W2)", "Σ_t G ⊗ a aᵀ", _w2_w2, 1, 1),
            ("curvature passed on", "G_y = Jᵀ G J + W_1ᵀ κ W_1", _y_y, 2, 2),
        )
    )
)
