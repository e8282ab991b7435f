"""Curvature by other means, in float64: nothing here goes through the engine.

Hessians by `torch.func.hessian` (where it works, else `torch.autograd.functional`) of a plain function of one flat vector, under
the composite attention; Gauss–Newton as the explicit JᵀL''J; the empirical Fisher from one gradient for each term; finite
differences of gradients. Losses of `torch.nn` are taken on all of the data at once, as their users would.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from families import FAMILIES, Family
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

import evolute as ev

# T5 computes its masks with in-place writes that functorch's transforms refuse.
REVERSE_ONLY: set[str] = set()


class _Whole(nn.Module):
    """The model with the user's `forward` around it, so that `functional_call` reaches the parameters."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model, self.family = family.model, family

    def forward(self, batch: Any) -> Any:
        if isinstance(self.family.loss, ev.Loss):
            return self.family.loss.forward(self.model, batch)
        x = batch[0]
        return self.model(**x) if isinstance(x, dict) else self.model(x)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.reshape(-1) for p in trainable(model).values()]).clone()


def outputs_of(family: Family) -> Callable[[Tensor, Any], Any]:
    """(w, batch) ↦ F."""
    whole, shapes = _Whole(family), {name: p.shape for name, p in trainable(family.model).items()}

    def run(w: Tensor, batch: Any) -> Any:
        pieces = w.split([shape.numel() for shape in shapes.values()])
        named = {f"model.{n}": p.view(s) for (n, s), p in zip(shapes.items(), pieces, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.functional_call(whole, named, (batch,))

    return run


def summed(family: Family, outputs: Sequence[Any]) -> tuple[Tensor, float]:
    """Σ loss over all batches, and the number that it is divided by."""
    loss = family.loss
    if isinstance(loss, ev.Loss):
        pairs = [loss.criterion(out, batch) for out, batch in zip(outputs, family.batches, strict=True)]
        return torch.stack([total for total, _ in pairs]).sum(), float(sum(float(count) for _, count in pairs))
    out, y = torch.cat(list(outputs)), torch.cat([batch[1] for batch in family.batches])
    each = _each(loss, out, y)
    count = int((y != -100).sum()) if isinstance(loss, nn.CrossEntropyLoss) else each.numel()
    torch.testing.assert_close(each.sum() / count, loss(out, y), rtol=1e-12, atol=0)  # what the user means by it
    return each.sum(), count


def value(family: Family) -> Callable[[Tensor], Tensor]:
    """w ↦ L(w) over all of the data."""
    run = outputs_of(family)

    def at(w: Tensor) -> Tensor:
        total, count = summed_quietly(family, [run(w, batch) for batch in family.batches])
        return total / count

    return at


def summed_quietly(family: Family, outputs: Sequence[Any]) -> tuple[Tensor, float]:
    """`summed`, without the assertion that function transforms cannot trace."""
    loss = family.loss
    if isinstance(loss, ev.Loss):
        return summed(family, outputs)
    y = torch.cat([batch[1] for batch in family.batches])
    each = _each(loss, torch.cat(list(outputs)), y)
    return each.sum(), int((y != -100).sum()) if isinstance(loss, nn.CrossEntropyLoss) else each.numel()


def hessian(family: Family, *, reverse_only: bool = False) -> Tensor:
    """∂²L/∂w², by forward over reverse, or by reverse over reverse."""
    if reverse_only:
        return torch.autograd.functional.hessian(value(family), flat(family.model))
    return torch.func.hessian(value(family))(flat(family.model))


def _each(loss: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    return type(loss)(reduction="none")(out, y).reshape(-1)
