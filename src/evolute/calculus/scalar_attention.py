"""Scalar self-attention, f(x) = w_V A(x) x: the whole spectrum of the Hessian in closed form.

    A = softmax(x (w_Q·w_K) xᵀ/√d_K),   ℓ = mean (w_V A x − y)²,   x ∈ R^L,   w_Q, w_K ∈ R^{d_K},   w_V ∈ R

The loss knows w_Q and w_K by s = w_Q·w_K alone. With r = w_V m − y, and m, M2, M3 the mean and the second and third
central moments of the tokens under each row of A:

    ℓ_s  = 2 mean(r w_V x M2)/√d_K      ℓ_ss = 2 mean((w_V x M2)² + r w_V x² M3)/d_K
    ℓ_vv = 2 mean(m²)                   ℓ_vs = 2 mean(m w_V x M2 + r x M2)/√d_K

    H = [ ℓ_ss w_K w_Kᵀ            ℓ_ss w_K w_Qᵀ + ℓ_s I   ℓ_vs w_K ]
        [ ℓ_ss w_Q w_Kᵀ + ℓ_s I    ℓ_ss w_Q w_Qᵀ           ℓ_vs w_Q ]
        [ ℓ_vs w_Kᵀ                ℓ_vs w_Qᵀ               ℓ_vv     ]

Along (w_Q ± w_K) this is 3 × 3, the *outliers*; on the rest it is ±ℓ_s, d_K − 1 times each, the *bulk*. The
Gauss–Newton matrix drops every term with r: no bulk, and rank two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.errors import VectorError


@dataclass(frozen=True, eq=False)
class Spectrum:
    """±`bulk`, each `multiplicity` times, and three `outliers` in ascending order."""

    bulk: float
    multiplicity: int
    outliers: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        """All 2 d_K + 1 of them, ascending."""
        bulk = self.outliers.new_tensor([-self.bulk, self.bulk]).repeat(self.multiplicity)
        return torch.cat([bulk, self.outliers]).sort().values

    @property
    def condition_number(self) -> float:
        """‖H‖‖H⁻¹‖ = max |λ| / min |λ|; infinite when an eigenvalue is zero."""
        size = self.eigenvalues.abs()
        return float(size.max() / size.min()) if size.min() > 0 else float("inf")


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Derivatives of the loss by s = w_Q·w_K and v = w_V; `outer` are those of the Gauss–Newton matrix."""

    s: float
    v: float
    ss: float
    vs: float
    vv: float


@dataclass(frozen=True, eq=False)
class ScalarAttention:
    """Value, gradient, Hessian and spectrum at one point; parameters in the order w_Q, w_K, w_V.

    >>> import evolute as ev
    >>> w = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    >>> point = ev.calculus.scalar_attention(w, w, 0.5, x=[1.0, 0.0, -1.0], y=[0.3, 0.2, 0.1])
    >>> point.spectrum.multiplicity, len(point.spectrum.eigenvalues)
    (2, 7)
    >>> torch.allclose(torch.linalg.eigvalsh(point.hessian), point.spectrum.eigenvalues)
    True
    """

    w_Q: Tensor
    w_K: Tensor
    w_V: float
    value: float
    total: Derivatives
    outer: Derivatives

    @property
    def gradient(self) -> Tensor:
        """(ℓ_s w_K, ℓ_s w_Q, ℓ_v)."""
        return torch.cat([self.total.s * self.w_K, self.total.s * self.w_Q, self.w_Q.new_tensor([self.total.v])])

    @property
    def hessian(self) -> Tensor:
        """H, dense."""
        return self._matrix(self.total)

    @property
    def gauss_newton(self) -> Tensor:
        """H_o, dense."""
        return self._matrix(self.outer)

    @property
    def spectrum(self) -> Spectrum:
        """The eigenvalues of H."""
        d = self.total
        a, b = (float((self.w_Q + sign * self.w_K).square().sum()) / 2 for sign in (1, -1))
        ab = (a * b) ** 0.5
        rows = [
            [d.vv, d.vs * a**0.5, d.vs * b**0.5],
            [d.vs * a**0.5, d.s + d.ss * a, d.ss * ab],
            [d.vs * b**0.5, d.ss * ab, -d.s + d.ss * b],
        ]
        return Spectrum(abs(d.s), len(self.w_Q) - 1, torch.linalg.eigvalsh(self.w_Q.new_tensor(rows)))

    @property
    def gauss_newton_spectrum(self) -> Spectrum:
        """The eigenvalues of H_o: two outliers, of w_V and of s with |∇s|² = ‖w_Q‖² + ‖w_K‖², and zeros."""
        d, length = self.outer, float((self.w_Q.square() + self.w_K.square()).sum()) ** 0.5
        rows = [[d.vv, d.vs * length], [d.vs * length, d.ss * length**2]]
        pair = torch.linalg.eigvalsh(self.w_Q.new_tensor(rows))
        return Spectrum(0.0, len(self.w_Q) - 1, torch.cat([pair.new_zeros(1), pair]).sort().values)

    def _matrix(self, d: Derivatives) -> Tensor:
        """ℓ_ss ∇s ∇sᵀ + ℓ_s ∇²s + ℓ_vs (∇s e_vᵀ + e_v ∇sᵀ) + ℓ_vv e_v e_vᵀ, with ∇s = (w_K, w_Q, 0)."""
        k = len(self.w_Q)
        slope, last = (self.w_Q.new_zeros(2 * k + 1) for _ in range(2))
        slope[:k], slope[k:-1], last[-1] = self.w_K, self.w_Q, 1.0
        mixed = d.vs * torch.outer(slope, last)
        out = d.ss * torch.outer(slope, slope) + mixed + mixed.T + d.vv * torch.outer(last, last)
        out[:k, k:-1] += d.s * torch.eye(k, dtype=out.dtype)
        out[k:-1, :k] += d.s * torch.eye(k, dtype=out.dtype)
        return out


Values = Tensor | Sequence[float] | Sequence[Sequence[float]]


def scalar_attention(
    w_Q: Values, w_K: Values, w_V: float | Tensor, x: Values, y: Values, *, sink: float = 0.0
) -> ScalarAttention:
    """Closed-form curvature of ℓ = mean (w_V softmax(x (w_Q·w_K) xᵀ/√d_K) x − y)².

    Args:
        w_Q: query weights, (d_K,).
        w_K: key weights, (d_K,).
        w_V: the value weight.
        x: tokens, (L,), or many sequences, (…, L).
        y: targets, of the shape of x.
        sink: added to the score of the first token, in every row: an attention sink.

    >>> point = scalar_attention([1.0, 0.5], [0.3, -0.2], 2.0, x=[1.0, -1.0], y=[0.0, 1.0])
    >>> point.hessian.shape
    torch.Size([5, 5])
    """
    x, y = _tensor(x), _tensor(y)
    w_Q, w_K, v = (_tensor(w).to(x) for w in (w_Q, w_K, w_V))
    _check(w_Q, w_K, v, x, y)
    A = _attention(w_Q, w_K, x, sink)
    m, M2, M3 = _moments(A, x)
    r, root = v * m - y, len(w_Q) ** 0.5
    value = float(r.square().mean())
    return ScalarAttention(
        w_Q, w_K, float(v), value, _derivatives(r, v, x, m, M2, M3, root), _derivatives(0 * r, v, x, m, M2, M3, root)
    )


def _attention(w_Q: Tensor, w_K: Tensor, x: Tensor, sink: float) -> Tensor:
    """softmax(x s xᵀ/√d_K + sink·e₁), (…, L, L)."""
    scores = x[..., :, None] * x[..., None, :] * (w_Q @ w_K) / len(w_Q) ** 0.5
    scores[..., 0] += sink
    return torch.softmax(scores, -1)


def _moments(A: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, and second and third central moment, of x under each row of A."""
    m = (A * x[..., None, :]).sum(-1)
    c = x[..., None, :] - m[..., :, None]
    return m, (A * c**2).sum(-1), (A * c**3).sum(-1)


def _derivatives(r: Tensor, v: Tensor, x: Tensor, m: Tensor, M2: Tensor, M3: Tensor, root: float) -> Derivatives:
    """The derivatives at the top of this file; r = 0 gives those of the Gauss–Newton matrix."""
    slope = v * x * M2  # ∂f/∂s, times √d_K
    return Derivatives(
        s=float(2 * (r * slope).mean() / root),
        v=float(2 * (r * m).mean()),
        ss=float(2 * (slope**2 + r * v * x**2 * M3).mean() / root**2),
        vs=float(2 * (m * slope + r * x * M2).mean() / root),
        vv=float(2 * m.square().mean()),
    )


def _tensor(values: Values | float) -> Tensor:
    """Floating-point tensors as they come; anything else in float64."""
    given = isinstance(values, Tensor) and values.is_floating_point()
    return torch.as_tensor(values, dtype=None if given else torch.float64).detach()


def _check(w_Q: Tensor, w_K: Tensor, w_V: Tensor, x: Tensor, y: Tensor) -> None:
    if w_Q.dim() != 1 or w_Q.shape != w_K.shape or not len(w_Q):
        raise VectorError(f"expected w_Q and w_K of one shape (d_K,), got {tuple(w_Q.shape)} and {tuple(w_K.shape)}.")
    if w_V.dim():
        raise VectorError(f"expected one number for w_V, got shape {tuple(w_V.shape)}.")
    if x.shape != y.shape or not x.dim() or not x.numel():
        raise VectorError(f"expected x and y of one shape (…, L), got {tuple(x.shape)} and {tuple(y.shape)}.")
