"""How good a model is on data: its loss, and for labels its accuracy."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evolute.errors import DataError, LossError
from evolute.zoo.data import IGNORED
from evolute.zoo.losses import Criterion, LossParts, cross_entropy

AnyLoss = LossParts | Criterion | nn.Module


@dataclass(frozen=True)
class Score:
    """Σ loss / Σ terms, and the fraction of labels that have the largest logit; None where targets are no labels."""

    loss: float
    accuracy: float | None
    terms: float


def evaluate(model: nn.Module, batches: Iterable[Any], loss: AnyLoss = cross_entropy) -> Score:
    """The score over all batches, in evaluation mode and without gradients.

    >>> x, y = torch.eye(2), torch.tensor([0, 1])
    >>> model = nn.Linear(2, 2)
    >>> _ = nn.init.eye_(model.weight), nn.init.zeros_(model.bias)
    >>> evaluate(model, [(x, y)])
    Score(loss=0.3132..., accuracy=1.0, terms=2.0)
    """
    total = terms = right = labels = 0.0
    with in_mode(model, training=False), torch.no_grad():
        for batch in batches:
            each, count, output = judged(model, batch, loss)
            hits, seen = _hits(output, batch)
            total, terms = total + each.item(), terms + float(count)
            right, labels = right + hits, labels + seen
    if not terms:
        raise DataError("there is nothing to evaluate: no batch, or no target that is not -100.")
    return Score(total / terms, right / labels if labels else None, terms)


def judged(model: nn.Module, batch: Any, loss: AnyLoss) -> tuple[Tensor, float | Tensor, Tensor]:
    """(sum of the loss, number of terms, output) of a batch; of a loss of torch.nn a sample is a term."""
    batch = _placed(batch, model)
    if not isinstance(loss, nn.Module):
        output = loss.forward(model, batch)
        total, terms = loss.criterion(output, batch)
        return total, terms, output
    output = model(batch[0])
    if isinstance(loss, nn.CrossEntropyLoss) and output.dim() == 3 and output.shape[:2] == batch[1].shape:
        raise LossError(
            f"nn.CrossEntropyLoss expects logits (B, V, L), got {tuple(output.shape)} for labels "
            f"{tuple(batch[1].shape)}; use zoo.cross_entropy, which takes (B, L, V)."
        )
    return loss(output, batch[1]) * len(output), len(output), output


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Generator[None]:
    """Every module in training or evaluation mode, and afterwards each in its own."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _hits(output: Any, batch: Any) -> tuple[float, float]:
    """(right, in all) of the labels of a batch; (0, 0) where there are none."""
    labels = batch[1] if isinstance(batch, (tuple, list)) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not isinstance(output, Tensor):
        return 0.0, 0.0
    logits = output if output.dim() == 2 else output.flatten(0, -2)
    labels = labels.flatten().to(logits.device)
    if logits.shape[:-1] != labels.shape:
        return 0.0, 0.0
    return (logits.argmax(-1) == labels).sum().item(), (labels != IGNORED).sum().item()


def _placed(batch: Any, model: nn.Module) -> Any:
    device = next((parameter.device for parameter in model.parameters()), None)
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
