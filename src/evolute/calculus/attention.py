"""The attention sublayer: o = concat_h(A_h x W_V^h) W_O with A = softmax(q kᵀ/√d_K), and its derivatives in the tokens.

    M1_t = Σ_s A_ts x_s     M2_t = Σ_s A_ts (x_s − M1_t)(x_s − M1_t)ᵀ     M3_t the same with three factors

With Σ_t = diag(A_t) − A_t A_tᵀ, the Jacobian of row t of the softmax, a query moves its output by

    J_Q = Vᵀ Σ_t K/√d_K                     ∂c_t/∂q_t
    J_K = Vᵀ Σ_t X/√d_K = W_V M2_t/√d_K     ċ_t = J_K Ẇ_K q_t: what W_K moves, with Ẇ_K (d, d_K)

In the tokens, where queries, keys and values all move, the derivatives go through the same steps as in `closed_form`:
three linear maps, the scores, the weights, their product with the values, and the output map.

Shapes: B sequences of L tokens, H heads of d_K and d_V features; weights are stored (out, in). Of a single sequence
(L, d) nothing has the axis B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evolute.calculus.activations import say_kinks
from evolute.calculus.attention_steps import Setting
from evolute.calculus.chain import Chain, Split
from evolute.calculus.graph import attend, linear
from evolute.calculus.losses import LossPoint
from evolute.calculus.masks import masks
from evolute.calculus.scores import KINDS
from evolute.calculus.weights import Projection
from evolute.errors import ModelError, VectorError


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention at its tokens: `value`, `weights`, moments, Jacobians and curvature; made by `attention`.

    Of several sequences each has a Jacobian and a curvature of its own: they do not feel one another.
    """

    x: Tensor  # (B, L, d), or (L, d)
    q: Projection
    k: Projection
    v: Projection
    o: Projection | None
    setting: Setting

    @property
    def value(self) -> Tensor:
        """(B, L, q)."""
        return self._tokens(self._forward.values[self._forward.out])

    @property
    def weights(self) -> Tensor:
        """A, (B, H, L, L): row t says how much query t looks at each key."""
        return self._single(self._forward.values["A"])

    # ---- derivatives in the tokens

    def push(self, tangent: Tensor) -> Tensor:
        """J ẋ: (k, B, L, d) → (k, B, L, q)."""
        return self._tokens(self._forward.tangents({"x": self._flat(tangent)}, {})[self._forward.out])

    def pull(self, g: Tensor) -> Tensor:
        """Jᵀ g, (B, L, q) → (B, L, d)."""
        return self._tokens(self._settled(g).gradients["x"])

    def bend(self, g: Tensor, tangent: Tensor) -> Tensor:
        """(Σ g ∂²o) ẋ: g (B, L, q), ẋ (k, B, L, d) → (k, B, L, d)."""
        chain = self._settled(g)
        tangents = chain.tangents({"x": self._flat(tangent)}, {})
        return self._tokens(chain.cotangents(tangents, {}, Split.FUNCTIONAL, {"x"})["x"])

    @property
    def jacobian(self) -> Tensor:
        """∂o/∂x, (B, L·q, L·d)."""
        return self._square(self.push(self._basis()))

    def curvature(self, g: Tensor) -> Tensor:
        """Σ g ∂²o/∂x², (B, L·d, L·d): the second derivative, contracted with an upstream gradient (B, L, q)."""
        return self._square(self.bend(g, self._basis()))

    # ---- per query token

    @property
    def J_Q(self) -> Tensor:
        """∂c_t/∂q_t = Vᵀ Σ_t K/√d_K, (B, H, L, d_V, d_K)."""
        return self._single(self._seen(self.setting.split(self._forward.values["k"])))

    @property
    def J_K(self) -> Tensor:
        """Vᵀ Σ_t X/√d_K, (B, H, L, d_V, d): ċ_t = J_K Ẇ_K q_t."""
        return self._single(self._seen(self._batched[:, None].expand(-1, self.setting.heads, -1, -1)))

    def _seen(self, keys: Tensor) -> Tensor:
        """Vᵀ Σ_t keys/√d_K, for keys (B, H, L, p): one score after the other, for all queries at once."""
        values = self.setting.split(self._forward.values["v"])
        d_K = self.q.weight.shape[0] // self.setting.heads
        moved = (keys * d_K**-0.5).movedim(-1, 0)[:, :, :, None]  # (p, B, H, 1, L): the same for every query
        pushed = self.setting.weights(self._forward.values["s"]).push(moved)  # (p, B, H, L, L)
        return torch.einsum("pbhts,bhsv->bhtvp", pushed, values)

    # ---- moments of the tokens under each row of A

    @property
    def M1(self) -> Tensor:
        """Σ_s A_ts x_s, (B, H, L, d): the mean, if rows sum to one."""
        return self._single(self._first)

    @property
    def M2(self) -> Tensor:
        """Σ_s A_ts c_s c_sᵀ with c_s = x_s − M1_t, (B, H, L, d, d): the covariance."""
        return self._single(torch.einsum("bhts,bhtsi,bhtsj->bhtij", self._probabilities("M2"), *[self._centred] * 2))

    @property
    def M3(self) -> Tensor:
        """Σ_s A_ts c_s ⊗ c_s ⊗ c_s, (B, H, L, d, d, d): the third central moment."""
        weights = self._probabilities("M3")
        return self._single(torch.einsum("bhts,bhtsi,bhtsj,bhtsk->bhtijk", weights, *[self._centred] * 3))

    @property
    def _first(self) -> Tensor:
        return self._forward.values["A"] @ self._batched[:, None]

    @property
    def _centred(self) -> Tensor:
        """(B, H, L, L, d): token s as query t sees it."""
        return self._batched[:, None, None] - self._first[..., None, :]

    def _probabilities(self, moment: str) -> Tensor:
        if self.setting.kind != "softmax":
            raise ModelError(
                f"{moment} is a central moment of the tokens under rows of A that sum to one; attention of kind "
                f"{self.setting.kind!r} has none. M1 = A x, J_Q and J_K are there for every kind."
            )
        return self._forward.values["A"]

    # ---- the chain

    @cached_property
    def _forward(self) -> Chain:
        return self._settled(None)

    def _settled(self, g: Tensor | None) -> Chain:
        """Steps from x to the output, with the gradient g there."""
        steps = attend(self.q, self.k, self.v, self.setting, "x")
        if self.o is not None:
            steps = [*steps, linear(self.o, "o", "c", "o")]
        return Chain.settled(steps, {"x": self._batched.flatten(0, 1)}, lambda out: self._upstream(g, out))

    def _upstream(self, g: Tensor | None, out: Tensor) -> LossPoint:
        """A loss that is linear, g·o; without g it is zero."""
        wanted = tuple(self._tokens(out).shape)
        if g is not None and tuple(g.shape) != wanted:
            raise VectorError(f"expected g of the shape of the output, {wanted}; got {tuple(g.shape)}.")
        gradient = torch.zeros_like(out) if g is None else self._flat(g)
        return LossPoint((gradient * out).sum(), gradient, torch.zeros_like)

    # ---- shapes

    @property
    def _batched(self) -> Tensor:
        return self.x if self.x.ndim == 3 else self.x[None]

    def _flat(self, tokens: Tensor) -> Tensor:
        """(…, B, L, d) → (…, B·L, d)."""
        return tokens if self.x.ndim == 2 else tokens.flatten(-3, -2)

    def _tokens(self, flat: Tensor) -> Tensor:
        """(…, B·L, d) → (…, B, L, d)."""
        return flat if self.x.ndim == 2 else flat.unflatten(-2, (self.setting.batch, self.setting.length))

    def _single(self, each: Tensor) -> Tensor:
        return each[0] if self.x.ndim == 2 else each

    def _basis(self) -> Tensor:
        """The L·d unit tangents, in every sequence at once: (L·d, B, L, d)."""
        unit = torch.eye(self.x.shape[-2:].numel(), dtype=self.x.dtype, device=self.x.device)
        unit = unit.unflatten(1, self.x.shape[-2:])
        return unit if self.x.ndim == 2 else unit[:, None].expand(-1, self.setting.batch, -1, -1)

    def _square(self, columns: Tensor) -> Tensor:
        """(L·d, B, L, p) → (B, L·p, L·d)."""
        return columns.flatten(-2).movedim(0, -1)


def attention(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    heads: int = 1,
    w_o: Tensor | None = None,
    *,
    b_q: Tensor | None = None,
    b_k: Tensor | None = None,
    b_v: Tensor | None = None,
    b_o: Tensor | None = None,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    causal: bool = False,
    kind: str = "softmax",
) -> Attention:
    """Attention with its weights, its moments, and its derivatives in the tokens.

    Args:
        x: tokens, (B, L, d) or (L, d).
        w_q: W_Q as nn.Linear stores it, (H·d_K, d).
        w_k: W_K, (H·d_K, d).
        w_v: W_V, (H·d_V, d).
        heads: H.
        w_o: W_O, (q, H·d_V); without it the heads are joined and that is all.
        b_q: bias of the queries, (H·d_K,), or none.
        b_k: bias of the keys, (H·d_K,), or none.
        b_v: bias of the values, (H·d_V,), or none.
        b_o: bias of the output, (q,), or none.
        mask: (L, L), true where a query may not look, or numbers that are added to the scores.
        padding: (B, L), true at keys that nobody looks at; (L,) for a single sequence.
        causal: whether a query may look at earlier tokens and itself only.
        kind: softmax, or linear, sigmoid, relu: A is that function of the scores, entry by entry.

    >>> x, w = torch.randn(3, 4), torch.eye(4)
    >>> point = attention(x, w, w, w, heads=2)
    >>> point.weights.shape, point.M2.shape, point.jacobian.shape
    (torch.Size([2, 3, 3]), torch.Size([2, 3, 4, 4]), torch.Size([12, 12]))
    >>> torch.allclose(point.weights.sum(-1), torch.ones(2, 3))
    True
    """
    if kind not in KINDS:
        raise ModelError(f"expected attention of a kind out of {', '.join(KINDS)}; got {kind!r}.")
    _check(x, heads, {"w_q": (w_q, b_q), "w_k": (w_k, b_k), "w_v": (w_v, b_v)}, w_o, b_o)
    batched = x if x.ndim == 3 else x[None]
    allowed = masks(batched, mask, padding, causal=causal, kind=kind)
    setting = Setting(batched.shape[0], batched.shape[1], heads, kind, allowed.kept, allowed.bias)
    o = None if w_o is None else Projection(w_o, b_o)
    point = Attention(x, Projection(w_q, b_q), Projection(w_k, b_k), Projection(w_v, b_v), o, setting)
    say_kinks(setting.at_kink(point._forward.values["s"]))  # pyright: ignore[reportPrivateUsage]
    return point


def _check(
    x: Tensor, heads: int, taps: dict[str, tuple[Tensor, Tensor | None]], w_o: Tensor | None, b_o: Tensor | None
) -> None:
    """Shapes that fit, or one sentence."""
    if x.ndim not in (2, 3) or not x.numel():
        raise VectorError(f"expected tokens (B, L, d) or (L, d), none of them empty; got {tuple(x.shape)}.")
    for name, (weight, bias) in taps.items():
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] % heads:
            raise VectorError(
                f"{name}: expected (H·width, {x.shape[-1]}), a multiple of {heads} rows; got {tuple(weight.shape)}."
            )
        _check_bias(name, weight, bias)
    (w_q, _), (w_k, _), (w_v, _) = taps.values()
    if w_q.shape != w_k.shape:
        raise VectorError(f"w_q and w_k meet in the scores: {tuple(w_q.shape)} and {tuple(w_k.shape)} do not fit.")
    if w_o is not None and (w_o.ndim != 2 or w_o.shape[1] != w_v.shape[0]):
        raise VectorError(f"w_o: expected (q, {w_v.shape[0]}), got {tuple(w_o.shape)}.")
    if b_o is not None and w_o is None:
        raise VectorError("b_o is the bias of w_o, which is not given.")
    if w_o is not None:
        _check_bias("w_o", w_o, b_o)


def _check_bias(name: str, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bias.shape != weight.shape[:1]:
        raise VectorError(f"the bias of {name}: expected {tuple(weight.shape[:1])}, got {tuple(bias.shape)}.")
