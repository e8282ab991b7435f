"""An objective is Σ loss / Σ terms over all the data, never a mean of batch means."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from evolute.errors import DataError, LossError

Count = int | float | Tensor

RECIPE = """Say what the model computes and how it is judged:

    ev.Loss(
        forward=lambda model, batch: model(batch[0]),
        criterion=lambda output, batch: (my_loss(output, batch[1]), len(batch[1])),  # (SUM, number of terms)
    )"""


@dataclass(frozen=True)
class Loss:
    """objective = Σ sum / Σ terms, with (sum, terms) = criterion(forward(model, batch), batch).

    Sums and counts add up, so every split of the data gives the same objective. With `mean=False` it is Σ sum itself.
    `terms` gives the sum in pieces: the loss of each term, as a flat vector.

    >>> import torch
    >>> loss = Loss(lambda model, batch: model(batch), lambda output, batch: (output.square().sum(), output.numel()))
    >>> loss.criterion(torch.tensor([1.0, 2.0]), None)
    (tensor(5.), 2)
    """

    forward: Callable[[nn.Module, Any], Any]
    criterion: Callable[[Any, Any], tuple[Tensor, Count]]
    terms: Callable[[Any, Any], Tensor] | None = None
    mean: bool = True

    def __post_init__(self) -> None:
        for name in ("forward", "criterion"):
            if not callable(getattr(self, name)):
                raise LossError(f"{name} must be a function, got {type(getattr(self, name)).__name__}. {RECIPE}")


def as_loss(loss: Loss | nn.Module) -> Loss:
    """Σ sum / Σ terms over batches (x, y) is `loss(model(x), y)` on all of the data at once.

    >>> import torch
    >>> output, y = torch.zeros(3, 4), torch.tensor([0, 1, -100])
    >>> total, terms = as_loss(nn.CrossEntropyLoss()).criterion(output, (None, y))
    >>> torch.allclose(total / terms, nn.CrossEntropyLoss()(output, y))
    True
    """
    if isinstance(loss, Loss):
        return loss
    count = _count_of(loss)
    if loss.reduction not in ("mean", "sum", "batchmean"):
        name = f"nn.{type(loss).__name__}"
        raise LossError(
            f"{name}: expected reduction 'mean' or 'sum', got {loss.reduction!r}, which is no scalar. {RECIPE}"
        )
    each, total = _with_reduction(loss, "none"), _with_reduction(loss, "sum")

    def criterion(output: Any, batch: Any) -> tuple[Tensor, Count]:
        arguments = _arguments(loss, output, split(batch)[1])
        return total(*arguments), count(loss, *arguments)

    def terms(output: Any, batch: Any) -> Tensor:
        return each(*_arguments(loss, output, split(batch)[1])).reshape(-1)

    return Loss(_forward, criterion, terms, mean=loss.reduction != "sum")


def split(batch: Any) -> tuple[Any, Any]:
    """A batch (x, y), a tuple or list of two, as a pair."""
    if isinstance(batch, (tuple, list)) and len(cast("Sequence[Any]", batch)) == 2:
        x, y = cast("Sequence[Any]", batch)
        return x, y
    size = f" of {len(cast('Sequence[Any]', batch))}" if isinstance(batch, (tuple, list)) else ""
    raise DataError(
        f"expected a batch (x, y), a tuple or list of two; got {type(cast('object', batch)).__name__}{size}. "
        "For dict batches of Hugging Face models use Objective.from_hf; for any other, ev.Loss(forward, criterion)."
    )


def _forward(model: nn.Module, batch: Any) -> Any:
    x, _ = split(batch)
    return model(**x) if isinstance(x, Mapping) else model(x)


def _with_reduction(loss: nn.Module, reduction: str) -> nn.Module:
    """The same settings and buffers under another reduction; the user's own module stays as it is."""
    twin = copy.copy(loss)
    twin.__dict__["reduction"] = reduction
    return twin


def _arguments(loss: nn.Module, output: Any, y: Any) -> tuple[Tensor, ...]:
    """What the loss is called with; element by element losses must not broadcast, or the terms depend on the split."""
    arguments = (output[0], y, output[1]) if isinstance(loss, nn.GaussianNLLLoss) else (output, y)
    wrong = next((value for value in arguments if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise LossError(f"nn.{type(loss).__name__} expects tensors, got {type(wrong).__name__}. {RECIPE}")
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and arguments[0].shape != arguments[1].shape:
        shapes = f"output {tuple(arguments[0].shape)} and target {tuple(arguments[1].shape)}"
        raise LossError(
            f"nn.{type(loss).__name__}: {shapes} differ in shape, so they would be broadcast, "
            "and the loss depend on how the data is cut into batches; reshape one of them."
        )
    return arguments


# ---------------------------------------------------------------- how many terms the mean of each loss divides by


def _entries(loss: nn.Module, output: Tensor, y: Tensor, *_: Tensor) -> Count:
    return output.numel()


def _entries_or_rows(loss: nn.KLDivLoss, output: Tensor, y: Tensor) -> Count:
    return len(output) if loss.reduction == "batchmean" else output.numel()


def _targets(loss: nn.CrossEntropyLoss | nn.NLLLoss, output: Tensor, y: Tensor) -> Count:
    """Σ weight of the targets that are not ignored; for targets that are probabilities, the number of predictions."""
    if y.shape == output.shape:
        return output.numel() // output.shape[min(1, output.dim() - 1)]
    kept = y != loss.ignore_index
    return kept.sum() if loss.weight is None else loss.weight[y[kept]].sum()


_COUNTS: dict[type[nn.Module], Callable[..., Count]] = {
    nn.CrossEntropyLoss: _targets,
    nn.NLLLoss: _targets,
    nn.KLDivLoss: _entries_or_rows,
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.SoftMarginLoss), _entries),
    **dict.fromkeys((nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss, nn.GaussianNLLLoss), _entries),
}


def _count_of(loss: object) -> Callable[..., Count]:
    """The counter of a loss of `torch.nn`; a subclass with a `forward` of its own is another loss."""
    for base, count in _COUNTS.items():
        if isinstance(loss, base) and type(loss).forward is base.forward:
            return count
    known = ", ".join(f"nn.{base.__name__}" for base in _COUNTS)
    got = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
    raise LossError(
        f"expected a Loss or one of {known}; got {got}, whose sum and number of terms are not known. {RECIPE}"
    )
