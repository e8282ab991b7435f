"""ℓ_i(w + σδ) = ℓ_i + σ g_i·δ + ½σ² δᵀH_iδ + …: the Taylor model of every single sample along a direction.

One pass gives it for all samples: with s the step and u a vector of ones, ℓ′(s) = ∂_u ∂_s (u·ℓ(s)) by reverse mode, and
ℓ″ in the same way from ℓ′. It runs on the engine's own LayerNorm and attention: PyTorch's LayerNorm is wrong when it is
differentiated by way of u a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evolute.engine.objective import Objective
from evolute.engine.sample_losses import outputs_at
from evolute.errors import StudyError


@dataclass(frozen=True, eq=False)
class Along:
    """Sums of each sample: value, first and second derivative along one direction."""

    value: Tensor
    first: Tensor
    second: Tensor

    def at(self, step: float) -> Tensor:
        """The second-order model, (samples,)."""
        return self.value + step * self.first + 0.5 * step**2 * self.second


def along(objective: Objective, direction: Tensor) -> Along:
    """Of all samples, in the order of the data; the loss has to have `terms`, and a sample as many as any other.

    >>> import evolute as ev
    >>> x = torch.ones(3, 1, dtype=torch.float64)
    >>> objective = ev.Objective(torch.nn.Linear(1, 1, bias=False).double(), [(x, x)], torch.nn.MSELoss())
    >>> along(objective, torch.tensor([2.0]).double()).second  # (w + 2s − 1)² of each
    tensor([8., 8., 8.], dtype=torch.float64)
    """
    start = {name: p.detach() for name, p in objective.parameters.items()}
    delta = objective.space.unflatten(direction)
    found = list[tuple[Tensor, Tensor, Tensor]]()
    with objective.running():
        for index, batch in objective.batches:
            s = torch.zeros((), dtype=direction.dtype, requires_grad=True)
            named = {name: start[name] + s * delta[name] for name in start}
            value = _each(objective, named, index, batch)
            u = torch.ones_like(value, requires_grad=True)
            first = _slope(value, u, s)
            found.append((value.detach(), first.detach(), _slope(first, u, s).detach()))
    return Along(*(torch.cat(pieces) for pieces in zip(*found, strict=True)))


def _each(objective: Objective, named: dict[str, Tensor], index: int, batch: Any) -> Tensor:
    """(B,) sums over the terms of each sample."""
    if objective.loss.terms is None:
        raise StudyError("expected a loss with `terms`, to tell the samples apart.")
    outputs = outputs_at(objective, index, batch, named)
    return objective.loss.terms(outputs, batch).unflatten(0, (len(batch[0]), -1)).sum(1)


def _slope(each: Tensor, u: Tensor, s: Tensor) -> Tensor:
    """The derivative d each/ds, entry by entry."""
    (total,) = torch.autograd.grad(each @ u, s, create_graph=True)
    return torch.autograd.grad(total, u, create_graph=True)[0]
