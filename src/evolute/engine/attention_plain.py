"""Attention in plain operations over all scores at once: derivatives of any order, at the price of memory.

Third derivatives come from here; the first two, and everything that is wanted often, from tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def second_order(given: Sequence[Any], rule: Rule, wanted: str) -> tuple[Tensor, ...]:
    """The Hessian of <u, attention(q, k, v, mask)> times (a, b, c, m): its wanted parts along q, k, v, mask, u.

    `given` is (a, b, c, m, q, k, v, mask, u); a part that is not wanted is empty.
    """
    *vectors, q, k, v, mask, u = given
    points = (q, k, v, mask) if mask is not None and mask.is_floating_point() else (q, k, v)
    steps = tuple(torch.zeros_like(x) if d is None else d for x, d in zip(points, vectors, strict=False))

    def out(*points: Tensor) -> Tensor:
        q, k, v, *added = points
        return attention(q, k, v, added[0] if added else mask, rule)

    parts = {"u": torch.func.jvp(out, points, steps)[1]}
    if u is not None:
        slope: Any = torch.func.grad(lambda *x: (out(*x) * u).sum(), tuple(range(len(points))))  # pyright: ignore
        parts |= dict(zip("qkvm", torch.func.jvp(slope, points, steps)[1], strict=False))
    return tuple(parts[letter] if letter in wanted else q.new_zeros(0) for letter in "qkvmu")
