"""Attention in plain operations over all scores at once: derivatives of any order, at the price of memory.

Third derivatives come from here; the first two, and everything that is wanted often, from tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evolute.engine.attention_scores import Five, Four, Rule, Shape, Slot, probabilities, working_dtype


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule) -> Tensor:
    """softmax(s q kᵀ + M) v."""
    shape, dtype = Shape.of(q, k), q.dtype
    q, k, v = (each.to(working_dtype(dtype)) for each in (q, k, v))
    scores = q.unflatten(1, (shape.J, shape.G)) @ k.unsqueeze(2).mT * rule.scale
    mask = None if mask is None else shape.split(mask)
    P = probabilities(scores, mask, 0 if rule.causal else None)
    return (P @ v.unsqueeze(2)).flatten(1, 2).to(dtype)


def second_order(vectors: Four, q: Tensor, k: Tensor, v: Tensor, mask: Slot, u: Slot, rule: Rule) -> Five:
    """The Hessian of <u, attention(q, k, v, mask)> times (a, b, c, m): its parts along q, k, v, the mask and u."""
    bent = mask is not None and mask.is_floating_point()
    points = (q, k, v, mask) if bent else (q, k, v)
    steps = tuple(torch.zeros_like(x) if d is None else d for x, d in zip(points, vectors, strict=False) if x is not None)

    def out(q: Tensor, k: Tensor, v: Tensor, m: Slot = mask) -> Tensor:
        return attention(q, k, v, m, rule)

    along_u = torch.func.jvp(out, points, steps)[1]
    if u is None:
        return None, None, None, None, along_u
    slope = torch.func.grad(lambda *x: (out(*x) * u).sum(), tuple(range(len(points))))
    parts = torch.func.jvp(slope, points, steps)[1]
    return parts[0], parts[1], parts[2], parts[3] if bent else None, along_u
