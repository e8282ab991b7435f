"""What every library is asked about: a small GPT on sums, as a plain module with a loss of `torch.nn`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evolute.zoo import GPT, addition

HEADS = 4


class Flat(nn.Module):
    """Tokens (B, L) → logits (B·L, V), as a loss of `torch.nn` takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).flatten(0, 1)


class Problem:
    """The model, one batch (x, y) of next tokens, a vector v, and the loss; the same for every library."""

    def __init__(self, width: int, layers: int, sums: int) -> None:
        data = addition(train=sums, test=1)
        self.layers, self.loss = layers, nn.CrossEntropyLoss()
        self.original = Flat(GPT(data.vocabulary, data.length - 1, width, HEADS, layers, seed=0))
        self.x, self.y = data.train.x[:, :-1], data.train.x[:, 1:].flatten()
        self.size = sum(p.numel() for p in self.original.parameters())
        self.v = torch.randn(self.size, generator=torch.Generator().manual_seed(0))

    def model(self) -> Flat:
        """A copy for each library: some leave gradients or graphs behind."""
        return copy.deepcopy(self.original)

    def pieces(self, v: Tensor) -> list[Tensor]:
        """A flat vector, parameter by parameter."""
        parameters = list(self.original.parameters())
        parts = v.split([p.numel() for p in parameters])
        return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]

    def gradient(self) -> Callable[[], Any]:
        """The unit of all times, with the fused attention that training uses."""
        model = self.model()
        parameters = list(model.parameters())
        return lambda: torch.autograd.grad(self.loss(model(self.x), self.y), parameters)


@dataclass(frozen=True)
class Asked:
    """A library that is set up: its products with v, and its largest eigenvalue to 1e-3; None where it has none."""

    hessian: Callable[[], Any]
    gauss_newton: Callable[[], Any] | None
    top: Callable[[], float]
