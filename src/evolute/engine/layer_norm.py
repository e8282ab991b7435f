"""LayerNorm with a short second derivative.  [mathematics: J = (C − z zᵀ/d)/σ]

Autograd takes about forty passes over the data to differentiate LayerNorm twice; the closed form needs fourteen:

    d(gy)  = γ ⊙ J c + c_γ ⊙ z + c_β
    d(x)   = J (c_γ ⊙ gy − α c) − (z (gx·c) + gx (z·c)) / (σ d),     α = (u·z)/(σ d),   u = γ ⊙ gy,   gx = J u
    d(γ)   = Σ gy ⊙ J c

for cotangents (c, c_γ, c_β) of the first backward pass (gx, gγ, gβ). Rows are tokens; d is the last axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

aten = torch.ops.aten


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Z ⊙ γ + β over the last axis."""
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps)  # pyright: ignore
    return out


def supported(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None) -> bool:
    """One normalised axis, one dtype; mixed precision is left to PyTorch."""
    alike = all(each is None or each.dtype == x.dtype for each in (weight, bias))
    return len(tuple(shape)) == 1 and alike and x.dtype in (torch.float32, torch.float64) and x.numel() > 0


def _jacobian(c: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """J c by PyTorch's fused kernel; from primitive operations where it is differentiated once more."""
    if torch.is_grad_enabled():
        z = (x - mean) * rstd
        return (c - c.mean(-1, keepdim=True) - z * (c * z).mean(-1, keepdim=True)) * rstd
    return aten.native_layer_norm_backward(c, x, x.shape[-1:], mean, rstd, None, None, [True, False, False])[0]


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of each row, as functions of x."""
    mean = x.mean(-1, keepdim=True)
    return mean, ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        out, mean, rstd = aten.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        gx, g_weight, g_bias = _LayerNormBackward.apply(gy, x, weight, mean, rstd, ctx.eps)  # pyright: ignore
        return gx, g_weight if weight is not None else None, g_bias if bias is not None else None, None


class _LayerNormBackward(Function):
    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, eps: float) -> Any:
        gy = gy.contiguous()
        mask = [True, weight is not None, weight is not None]  # the kernel wants a weight for either sum
        gx, g_weight, g_bias = aten.native_layer_norm_backward(gy, x, x.shape[-1:], mean, rstd, weight, weight, mask)
        if weight is None:
            g_bias = gy.reshape(-1, x.shape[-1]).sum(0)
        ctx.save_for_backward(gy, x, weight, mean, rstd, gx)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        return gx, g_weight, g_bias

    @staticmethod
    def backward(ctx: Any, c: Tensor | None, c_weight: Tensor | None, c_bias: Tensor | None) -> Any:  # pyright: ignore
        gy, x, weight, mean, rstd, gx = ctx.saved_tensors
        needs_gy, needs_x, needs_weight = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a third derivative is wanted: mean, σ and gx depend on x again
            mean, rstd = _statistics(x, ctx.eps)
            gx = _jacobian(gy if weight is None else gy * weight, x, mean, rstd)
        jc = None if c is None else _jacobian(c.contiguous(), x, mean, rstd)
        z = (x - mean) * rstd
        d_gy = _for_upstream(jc, z, weight, c_weight, c_bias) if needs_gy else None
        d_x = _for_input(c, gy, x, weight, mean, rstd, gx, z, c_weight) if needs_x else None
        d_weight = (gy * jc).reshape(-1, x.shape[-1]).sum(0) if needs_weight and jc is not None else None
        return d_gy, d_x, d_weight, None, None, None


def _for_upstream(
    jc: Tensor | None, z: Tensor, weight: Tensor | None, c_weight: Tensor | None, c_bias: Tensor | None
) -> Tensor | None:
    """γ ⊙ J c + c_γ ⊙ z + c_β."""
    terms = [] if jc is None else [jc if weight is None else jc * weight]
    terms += [] if c_weight is None else [z * c_weight]
    terms += [] if c_bias is None else [c_bias]
    total = _sum(terms)
    return None if total is None else total.expand(z.shape)


def _for_input(
    c: Tensor | None,
    gy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    gx: Tensor,
    z: Tensor,
    c_weight: Tensor | None,
) -> Tensor | None:
    """J (c_γ ⊙ gy − α c) − (z (gx·c) + gx (z·c)) / (σ d)."""
    if c is None:
        return None if c_weight is None else _jacobian(gy * c_weight, x, mean, rstd)
    u = gy if weight is None else gy * weight
    scale = rstd / x.shape[-1]
    alpha = (u * z).sum(-1, keepdim=True) * scale
    inner = c * -alpha if c_weight is None else torch.addcmul(gy * c_weight, c, -alpha)
    out = _jacobian(inner, x, mean, rstd)
    out = out - z * (c * (gx * scale)).sum(-1, keepdim=True)
    return out - gx * (c * (z * scale)).sum(-1, keepdim=True)


def _sum(terms: list[Tensor]) -> Tensor | None:
    total: Tensor | None = None
    for term in terms:
        total = term if total is None else total + term
    return total
