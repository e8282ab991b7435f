"""Attention in plain operations over all scores at once: derivatives of any order, at the price of memory.

Third derivatives come from here; the first two, and everything that is wanted often, from tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evolute.engine.attention_scores import Rule, Shape, Slot, working_dtype


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule) -> Tensor:
    """softmax(s q kᵀ + M) v."""
    shape, dtype = Shape.of(q, k), q.dtype
    q, k, v = (each.to(working_dtype(dtype)) for each in (q, k, v))
    scores = q.unflatten(1, (shape.J, shape.G)) @ k.unsqueeze(2).mT * rule.scale
    scores = scores if mask is None else _masked(scores, shape.split(mask))
    if rule.causal:
        future = torch.ones(shape.T, shape.S, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    blind = scores.amax(-1, keepdim=True) == -torch.inf
    P = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    return (P @ v.unsqueeze(2)).flatten(1, 2).to(dtype)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)


def second_order(
    a: Slot,
    b: Slot,
    c: Slot,
    m: Slot,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Slot,
    u: Slot,
    rule: Rule,
    wanted: str,
) -> tuple[Tensor, ...]:
    """The Hessian of <u, attention(q, k, v, mask)> times (a, b, c, m): its parts along q, k, v, m (the mask) and u."""
    bent = mask is not None and mask.is_floating_point()
    points = [q, k, v, *([mask] if mask is not None and bent else [])]
    steps = tuple(torch.zeros_like(x) if d is None else d for x, d in zip(points, (a, b, c, m), strict=False))

    def out(q: Tensor, k: Tensor, v: Tensor, m: Slot = mask) -> Tensor:
        return attention(q, k, v, m, rule)

    parts = {"u": torch.func.jvp(out, tuple(points), steps)[1]}
    if u is not None:
        slope = torch.func.grad(lambda *x: (out(*x) * u).sum(), tuple(range(len(points))))
        parts |= dict(zip("qkvm", torch.func.jvp(slope, tuple(points), steps)[1], strict=False))
    return tuple(parts[letter] if letter in wanted else q.new_zeros(0) for letter in "qkvmu")
