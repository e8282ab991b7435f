"""A training on a fixed sample, step by step, with what an optimiser keeps: rate, momentum, preconditioner."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from evolute.errors import NonFiniteError
from evolute.studies.subjects import Moment
from evolute.zoo import cross_entropy
from evolute.zoo.schedules import SCHEDULES

BETA = 0.9  # heavy ball's momentum, and β₁ of Adam
DECAY, EPSILON = 0.999, 1e-8  # β₂ and ε of Adam
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setup:
    """An optimiser, a schedule, and the limit of stability, η λ_max ≤ limit; for Adam λ is that of P^-½ H P^-½."""

    make: Callable[[list[nn.Parameter], float], Optimizer]
    schedule: str
    limit: float
    adaptive: bool


SETUPS = {
    "sgd": Setup(lambda p, lr: SGD(p, lr), "constant", 2.0, False),
    "momentum": Setup(lambda p, lr: SGD(p, lr, momentum=BETA), "constant", 2 * (1 + BETA), False),
    "adam": Setup(lambda p, lr: Adam(p, lr, (BETA, DECAY), EPSILON), "constant", 2 * (1 + BETA) / (1 - BETA), True),
    "adamw": Setup(
        lambda p, lr: AdamW(p, lr, (BETA, DECAY), EPSILON), "warmup_cosine", 2 * (1 + BETA) / (1 - BETA), True
    ),
}


@dataclass(frozen=True, eq=False)
class State:
    """After so many steps: the model, the rate of the next step, and Adam's P = √v̂ + ε, flat, once there is one."""

    step: int
    model: nn.Module
    rate: float
    preconditioner: Tensor | None


def states(moment: Moment, setup: Setup, rate: float, steps: Iterable[int], total: int, batch: int) -> Iterator[State]:
    """At these steps, of `total`, on a copy of the model, which goes on: look at a state before the next.

    `batch` samples per step, drawn one after the other; 0: all of them.
    """
    model, wanted = copy.deepcopy(moment.model), set(steps)
    parameters = list(model.parameters())
    optimizer, scale = setup.make(parameters, rate), SCHEDULES[setup.schedule]
    batches = _batches(moment.sample, batch)
    for step in range(max(wanted) + 1):
        here = rate * scale((min(step, total - 1) + 0.5) / total)
        if step in wanted:
            yield State(step, model, here, _preconditioner(optimizer, parameters))
        if step < max(wanted):
            _step(model, optimizer, here, next(batches), step)


def _step(model: nn.Module, optimizer: Optimizer, rate: float, batch: Batch, step: int) -> None:
    total, terms = cross_entropy.criterion(cross_entropy.forward(model, batch), batch)
    loss = total / terms
    if not math.isfinite(loss.item()):
        raise NonFiniteError(f"the loss of step {step} is {loss.item()}; try a smaller rate than {rate:.2g}.")
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def _batches(sample: Batch, size: int) -> Iterator[Batch]:
    x, y = sample
    if size == 0 or size >= len(x):
        while True:
            yield sample
    generator = torch.Generator().manual_seed(0)
    while True:
        for chosen in torch.randperm(len(x), generator=generator).split(size):
            yield x[chosen], y[chosen]


def _preconditioner(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Tensor | None:
    """√(v/(1 − β₂^t)) + ε."""
    known = [optimizer.state.get(p, {}) for p in parameters]
    if not all("exp_avg_sq" in each for each in known):
        return None
    return torch.cat([(s["exp_avg_sq"] / (1 - DECAY ** float(s["step"]))).sqrt().reshape(-1) + EPSILON for s in known])
