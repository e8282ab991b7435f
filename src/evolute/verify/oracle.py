"""Automatic differentiation, reverse over reverse: forward over reverse is wrong for LayerNorm in PyTorch 2.13.

The outermost pass takes all of its cotangents at once, which is what makes the command quick.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import functional

Function = Callable[..., Tensor]


def jacobian(f: Function, at: Sequence[Tensor], i: int) -> Tensor:
    """∂ vec f/∂ vec w_i, (outputs, n_i)."""
    return differentiable(lambda w: f(*_with(at, i, w)), at[i]).detach()


def second(f: Function, at: Sequence[Tensor], i: int, j: int) -> Tensor:
    """∂² vec f/∂w_i ∂w_j, (outputs · n_i, n_j)."""

    def slope(w_j: Tensor) -> Tensor:
        moved = _with(at, j, w_j)
        return differentiable(lambda w_i: f(*_with(moved, i, w_i)), moved[i])

    return _tensor(functional.jacobian(lambda w: slope(w).reshape(-1), at[j], vectorize=True)).reshape(
        -1, at[j].numel()
    )


def hessian(f: Function, at: Sequence[Tensor]) -> Tensor:
    """∂²f/∂w² of a scalar f, over all of its arguments."""
    flat, shapes = torch.cat([w.reshape(-1) for w in at]), [w.shape for w in at]

    def one(w: Tensor) -> Tensor:
        pieces = w.split([shape.numel() for shape in shapes])
        return f(*(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)))

    return _tensor(functional.hessian(one, flat, vectorize=True))


def _with(at: Sequence[Tensor], i: int, w: Tensor) -> list[Tensor]:
    return [*at[:i], w, *at[i + 1 :]]


def differentiable(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """∂ vec f/∂ vec w, (outputs, n), that can be differentiated once more, whatever w is."""
    out = functional.jacobian(lambda w: f(w).reshape(-1), w, create_graph=True)
    return _tensor(out).reshape(-1, w.numel())


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor), "one input, one output"
    return value
