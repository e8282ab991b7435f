"""The feed-forward sublayer: s = y + W_2 φ(W_1 y + b_1) + b_2 per token, and the curvature it passes on.

With h = W_1 y + b_1, a = φ(h), D = diag φ′(h), and, for a gradient g and a curvature G at s, u = W_2ᵀ g:

    J = I + W_2 D W_1                       κ = diag(φ″(h) ⊙ u)             (zero for ReLU almost everywhere)
    g_h = D u                               T_hh = D W_2ᵀ G W_2 D + κ
    g_y = Jᵀ g                              T_hy = D W_2ᵀ G J + κ W_1
    Σ_c g_c ∂²s_c = W_1ᵀ κ W_1              G_y  = Jᵀ G J + W_1ᵀ κ W_1

    H(W_1, W_1) = Σ_t T_hh ⊗ y yᵀ           H(W_2, W_2) = Σ_t G ⊗ a aᵀ
    H(W_1, W_2) = Σ_t D W_2ᵀ G ⊗ y aᵀ + D crossed with y, g

A gate makes a = φ(W_g y + b_g) ⊙ (W_1 y + b_1): two taps in place of one. W_1 and W_g are stacked, D = (D_1 D_g) is two
diagonals side by side, and κ four of them, which the Hadamard product ties together. Weights are stored (out, in).

Index legend: t token, i, j taps (up, gate), f hidden feature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.calculus.activations import at_kink, named, say_kinks
from evolute.calculus.local import LocalMap
from evolute.errors import VectorError


@dataclass(frozen=True, eq=False)
class FeedForwardFactors:
    """What the Kronecker terms of W_1 (and the gate's weight, stacked under it) and W_2 are made of, per token.

    F counts the features of all taps: those of h, then those of the gate.
    """

    a: Tensor  # (n, f), what W_2 reads
    g_h: Tensor  # (n, F)
    kappa: Tensor  # (n, F, F)
    T_hh: Tensor  # (n, F, F)
    T_hs: Tensor  # (n, F, q): D W_2ᵀ G, between h and what W_2 writes
    T_hy: Tensor  # (n, F, d)
    g_y: Tensor  # (n, d)
    G_y: Tensor  # (n, d, d)


@dataclass(eq=False)
class FeedForward(LocalMap):
    """A feed-forward sublayer at its tokens: `value` (n, q), Jacobian, curvature, and factors for its weights."""

    y: Tensor
    taps: Tensor  # W_1, or W_1 and W_g: (i, f, d)
    down: Tensor  # W_2, (q, f)
    a: Tensor  # (n, f)
    slopes: Tensor  # ∂a/∂h_i, (i, n, f)
    seconds: Tensor  # ∂²a/∂h_i∂h_j, (i, j, n, f)
    value: Tensor
    residual: bool

    @property
    def inputs(self) -> int:
        return self.y.shape[-1]

    def push(self, tangent: Tensor) -> Tensor:
        """ẏ + W_2 Σ_i D_i W_i ẏ."""
        moved = torch.einsum("inf,i...nf->...nf", self.slopes, self._before(tangent)) @ self.down.mT
        return tangent + moved if self.residual else moved

    def pull(self, g: Tensor) -> Tensor:
        """Jᵀ g = g + Σ_i W_iᵀ D_i W_2ᵀ g."""
        pulled = torch.einsum("...nf,inf,ifd->...nd", g @ self.down, self.slopes, self.taps)
        return g + pulled if self.residual else pulled

    def bend(self, g: Tensor, tangent: Tensor) -> Tensor:
        """Σ_ij W_iᵀ κ_ij W_j ẏ."""
        return torch.einsum("ijnf,jknf,ifd->knd", self._kappa(g), self._before(tangent), self.taps)

    def factors(self, g: Tensor, G: Tensor) -> FeedForwardFactors:
        """For a gradient g (n, q) and a curvature G (n, q, q) at the output."""
        E, across = self.jacobian, self._across()
        kappa, outer = self._stacked(self._kappa(g)), across.mT @ G  # D W_2ᵀ G
        stacked = self.taps.flatten(0, 1)
        return FeedForwardFactors(
            a=self.a,
            g_h=(across.mT @ g[..., None])[..., 0],
            kappa=kappa,
            T_hh=outer @ across + kappa,
            T_hs=outer,
            T_hy=outer @ E + kappa @ stacked,
            g_y=self.pull(g),
            G_y=E.mT @ G @ E + self.curvature(g),
        )

    def _before(self, tangent: Tensor) -> Tensor:
        """W_i ẏ, (i, …, n, f)."""
        return torch.einsum("...nd,ifd->i...nf", tangent, self.taps)

    def _kappa(self, g: Tensor) -> Tensor:
        """∂²a ⊙ W_2ᵀ g, (i, j, n, f)."""
        return self.seconds * (g @ self.down)

    def _across(self) -> Tensor:
        """W_2 D, (n, q, F): what moves at the output with the taps."""
        return torch.einsum("qf,inf->nqif", self.down, self.slopes).flatten(2)

    def _stacked(self, kappa: Tensor) -> Tensor:
        """(i, j, n, f) → (n, F, F)."""
        return torch.diag_embed(kappa).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


def ffn(
    y: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    gate: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str = "relu",
    residual: bool = True,
) -> FeedForward:
    """S = y + W_2 φ(W_1 y + b_1) + b_2 with its Jacobian I + W_2 D W_1 and its curvature W_1ᵀ κ W_1.

    Args:
        y: tokens, (n, d).
        w1: W_1 as nn.Linear stores it, (f, d).
        w2: W_2, (q, f).
        b1: (f,), or none.
        b2: (q,), or none.
        gate: W_g, (f, d): a = φ(W_g y + b_g) ⊙ (W_1 y + b_1), as in SwiGLU.
        gate_bias: b_g, (f,), or none.
        activation: relu, gelu, gelu_tanh, silu, tanh, sigmoid or identity.
        residual: whether y is added.

    >>> y, w1, w2 = torch.ones(1, 2), torch.eye(2), 2 * torch.eye(2)
    >>> ffn(y, w1, w2).jacobian
    tensor([[[3., 0.],
             [0., 3.]]])
    >>> ffn(y, w1, w2, activation="silu", residual=False).curvature(torch.ones(1, 2)).shape
    torch.Size([1, 2, 2])
    """
    _check(y, w1, w2, (b1, b2, gate, gate_bias), residual)
    phi, h = named(activation), _linear(y, w1, b1)
    if gate is None:
        a, slopes, seconds, taps, before = phi.value(h), phi.slope(h)[None], phi.bend(h)[None, None], w1[None], h
    else:
        before = _linear(y, gate, gate_bias)
        value, slope = phi.value(before), phi.slope(before)
        a, slopes, taps = value * h, torch.stack([value, slope * h]), torch.stack([w1, gate])
        mixed = torch.stack([torch.zeros_like(slope), slope]), torch.stack([slope, phi.bend(before) * h])
        seconds = torch.stack(mixed)
    say_kinks(at_kink(activation, before))
    out = _linear(a, w2, b2)
    return FeedForward(y, taps, w2, a, slopes, seconds, y + out if residual else out, residual)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.mT if bias is None else x @ weight.mT + bias


def _check(y: Tensor, w1: Tensor, w2: Tensor, others: tuple[Tensor | None, ...], residual: bool) -> None:
    """Shapes that fit, or one sentence."""
    f, q = (w.shape[0] if w.ndim == 2 else -1 for w in (w1, w2))
    wanted = {"w1": (f, y.shape[-1]), "w2": (y.shape[-1] if residual else q, f)}
    wanted |= {"b1": (f,), "b2": (q,), "gate": (f, y.shape[-1]), "gate_bias": (f,)}
    given = dict(zip(wanted, (w1, w2, *others), strict=True))
    if y.ndim != 2:
        raise VectorError(f"expected tokens (n, d), got {tuple(y.shape)}.")
    for name, each in given.items():
        if each is not None and tuple(each.shape) != wanted[name]:
            raise VectorError(
                f"{name}: expected {wanted[name]} for tokens {tuple(y.shape)}"
                f"{' that are added to the output' if residual else ''}, got {tuple(each.shape)}."
            )
