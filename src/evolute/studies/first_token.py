"""The scores and weights of attention in a model of the zoo, and how much of them goes to the first token."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from evolute.errors import StudyError
from evolute.zoo.attention import Attention


def attentions(model: nn.Module) -> list[Attention]:
    """The attention of each layer of a model of the zoo."""
    found = [module for module in model.modules() if isinstance(module, Attention)]
    if not found:
        raise StudyError(f"expected a Transformer of the zoo, got {type(model).__name__}, which has no attention.")
    return found


def with_sink(model: nn.Module, sink: float) -> None:
    """From now on, every layer adds `sink` to every score of the first token; the weights stay."""
    for attention in attentions(model):
        attention.config = replace(attention.config, sink=sink)


def shares(model: nn.Module, tokens: Tensor) -> list[float]:
    """The share of the first token in each layer of a model of the zoo, where there is softmax.

    >>> from evolute.zoo import GPT
    >>> model = GPT(12, 5, 8, 2, seed=0)
    >>> with_sink(model, 30.0)
    >>> [round(share, 6) for share in shares(model, torch.zeros(1, 5, dtype=torch.long))]
    [1.0]
    """
    with torch.no_grad(), seen(model) as inputs:
        model(tokens)
        return [share_of(weights(attention, x)) for attention, x in zip(attentions(model), inputs, strict=True)]


def share_of(A: Tensor) -> float:
    """The mean of A_t1 over all but the first query, whose attention has nowhere else to go; A is (…, L, L)."""
    return float(A[..., 1:, 0].mean())


def scores(attention: Attention, x: Tensor) -> Tensor:
    """What becomes weights: q kᵀ/√d_K + sink on the first key, (B, H, L, L), from the equation."""
    q, k = (tap(x).unflatten(-1, (attention.config.heads, -1)).transpose(1, 2) for tap in (attention.q, attention.k))
    made = q @ k.mT / math.sqrt(attention.config.head_width)
    made[..., 0] += attention.config.sink
    return made


def weights(attention: Attention, x: Tensor) -> Tensor:
    """A = softmax(scores), (B, H, L, L), where tokens see the past only if the model says so."""
    made, L = scores(attention, x), x.shape[1]
    if attention.config.causal:
        made = made.masked_fill(torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1), -math.inf)
    return made.softmax(-1)


@contextmanager
def seen(model: nn.Module) -> Generator[list[Tensor]]:
    """What goes into each attention of the model, while it runs."""
    inputs = list[Tensor]()

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0].detach())

    hooks = [attention.register_forward_pre_hook(keep) for attention in attentions(model)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
