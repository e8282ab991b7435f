"""What a model can be trained to do: labels, two views of one image, labels of images that were moved against it.

The curvature of a loss with a random or an inner step is that of what is held fixed:

- contrastive, −log softmax_j(z_i·z′_j/τ)_i both ways: the two views of every image. Pairs of a batch are its terms.
- adversarial, L(w; x + δ): the move δ, found at the weights where curvature is asked for. δ is made of signs and
  of cuts at an edge, so it is constant in w wherever no sign is about to change: almost everywhere ∂δ/∂w = 0, and
  what is held fixed changes neither gradient nor Hessian of w ↦ L(w; x + δ(w)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolute.zoo import cross_entropy
from evolute.zoo.losses import LossParts
from evolute.zoo.seeding import drawn_from

Batch = tuple[Tensor, Tensor]
TEMPERATURE = 0.2
NOISE = 0.2  # standard deviation of what is added to a view; pixels are from −1 to 1
REACH = 0.2  # how far a pixel may be moved
ATTACKS = 3  # steps to the edge: projected ascent; 1 is the fast gradient sign method


@dataclass(frozen=True)
class Task:
    """The loss that is trained on batches (x, y); for curvature, a batch with all chance taken out, and its loss."""

    training: LossParts
    fixed: Callable[[nn.Module, Batch, int], Batch]
    loss: LossParts


LABELS = Task(cross_entropy, lambda model, batch, seed: batch, cross_entropy)


# ---- two views of one image


def views(x: Tensor) -> Batch:
    """Two random versions of each image: moved by a pixel at most, with noise."""
    return _view(x), _view(x)


def _view(x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    wide, (down, right) = F.pad(x, (1, 1, 1, 1), value=-1.0), torch.randint(3, (2, len(x))).tolist()
    moved = [each[:, i : i + height, j : j + width] for each, i, j in zip(wide, down, right, strict=True)]
    return torch.stack(moved) + NOISE * torch.randn_like(x)


def similarities(model: nn.Module, batch: Batch) -> Tensor:
    """z·z′ᵀ/τ of unit outputs, and its transpose below: (2B, B), of which row i and row B + i are to name i."""
    one, other = (F.normalize(model(view), dim=-1) for view in batch)
    S = one @ other.mT / TEMPERATURE
    return torch.cat([S, S.mT])


def _named(S: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(S, torch.arange(S.shape[1], device=S.device).repeat(2), reduction="none")


PAIRS = LossParts(similarities, lambda S, batch: (_named(S, batch).sum(), torch.tensor(len(S))), _named)


def _fixed_views(model: nn.Module, batch: Batch, seed: int) -> Batch:
    with drawn_from(seed):
        return views(batch[0])


CONTRASTIVE = Task(
    PAIRS._replace(forward=lambda model, batch: similarities(model, views(batch[0]))), _fixed_views, PAIRS
)


# ---- images moved against the model


def attacked(model: nn.Module, batch: Batch, reach: float = REACH, steps: int = ATTACKS) -> Tensor:
    """Images x + δ with |δ| ≤ reach, by steps along the signs of the gradient in the pixels, cut at the edge.

    One step goes all the way, several go 2/steps of it each. Pixels stay from −1 to 1.
    """
    x, y = batch
    moved, pace = x, reach if steps == 1 else 2 * reach / steps
    for _ in range(steps):
        moved = moved + pace * _slopes(model, moved, y).sign()
        moved = moved.clamp(x - reach, x + reach).clamp(-1, 1)
    return moved


def _slopes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)[0]


ADVERSARIAL = Task(
    cross_entropy._replace(forward=lambda model, batch: model(attacked(model, batch))),
    lambda model, batch, seed: (attacked(model, batch), batch[1]),
    cross_entropy,
)
