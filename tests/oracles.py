"""Curvature by other means, in float64: nothing here goes through the engine.

Hessians by `torch.func.hessian` of a plain function of one flat vector, with attention and LayerNorm written out;
Gauss–Newton as the explicit JᵀL''J; the empirical Fisher from one gradient for each term; finite differences of
gradients. Losses of `torch.nn` are taken on all of the data at once, as their users would.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import evolute as ev
from evolute.linop import LinearOperator
from families import Family


class _Double(TorchFunctionMode):
    """Llama and T5 normalise in float32 whatever their dtype; a float64 tensor stays what it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1:2] == (torch.float32,) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


class _WrittenOut(_Double):
    """The batching rule of LayerNorm under forward-over-reverse is wrong in 2.13: elementary operations instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            _layer_norm(*args, **kwargs)
            if func is F.layer_norm
            else super().__torch_function__(func, types, args, kwargs)
        )


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    c = x - x.mean(axes, keepdim=True)
    z = c / (c.square().mean(axes, keepdim=True) + eps).sqrt()
    z = z if weight is None else z * weight
    return z if bias is None else z + bias


@contextmanager
def double() -> Iterator[None]:
    """Models compute in float64 throughout; without it no two algorithms agree to 1e-10 on Llama."""
    with _Double():
        yield


class _Whole(nn.Module):
    """The model with the user's `forward` around it, so that `functional_call` reaches the parameters."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model, self.loss = family.model, family.loss

    def forward(self, batch: Any) -> Any:
        if isinstance(self.loss, ev.Loss):
            return self.loss.forward(self.model, batch)
        return self.model(**batch[0]) if isinstance(batch[0], dict) else self.model(batch[0])


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.reshape(-1) for p in trainable(model).values()]).clone()


def outputs_of(family: Family) -> Callable[[Tensor, Any], Any]:
    """(w, batch) ↦ F."""
    whole, shapes = _Whole(family), {name: p.shape for name, p in trainable(family.model).items()}

    def run(w: Tensor, batch: Any) -> Any:
        pieces = w.split([shape.numel() for shape in shapes.values()])
        named = {f"model.{name}": p.view(s) for (name, s), p in zip(shapes.items(), pieces, strict=True)}
        with sdpa_kernel(SDPBackend.MATH), _WrittenOut():
            return torch.func.functional_call(whole, named, (batch,))

    return run


def sum_and_terms(family: Family, outputs: Sequence[Any]) -> tuple[Tensor, float]:
    """Σ loss over all batches, and the number that it is divided by."""
    if isinstance(family.loss, ev.Loss):
        pairs = [family.loss.criterion(out, batch) for out, batch in zip(outputs, family.batches, strict=True)]
        return torch.stack([total for total, _ in pairs]).sum(), sum(float(count) for _, count in pairs)
    out, y = torch.cat(list(outputs)), torch.cat([batch[1] for batch in family.batches])
    each = type(family.loss)(reduction="none")(out, y)  # pyright: ignore
    return each.sum(), float((y != -100).sum() if isinstance(family.loss, nn.CrossEntropyLoss) else each.numel())


def value(family: Family) -> Callable[[Tensor], Tensor]:
    """w ↦ L(w) over all of the data."""
    run = outputs_of(family)

    def at(w: Tensor) -> Tensor:
        total, terms = sum_and_terms(family, [run(w, batch) for batch in family.batches])
        return total / terms

    return at


def gradient(family: Family) -> Tensor:
    return torch.func.grad(value(family))(flat(family.model))


def hessian(family: Family) -> Tensor:
    """∂²L/∂w², forward over reverse."""
    return torch.func.hessian(value(family))(flat(family.model))


def hessian_in_reverse(family: Family) -> Tensor:
    """∂²L/∂w², reverse over reverse."""
    return torch.func.jacrev(torch.func.grad(value(family)))(flat(family.model))


def gauss_newton(family: Family) -> Tensor:
    """(1/N) Σ_b Jᵀ (∂²ℓ/∂F²) J, with J and ∂²ℓ/∂F² explicit."""
    run, w = outputs_of(family), flat(family.model)
    _, terms = sum_and_terms(family, [run(w, batch) for batch in family.batches])
    parts = [_curved(lambda w, b=batch: run(w, b), _criterion(family, batch), w) for batch in family.batches]
    return torch.stack(parts).sum(0) / terms


def _curved(forward: Callable[[Tensor], Any], criterion: Callable[[Any], Tensor], w: Tensor) -> Tensor:
    output = forward(w)
    assert isinstance(output, Tensor), "one tensor of outputs, so that its Jacobian is one matrix"
    jacobian = torch.func.jacrev(lambda w: forward(w).reshape(-1))(w)
    inner = torch.func.hessian(lambda f: criterion(f.view(output.shape)))(output.reshape(-1))
    return jacobian.T @ inner @ jacobian


def _criterion(family: Family, batch: Any) -> Callable[[Any], Tensor]:
    if isinstance(family.loss, ev.Loss):
        return lambda output: family.loss.criterion(output, batch)[0]  # pyright: ignore
    return lambda output: type(family.loss)(reduction="sum")(output, batch[1])  # pyright: ignore


def empirical_fisher(family: Family) -> Tensor:
    """(1/N) Σ_t ∇ℓ_t ∇ℓ_tᵀ, one gradient after the other."""
    run, w = outputs_of(family), flat(family.model).requires_grad_()
    rows: list[Tensor] = []
    for batch in family.batches:
        losses = _terms(family, run(w, batch), batch)
        rows += [torch.autograd.grad(each, w, retain_graph=True)[0] for each in losses]
    _, terms = sum_and_terms(family, [run(w, batch) for batch in family.batches])
    return torch.stack(rows).T @ torch.stack(rows) / terms


def _terms(family: Family, output: Any, batch: Any) -> Tensor:
    if isinstance(family.loss, ev.Loss):
        assert family.loss.terms is not None
        return family.loss.terms(output, batch)
    return type(family.loss)(reduction="none")(output, batch[1]).reshape(-1)  # pyright: ignore


def difference(objective: ev.Objective, direction: Tensor, step: float = 1e-5) -> Tensor:
    """(∇L(w + s u) − ∇L(w − s u)) / 2s: the gradient's own word on H u."""
    up, down = (_moved(objective, direction, sign * step) for sign in (1, -1))
    return (up - down) / (2 * step)


def _moved(objective: ev.Objective, direction: Tensor, step: float) -> Tensor:
    pieces = objective.space.views(direction)
    before = [p.detach().clone() for p in objective.parameters.values()]
    with torch.no_grad():
        for p, piece in zip(objective.parameters.values(), pieces, strict=True):
            p.add_(piece, alpha=step)
    try:
        return objective.gradient()
    finally:
        with torch.no_grad():
            for p, old in zip(objective.parameters.values(), before, strict=True):
                p.copy_(old)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖."""
    return float((ours - theirs).norm() / theirs.norm())


def columns(op: LinearOperator) -> Tensor:
    """The matrix, one product with one vector at a time."""
    eye = torch.eye(op.shape[1], dtype=op.dtype)
    return torch.stack([op @ unit for unit in eye], 1)
