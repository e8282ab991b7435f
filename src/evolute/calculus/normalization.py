"""LayerNorm and RMSNorm: z = c/σ with c = x − mean(x) (RMSNorm: c = x) and σ = √(mean(c²) + ε).

    J = (C − z zᵀ/d)/σ                    C = I − 11ᵀ/d (RMSNorm: C = I); symmetric, exact for every ε > 0
    Σ_k g_k ∂²z_k = −( z (Jg)ᵀ + (Jg) zᵀ + (g·z) J )/(σ d)                                  [Theorems 2 and 3]

Curvature is passed on as J G J, and so grows as 1/σ²: a row of small variance amplifies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evolute.calculus.local import LocalMap
from evolute.errors import NonFiniteError, VectorError

MANY, NARROW = 8, 64  # from so many tangents on, and up to so many features, J itself is cheaper than its formula


@dataclass(eq=False)
class Normalization(LocalMap):
    """z (n, d) and σ (n, 1) at a point; with an affine map, y = γ ⊙ z + β."""

    z: Tensor
    sigma: Tensor
    centred: bool
    weight: Tensor | None = None
    bias: Tensor | None = None
    _bent_for: tuple[Tensor, Tensor] | None = None

    @property
    def inputs(self) -> int:
        return self.z.shape[-1]

    @cached_property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._scaled(self.z) + (0 if self.bias is None else self.bias)

    def push(self, tangent: Tensor) -> Tensor:
        return self._scaled(self._bare(tangent))

    def pull(self, g: Tensor) -> Tensor:
        return self._bare(self._scaled(g))

    def bend(self, g: Tensor, tangent: Tensor) -> Tensor:
        return self._bent(g, tangent, self._bare(tangent))

    def bend_along(self, g: Tensor, tangent: Tensor, moved: Tensor) -> Tensor:
        if self._pays(tangent):
            return _per_token(tangent, self._bending(g))
        return self._bent(g, tangent, moved) if self.weight is None else self.bend(g, tangent)

    def _bent(self, g: Tensor, tangent: Tensor, moved: Tensor) -> Tensor:
        """−( z (Jg·ẋ) + Jg (z·ẋ) + (g·z) Jẋ )/(σ d), g taken through γ; `moved` is Jẋ of z."""
        g = self._scaled(g)
        slope = self._bare(g)
        along = torch.addcmul(_dot(slope, tangent) * self.z, _dot(self.z, tangent), slope)
        return along.addcmul_(_dot(g, self.z), moved).div_(-self.inputs * self.sigma)

    @property
    def weight_jacobian(self) -> Tensor:
        """∂y/∂γ = diag(z), (n, d, d); ∂y/∂β is the identity."""
        return torch.diag_embed(self.z)

    def weight_input_curvature(self, g: Tensor) -> Tensor:
        """∂²(g·y)/∂γ∂x = diag(g) J of z, (n, d, d); the second derivative in γ is zero, and so are those in β."""
        bare = Normalization(self.z, self.sigma, self.centred)
        return g[..., None] * bare.jacobian

    def _pays(self, tangent: Tensor) -> bool:
        """Whether to multiply with matrices, one per token, which are made once."""
        return tangent.ndim == 3 and len(tangent) >= MANY and self.inputs <= NARROW

    @cached_property
    def _matrices(self) -> Tensor:
        """J of z, (n, d, d)."""
        unit = torch.eye(self.inputs, dtype=self.z.dtype, device=self.z.device)
        centring = unit - 1 / self.inputs if self.centred else unit
        outer = self.z[:, :, None] * self.z[:, None]
        return (centring - outer / self.inputs) / self.sigma[..., None]

    def _bending(self, g: Tensor) -> Tensor:
        """Σ_k g_k ∂²y_k, (n, d, d); kept for the gradient it was made for."""
        if self._bent_for is None or self._bent_for[0] is not g:
            scaled = self._scaled(g)
            slope = (self._matrices @ scaled[..., None]).mT  # (n, 1, d)
            outer = self.z[..., None] * slope
            sum_of_all = outer + outer.mT + _dot(scaled, self.z)[..., None] * self._matrices
            self._bent_for = g, sum_of_all / (-self.inputs * self.sigma[..., None])
        return self._bent_for[1]

    def _bare(self, tangent: Tensor) -> Tensor:
        """J ẋ of z: (C ẋ − z (z·ẋ)/d)/σ."""
        if self._pays(tangent):
            return _per_token(tangent, self._matrices)
        inner = _dot(self.z, tangent) / self.inputs
        moved = tangent - tangent.mean(-1, keepdim=True) if self.centred else tangent
        return torch.addcmul(moved, self.z, inner, value=-1).div_(self.sigma)

    def _scaled(self, g: Tensor) -> Tensor:
        return g if self.weight is None else self.weight * g


def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Normalization:
    """Y = γ ⊙ (x − mean x)/σ + β, with its Jacobian and its curvature.

    Args:
        x: tokens, (n, d).
        weight: γ, (d,), or none.
        bias: β, (d,), or none.
        eps: ε under the root.

    >>> x = torch.randn(3, 4, dtype=torch.float64)
    >>> norm = layernorm(x)
    >>> torch.allclose(norm.jacobian.sum(-1), torch.zeros(3, 4, dtype=torch.float64), atol=1e-12)
    True
    """
    return _normalization(x, weight, bias, eps, centred=True)


def rmsnorm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Normalization:
    """Y = γ ⊙ x/√(mean(x²) + ε), with its Jacobian and its curvature.

    >>> rmsnorm(torch.tensor([[3.0, 4.0]]), eps=0.0).value
    tensor([[0.8485, 1.1314]])
    """
    return _normalization(x, weight, None, eps, centred=False)


def _normalization(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
) -> Normalization:
    if x.ndim != 2 or any(each is not None and each.shape != x.shape[1:] for each in (weight, bias)):
        shapes = [tuple(each.shape) for each in (x, weight, bias) if each is not None]
        raise VectorError(f"expected tokens (n, d), and weight and bias (d,); got {', '.join(map(str, shapes))}.")
    c = x - x.mean(-1, keepdim=True) if centred else x
    sigma = (c.square().mean(-1, keepdim=True) + eps).sqrt()
    if not (sigma > 0).all():
        row = int((~(sigma > 0)).nonzero()[0, 0])
        raise NonFiniteError(
            f"token {row} has zero variance and ε is {eps:g}: the normalisation has no derivative there. Use ε > 0."
        )
    return Normalization(c / sigma, sigma, centred, weight, bias)


def _per_token(tangent: Tensor, matrices: Tensor) -> Tensor:
    """Each token's symmetric matrix with its tangents: (k, n, d), (n, d, d) → (k, n, d)."""
    return torch.bmm(tangent.transpose(0, 1), matrices).transpose(0, 1).contiguous()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)
