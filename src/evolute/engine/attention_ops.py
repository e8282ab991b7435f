"""Attention as operators of the dispatcher: whoever records operations sees one each, and vmap knows how to batch them.

    evolute::attention               out, logsumexp
    evolute::attention_backward      gq, gk, gv, gm for u, or for n of them on a leading axis
    evolute::attention_keep          the same for one u, and P and dS, all tiles of them: constants of later products
    evolute::attention_second_order  the product with the second derivative, for (a, b, c, m) or n of each

On CPU the first and the second call PyTorch's fused kernels where those are exact; elsewhere, and for the others, it is
ours by tiles. Their derivatives are the business of attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from evolute.engine import attention_streaming as streaming
from evolute.engine import attention_vmap as vmap
from evolute.engine.attention_scores import Five, Four, Rule, Slot

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_STEEP = -1e3  # a row whose logsumexp is below has P = exp(S − logsumexp) rounded away

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_VIEWS = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)

_library = torch.library.Library("evolute", "FRAGMENT")
_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor? mask"
_RULE = "bool causal, float scale"
_KEPT = "Tensor? P, Tensor? dS"
_library.define(f"attention({_GIVEN}, {_RULE}) -> (Tensor, Tensor)")
_library.define(
    f"attention_keep(Tensor u, {_GIVEN}, {_RULE}, str wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_backward(Tensor u, {_GIVEN}, Tensor out, Tensor lse, {_KEPT}, {_RULE}, str wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_second_order(Tensor? a, Tensor? b, Tensor? c, Tensor? m, {_GIVEN}, Tensor? u, {_KEPT}, {_RULE},"
    " str wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Implements an operator on any device: below autograd, which must see no views, and without autocast."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            device = next(arg for arg in args if isinstance(arg, Tensor)).device.type
            plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
            with _C._AutoDispatchBelowAutograd(), _C._ExcludeDispatchKeyGuard(_VIEWS), plain:
                return function(*args)

        _library.impl(name, run, "CompositeExplicitAutograd")
        return function

    return register


@_kernel("attention")
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Slot, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if _has_fused(q, v):
        q, k, v = (_unit(each) for each in (q, k, v))
        return _FORWARD(q, k, v, 0.0, causal, attn_mask=_additive(mask, q, k), scale=scale)
    return streaming.forward(q, k, v, mask, Rule(causal, scale)), q.new_empty(0)


@_kernel("attention_keep")
def _keep(
    u: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Slot, causal: bool, scale: float, wanted: str
) -> tuple[Tensor, ...]:
    parts, P, dS = streaming.keep(u, q, k, v, mask, Rule(causal, scale), wanted)
    return *map(_one, _filled(parts, q)), P, dS


@_kernel("attention_backward")
def _backward(
    u: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Slot,
    out: Tensor,
    lse: Tensor,
    P: Slot,
    dS: Slot,
    causal: bool,
    scale: float,
    wanted: str,
) -> tuple[Tensor, ...]:
    if u.dim() == 4:
        return tuple(map(_one, _backward(u.unsqueeze(0), q, k, v, mask, out, lse, P, dS, causal, scale, wanted)))
    if P is None and _has_fused(q, v) and "m" not in wanted and not _steep(mask, lse):
        return *_fused_backward(u, q, k, v, mask, out, lse, causal, scale), q.new_empty(0)
    return _filled(streaming.backward(u, q, k, v, mask, Rule(causal, scale), wanted, P, dS), q)


def _fused_backward(
    u: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Slot, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    n, B = u.shape[:2]
    mask = _additive(mask, q, k)
    if n > 1:
        q, k, v, out, lse = (_repeated(each, n) for each in (q, k, v, out, lse))
        mask = mask if mask is None or mask.shape[0] == 1 else _repeated(mask, n)
    u, q, k, v = (_unit(each) for each in (u.flatten(0, 1), q, k, v))
    return [g.unflatten(0, (n, B)) for g in _BACKWARD(u, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)]


@_kernel("attention_second_order")
def _second_order(
    a: Slot,
    b: Slot,
    c: Slot,
    m: Slot,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Slot,
    u: Slot,
    P: Slot,
    dS: Slot,
    causal: bool,
    scale: float,
    wanted: str,
) -> tuple[Tensor, ...]:
    if next(each for each in (a, b, c, m) if each is not None).dim() == 4:
        a, b, c, m = (None if each is None else each.unsqueeze(0) for each in (a, b, c, m))
        return tuple(map(_one, _second_order(a, b, c, m, q, k, v, mask, u, P, dS, causal, scale, wanted)))
    return _filled(streaming.second_order((a, b, c, m), q, k, v, mask, u, Rule(causal, scale), wanted, P, dS), q)


def _has_fused(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _steep(mask: Slot, lse: Tensor) -> bool:
    return mask is not None and mask.is_floating_point() and bool((lse < _STEEP).any())


def _additive(mask: Slot, q: Tensor, k: Tensor) -> Slot:
    """The mask as the fused kernels take it: float, with all queries and keys."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    mask = mask if mask.dtype in (q.dtype, torch.float32) else mask.to(q.dtype)
    return mask.expand(*mask.shape[:2], q.shape[-2], k.shape[-2])


def _unit(x: Tensor) -> Tensor:
    """The fused kernels read the last axis as if its stride were 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _repeated(x: Tensor, n: int) -> Tensor:
    return x.expand(n, *x.shape).flatten(0, 1)


def _one(part: Tensor) -> Tensor:
    return part.squeeze(0) if part.numel() else part


def _filled(parts: Five | Four, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if part is None else part for part in parts)


for _name, _kinds, _results in (
    ("attention", "cccm--", "cc"),
    ("attention_backward", "vcccmcckk--f", "vvvw"),
    ("attention_second_order", "vvvwcccmckk--f", "vvvwv"),
):
    _operator = getattr(torch.ops.evolute, _name).default
    torch.library.register_vmap(f"evolute::{_name}", vmap.rule(_operator, _kinds, _results), lib=_library)
torch.library.register_vmap(
    "evolute::attention_keep", vmap.one_by_one(torch.ops.evolute.attention_keep.default), lib=_library
)
