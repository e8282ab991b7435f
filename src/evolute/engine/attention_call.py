"""Attention's arguments with four axes: q (B, H, T, E), k (B, J, S, E), v (B, J, S, F), mask (B|1, H|1, T|1, S|1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.engine.attention_scores import Slot
from evolute.errors import ModelError


@dataclass(frozen=True)
class Call:
    """The arguments with four axes, and the shape in which the result is expected."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Slot
    scale: float
    result: tuple[int, ...]


def four_axes(q: Tensor, k: Tensor, v: Tensor, mask: Slot, scale: float | None, enable_gqa: bool) -> Call:
    """F.scaled_dot_product_attention's arguments as a Call; what it would not take is refused here."""
    _check(q, k, v, mask)
    q, k, v = _autocast(q, k, v)
    axes = max(q.dim(), k.dim(), v.dim())
    q, k, v = (each[(None,) * max(0, 3 - each.dim())] for each in (q, k, v))
    lead = _broadcast("batch", q, k, v, *(each.shape[:-3] for each in (q, k, v)))
    q, k, v = _heads(q, k, v, enable_gqa)
    result = (*lead, q.shape[-3], q.shape[-2], v.shape[-1])[-axes:]
    scores = (*lead, q.shape[-3], q.shape[-2], k.shape[-2])
    q, k, v = (each.expand(*lead, -1, -1, -1).reshape(lead.numel(), *each.shape[-3:]) for each in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return Call(q, k, v, None if mask is None else _mask(mask, scores), scale, result)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Slot) -> None:
    shapes = f"query {tuple(q.shape)} {q.dtype}, key {tuple(k.shape)} {k.dtype}, value {tuple(v.shape)} {v.dtype}"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise ModelError(f"attention needs tensors of shape (…, length, size); got {shapes}")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ModelError(f"attention needs query and key of one size, key and value of one length; got {shapes}")
    if not q.is_floating_point():
        raise ModelError(f"attention needs floating point tensors; got {shapes}")
    if not q.dtype == k.dtype == v.dtype and not torch.is_autocast_enabled(q.device.type):
        raise ModelError(f"attention needs query, key and value of one dtype; got {shapes}. Cast them first.")
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ModelError(f"an attention mask is boolean (True: attend) or is added to the scores; got {mask.dtype}")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast attention runs in the lower precision, unless in float64, as PyTorch's does."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _broadcast(what: str, q: Tensor, k: Tensor, v: Tensor, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        got = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
        raise ModelError(f"the {what} axes of attention do not broadcast: {got}") from None


def _heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """H query heads over J key and value heads, J dividing H."""
    queries, heads = q.shape[-3], {k.shape[-3], v.shape[-3]}
    if grouped and all(each and queries % each == 0 for each in heads):
        J = k.shape[-3] if len(heads) == 1 else queries
        return q, k.repeat_interleave(J // k.shape[-3], -3), v.repeat_interleave(J // v.shape[-3], -3)
    if heads == {1}:
        return q, k, v
    H = _broadcast("head", q, k, v, *(each.shape[-3:-2] for each in (q, k, v)))[0]
    return tuple(each.expand(*each.shape[:-3], H, -1, -1) for each in (q, k, v))  # pyright: ignore[reportReturnType]


def _mask(mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to (*lead, H, T, S) as (B|1, H|1, T|1, S|1)."""
    padded = (1,) * (len(scores) - mask.dim()) + tuple(mask.shape)
    if len(padded) != len(scores) or any(size not in (1, full) for size, full in zip(padded, scores, strict=True)):
        raise ModelError(f"an attention mask must broadcast to the scores {scores}; got {tuple(mask.shape)}")
    mask = mask.reshape(padded)
    if all(size == 1 for size in padded[:-3]):
        return mask.reshape(1, *padded[-3:])
    return mask.expand(*scores[:-3], -1, -1, -1).reshape(math.prod(scores[:-3]), *padded[-3:])
