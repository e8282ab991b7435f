"""What each curvature operator is on one batch: a linear function of one vector, as a graph kept by autograd.

All are made by reverse mode alone, which every PyTorch operation has. A Jacobian product is the derivative of u ↦ Jᵀu:
differentiating it along v costs the two matrix products of forward mode, since autograd follows u only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from evolute.engine.checks import check_differentiable_again
from evolute.engine.objective import Evaluated, Objective
from evolute.engine.tape import unrecorded
from evolute.errors import LossError

Pieces = Sequence[Tensor | None]


@dataclass(frozen=True)
class LinearMap:
    """v ↦ A v for one batch, not yet divided by the number of terms; None stands for zero."""

    function: Callable[..., Pieces]
    gradient: Pieces
    terms: float

    def __call__(self, *vector: Tensor) -> Pieces:
        return self.function(*vector)


def hessian(objective: Objective, each: Evaluated) -> LinearMap:
    """V ↦ ∂(∇ℓ·v): the backward pass of the gradient."""
    parameters = list(objective.parameters.values())
    gradient = _gradients([objective.attached(each)], parameters, create_graph=True)
    return LinearMap(_backward_of(gradient, parameters), gradient, each.terms)


def functional_hessian(objective: Objective, each: Evaluated) -> LinearMap:
    """V ↦ ∂(Σ_k λ_k ∇F_k·v) with λ = ∂ℓ/∂F held fixed: the curvature of the model alone."""
    parameters = list(objective.parameters.values())
    outputs, leaves, slopes = _cut(objective, each, create_graph=False)
    live = [(out, slope) for out, slope in zip(outputs, slopes, strict=True) if slope is not None]
    gradient = _gradients([out for out, _ in live], parameters, [slope for _, slope in live], create_graph=True)
    del leaves
    return LinearMap(_backward_of(gradient, parameters), gradient, each.terms)


def gauss_newton(objective: Objective, each: Evaluated) -> LinearMap:
    """V ↦ Jᵀ (∂²ℓ/∂F²) J v, with F what `forward` returns."""
    parameters = list(objective.parameters.values())
    outputs, leaves, slopes = _cut(objective, each, create_graph=True)
    jacobian, pulled = _jacobian(outputs, parameters)
    gradient = _gradients(outputs, parameters, [_detached(s, o) for s, o in zip(slopes, outputs, strict=True)])

    def function(*vector: Tensor) -> Pieces:
        tangents = jacobian(*vector)
        pairs = zip(slopes, tangents, strict=True)
        curved = [(slope, t) for slope, t in pairs if slope is not None and slope.requires_grad]
        return pulled(
            _gradients([s for s, _ in curved], leaves, [t for _, t in curved]) if curved else [None] * len(leaves)
        )

    return LinearMap(function, gradient, each.terms)


def empirical_fisher(objective: Objective, each: Evaluated) -> LinearMap:
    """V ↦ Σ_terms ∇ℓ_t (∇ℓ_t·v) = Jᵀ J v with J the Jacobian of the vector of losses, one for each term."""
    if objective.loss.terms is None:
        raise LossError(
            "the empirical Fisher needs the loss of each term: pass ev.Loss(forward, criterion, terms), with "
            "terms(output, batch) -> a vector that sums to the criterion's sum."
        )
    parameters = list(objective.parameters.values())
    losses = objective.loss.terms(each.outputs, each.batch).reshape(-1)
    with unrecorded():
        if not torch.allclose(losses.detach().sum(), each.total.detach(), rtol=1e-2, atol=1e-6):
            raise LossError(f"the terms sum to {losses.sum().item():.6g}, the criterion to {each.total.item():.6g}.")
    if not losses.requires_grad:  # every label of this batch is masked
        return LinearMap(lambda *vector: [None] * len(vector), [None] * len(parameters), each.terms)
    jacobian, pulled = _jacobian([losses], parameters)
    gradient = _gradients([losses], parameters, [torch.ones_like(losses)])
    return LinearMap(lambda *vector: pulled(jacobian(*vector)), gradient, each.terms)


def _gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> Pieces:
    found = torch.autograd.grad(
        list(outputs), list(inputs), cotangents, create_graph=create_graph, retain_graph=True, allow_unused=True
    )
    if create_graph:
        check_differentiable_again(found, inputs)
    return found


def _is_live(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _detached(slope: Tensor | None, output: Tensor) -> Tensor:
    return torch.zeros_like(output) if slope is None else slope.detach()


def _backward_of(gradient: Pieces, parameters: Sequence[Tensor]) -> Callable[..., Pieces]:
    """V ↦ ∂(gradient·v)/∂parameters; zero where the gradient is constant."""
    live = [index for index, each in enumerate(gradient) if _is_live(each)]
    outputs = [each for each in gradient if each is not None and each.requires_grad]

    def function(*vector: Tensor) -> Pieces:
        if not live:
            return [None] * len(parameters)
        return _gradients(outputs, parameters, [vector[index] for index in live])

    return function


def _jacobian(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Callable[..., list[Tensor]], Callable[[Pieces], Pieces]]:
    """V ↦ J v as the derivative of u ↦ Jᵀ u, and u ↦ Jᵀ u itself."""
    dummies = [torch.zeros_like(out).requires_grad_() for out in outputs]
    pullback = _gradients(outputs, parameters, dummies, create_graph=True)
    live = [index for index, each in enumerate(pullback) if _is_live(each)]
    pulled = [each for each in pullback if each is not None and each.requires_grad]

    def push(*vector: Tensor) -> list[Tensor]:
        tangents = _gradients(pulled, dummies, [vector[index] for index in live])
        return [torch.zeros_like(d) if t is None else t for t, d in zip(tangents, dummies, strict=True)]

    def pull(cotangents: Pieces) -> Pieces:
        some = [(out, each) for out, each in zip(outputs, cotangents, strict=True) if each is not None]
        if not some:
            return [None] * len(parameters)
        return _gradients([out for out, _ in some], parameters, [each for _, each in some])

    return push, pull


def _cut(objective: Objective, each: Evaluated, create_graph: bool) -> tuple[list[Tensor], list[Tensor], Pieces]:
    """The outputs F, leaves in their place, and ∂ℓ/∂F there."""
    flat, spec = tree_flatten(each.outputs)
    places = [place for place, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        raise LossError("the model's output does not depend on any chosen parameter; is it detached?")
    outputs: list[Tensor] = [flat[place] for place in places]
    leaves = [out.detach().requires_grad_() for out in outputs]
    held: list[Any] = list(flat)
    for place, leaf in zip(places, leaves, strict=True):
        held[place] = leaf
    total, _ = objective.judge(tree_unflatten(held, spec), each.batch)
    if not total.requires_grad:
        return outputs, leaves, [None] * len(leaves)
    return outputs, leaves, _slopes(objective, total, leaves, create_graph)


def _slopes(objective: Objective, total: Tensor, leaves: list[Tensor], create_graph: bool) -> Pieces:
    parameters = list(objective.parameters.values())
    found = _gradients([total], [*leaves, *parameters], create_graph=create_graph)
    if any(each is not None for each in found[len(leaves) :]):
        raise LossError(
            "the criterion uses parameters besides the model's output (a penalty, a shared head), so H = H_o + H_f has "
            "no cut; return what the criterion needs from `forward`."
        )
    return found[: len(leaves)]
