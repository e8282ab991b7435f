"""Cross-entropy of logits and labels, as a sum and a number of terms, for images and for text alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from evolute.zoo.data import IGNORED


class Criterion(Protocol):
    """What an `ev.Loss` is: outputs from a batch, and (sum of the loss, number of terms) from outputs."""

    @property
    def forward(self) -> Callable[[nn.Module, Any], Any]: ...

    @property
    def criterion(self) -> Callable[[Any, Any], tuple[Tensor, int | float | Tensor]]: ...


class LossParts(NamedTuple):
    """The parts of an `ev.Loss`, in its order: `ev.Loss(*parts)`."""

    forward: Callable[[nn.Module, Any], Tensor]
    criterion: Callable[[Tensor, Any], tuple[Tensor, Tensor]]
    terms: Callable[[Tensor, Any], Tensor]


def _forward(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return logits.flatten(0, -2)  # (B, V) stays, (B, L, V) → (B·L, V)


def _criterion(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch[1].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()


def _terms(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED, reduction="none")


cross_entropy = LossParts(_forward, _criterion, _terms)
"""−log p(label), for logits (B, V) and labels (B), or logits (B, L, V) and labels (B, L); -100 is no term.

`ev.Loss(*zoo.cross_entropy)` is the loss of an objective.
"""
