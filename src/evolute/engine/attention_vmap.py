"""How vmap batches the operators of attention.

If only vectors are batched (u of the gradient; a, b, c, m of the second order) they become, or join, the leading axis
of n vectors, and nothing is copied of what they share. If q, k, v, the mask or a shared u are batched too, all of it
joins the batch axis.

Each argument and result has a kind:

    c  (B, …)               v  (B, …) or (n, B, …)
    m  (B|1, H|1, T|1, S|1) w  like the mask, or (n, like the mask)
    k  what was kept of the scores      !  whether to keep it; here never
    f  which results are wanted: the others are empty       -  anything else
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evolute.engine.attention_scores import Slot

Operator = Callable[..., tuple[Tensor, ...]]
BatchingRule = Callable[..., tuple[tuple[Tensor, ...], tuple[int | None, ...]]]


def rule(operator: Operator, kinds: str, results: str) -> BatchingRule:
    """The batching rule of an operator whose arguments and results are of these kinds."""

    def batched(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        given = list(map(_Argument, kinds, args, in_dims))
        shared = any(each.dim is not None for each in given if each.kind in "cm")
        how = _Batch(info.batch_size, given) if shared or "v" not in kinds else _Vectors(info.batch_size, given)
        outs = operator(*(False if each.kind == "!" else how.enter(each) for each in given))
        outs = tuple(how.leave(out, kind) if out.numel() else out for out, kind in zip(outs, results, strict=True))
        return outs, tuple(0 if out.numel() else None for out in outs)

    return batched


def one_by_one(operator: Operator) -> BatchingRule:
    """The batching rule of an operator that takes one sample at a time."""

    def batched(info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        def sample(i: int) -> tuple[Tensor, ...]:
            return operator(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, in_dims, strict=True)))

        results = tuple(torch.stack(parts) for parts in zip(*map(sample, range(info.batch_size)), strict=True))
        return results, (0,) * len(results)

    return batched


class _Argument(NamedTuple):
    kind: str
    value: Any
    dim: int | None

    def front(self, size: int) -> Tensor:
        """The value with the batched axis first."""
        return self.value.expand(size, *self.value.shape) if self.dim is None else self.value.movedim(self.dim, 0)

    @property
    def axes(self) -> int:
        return self.value.dim() - (self.dim is not None)


def _many(given: Sequence[_Argument]) -> bool:
    """Whether there is an axis of n vectors already."""
    return any(each.kind == "v" and each.value is not None and each.axes == 5 for each in given)


class _Vectors:
    """(size, …) as vectors; (size, n, …) → (size n, …)."""

    def __init__(self, size: int, given: Sequence[_Argument]) -> None:
        self.size, self.many = size, _many(given)

    def enter(self, x: _Argument) -> Any:
        if x.kind not in "vw" or x.value is None:
            return None if x.dim is not None else x.value
        return x.front(self.size).flatten(0, 1) if self.many else x.front(self.size)

    def leave(self, out: Tensor, kind: str) -> Tensor:
        return out.unflatten(0, (self.size, -1)) if self.many else out


class _Batch:
    """(size, B, …) → (size B, …) and (size, n, B, …) → (n, size B, …); what was kept has another order: dropped."""

    def __init__(self, size: int, given: Sequence[_Argument]) -> None:
        self.size, self.many = size, _many(given)
        self.B, self.masks = (_length(next(each for each in given if each.kind == kind)) for kind in "cm")
        self.bent = any("m" in each.value for each in given if each.kind == "f")

    def enter(self, x: _Argument) -> Any:
        if x.value is None or x.kind == "k":
            return None
        if x.kind in "-f" or (x.kind == "m" and x.dim is None and self.masks == 1 and not self.bent):
            return x.value
        value = x.front(self.size)
        if x.kind in "vw" and self.many:
            return value.expand(-1, -1, self.B, *value.shape[3:]).movedim(0, 1).flatten(1, 2)
        return value.expand(-1, self.B, *value.shape[2:]).flatten(0, 1)

    def leave(self, out: Tensor, kind: str) -> Tensor:
        vectors = kind in "vw" and self.many
        out = out.unflatten(1, (self.size, self.B)).movedim(1, 0) if vectors else out.unflatten(0, (self.size, self.B))
        return out.sum(2 if vectors else 1, keepdim=True) if kind == "w" and self.masks < self.B else out


def _length(x: _Argument) -> int:
    """The size of the first axis that is not vmap's; 0 where there is nothing."""
    shape: Slot = x.value
    return 0 if shape is None else shape.shape[1 if x.dim == 0 else 0]
