"""Masks as PyTorch takes them → who may look at whom, and what is added to the scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.errors import NonFiniteError, VectorError


@dataclass(frozen=True, eq=False)
class Masks:
    """`kept`, (B or 1, 1, L, L), is true where a query may look (none: everywhere); `bias` (L, L) joins the scores."""

    kept: Tensor | None = None
    bias: Tensor | None = None


def masks(
    x: Tensor,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
    *,
    causal: bool = False,
    sink: float = 0.0,
    kind: str = "softmax",
) -> Masks:
    """All of them together, for tokens (B, L, d); of a single sequence, padding may be (L,)."""
    batch, length, _ = x.shape
    kept, bias = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device), None
    for name, each in (("mask", mask), ("padding", padding)):
        if each is not None and not isinstance(each, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise VectorError(f"{name}: expected a tensor, got {type(each).__name__}.")
    if causal:
        kept = kept.tril()
    if mask is not None:
        hidden = _hidden(mask, length)
        kept = kept & ~hidden
        bias = None if mask.dtype == torch.bool else mask.masked_fill(hidden, 0).to(x)
    if padding is not None:
        padding = padding[None] if padding.ndim == 1 else padding
        _check_padding(padding, batch, length)
        kept = kept & ~padding[:, None, None]
    if kind == "softmax":
        _check_rows(kept)
    if sink:
        bias = (x.new_zeros(length, length) if bias is None else bias).clone()
        bias[:, 0] += sink
    return Masks(None if kept.all() else kept, bias)


def _hidden(mask: Tensor, length: int) -> Tensor:
    """Where a query may not look, by a mask that is boolean or is added."""
    if mask.shape != (length, length) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise VectorError(
            f"expected a mask ({length}, {length}) of bool, true where a query may not look, or of numbers that are "
            f"added to the scores; got {mask.dtype} {tuple(mask.shape)}."
        )
    hidden = mask if mask.dtype == torch.bool else torch.isneginf(mask)
    if not torch.isfinite(mask.masked_fill(hidden, 0)).all():
        raise NonFiniteError("the mask has entries nan or +inf; expected numbers, or -inf where a query may not look.")
    return hidden


def _check_padding(padding: Tensor, batch: int, length: int) -> None:
    if padding.shape != (batch, length) or padding.dtype != torch.bool:
        raise VectorError(f"expected padding ({batch}, {length}) of bool, got {padding.dtype} {tuple(padding.shape)}.")


def _check_rows(kept: Tensor) -> None:
    if not kept.any(-1).all():
        row = int((~kept.any(-1)).nonzero()[0, -1])
        raise NonFiniteError(f"query {row} may look at no key at all: its attention is 0/0. Let it look at itself.")
