"""A plain training loop: the same losses for the same seed, and what is done is kept when it is stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import Optimizer

from evolute.errors import DataError, ModelError, NonFiniteError
from evolute.zoo.config import check_choice, check_count
from evolute.zoo.data import Dataset, Samples
from evolute.zoo.losses import cross_entropy
from evolute.zoo.schedules import SCHEDULES, Schedule
from evolute.zoo.scoring import AnyLoss, Score, evaluate, in_mode, judged
from evolute.zoo.seeding import drawn_from

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr),
}
Callback = Callable[[int, float, nn.Module], object]


@dataclass(frozen=True)
class TrainingResult:
    """What was done: the loss of every step, and afterwards loss and accuracy on the test samples (or all batches).

    `interrupted` says that it was stopped by Ctrl-C before its last step.
    """

    losses: tuple[float, ...]
    loss: float
    accuracy: float | None
    seconds: float
    optimizer: str
    lr: float
    schedule: str
    seed: int
    interrupted: bool

    @property
    def steps(self) -> int:
        """How many were done."""
        return len(self.losses)


def train(
    model: nn.Module,
    data: Dataset | Samples | Iterable[Any],
    loss: AnyLoss = cross_entropy,
    *,
    steps: int = 300,
    batch: int = 64,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    schedule: str | Schedule = "constant",
    seed: int = 0,
    progress: bool = True,
    every: int = 1,
    callback: Callback | None = None,
) -> TrainingResult:
    """`steps` times w ← w − lr · schedule(t) · direction(∇L_batch(w)); the model itself is trained.

    Samples are drawn in an order that the seed decides, `batch` at a time, each once per pass; batches of yours come in
    their own order, again and again. Every so many steps `callback(step, loss, model)` is called. The global random
    numbers are not touched. Ctrl-C ends training, and what was done is returned.

    >>> from evolute.zoo import MLP, digits
    >>> result = train(MLP([64, 32, 10], seed=0), digits(), steps=60, lr=3e-3)
    >>> result.losses[0] > 2, result.accuracy > 0.8
    (True, True)
    """
    _check(model, data, steps, batch, optimizer, lr, schedule, every)
    scale = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    run = _Run(model, loss, OPTIMIZERS[optimizer](_trainable(model), lr), lambda step: lr * scale((step + 0.5) / steps))
    began = time.perf_counter()
    with drawn_from(seed), in_mode(model, training=True), torch.enable_grad():
        done = _loop(run, _endless(data, batch, seed), steps, progress, every, callback)
    score = _score(model, data, loss, batch)
    seconds = time.perf_counter() - began
    named = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "custom")
    return TrainingResult(
        tuple(done), score.loss, score.accuracy, seconds, optimizer, lr, named, seed, interrupted=len(done) < steps
    )


@dataclass(frozen=True)
class _Run:
    """A model on its way, one step at a time."""

    model: nn.Module
    loss: AnyLoss
    optimizer: Optimizer
    rate: Callable[[int], float]

    def step(self, index: int, batch: Any, before: list[float]) -> float:
        total, terms, _ = judged(self.model, batch, self.loss)
        mean = total / terms
        value = mean.item()
        if not math.isfinite(value):
            self._diverged(index, value, before)
        self.optimizer.zero_grad()
        mean.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(index)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    def _diverged(self, index: int, value: float, before: list[float]) -> None:
        history = f" (it was {before[-1]:.4g} one step earlier, {before[0]:.4g} at the first)" if before else ""
        raise NonFiniteError(
            f"the loss of step {index} is {value}{history}. Try a smaller lr than {self.rate(index):.2g}, "
            "schedule='warmup_cosine', or float64; if it is the first step, look for NaN or a batch without a term."
        )


def _loop(
    run: _Run, batches: Iterator[Any], steps: int, progress: bool, every: int, callback: Callback | None
) -> list[float]:
    """The losses of the steps that were done."""
    losses: list[float] = []
    console = Console(stderr=True)
    with suppress(KeyboardInterrupt), Progress(console=console, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("training", total=steps)
        for index in range(steps):
            losses.append(run.step(index, next(batches), losses))
            bar.update(task, advance=1, description=f"loss {losses[-1]:.4f}")
            if callback is not None and (index + 1) % every == 0:
                callback(index, losses[-1], run.model)
    return losses


# ---------------------------------------------------------------- where batches come from


def _endless(data: Dataset | Samples | Iterable[Any], size: int, seed: int) -> Iterator[Any]:
    if isinstance(data, Dataset):
        return _draws(data.train, size, torch.Generator().manual_seed(seed))
    if isinstance(data, Samples):
        return _draws(data, size, torch.Generator().manual_seed(seed))
    return _passes(data)


def _draws(samples: Samples, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for chosen in torch.randperm(len(samples), generator=generator).split(size):
            yield samples.x[chosen], samples.y[chosen]


def _passes(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise DataError("expected at least one batch in every pass, got none.")


def _score(model: nn.Module, data: Dataset | Samples | Iterable[Any], loss: AnyLoss, size: int) -> Score:
    if isinstance(data, Dataset):
        data = data.test
    return evaluate(model, data.batches(size) if isinstance(data, Samples) else data, loss)


# ---------------------------------------------------------------- what is refused


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _check(
    model: nn.Module, data: object, steps: int, batch: int, optimizer: str, lr: float, schedule: object, every: int
) -> None:
    for name, value in {"steps": steps, "batch": batch, "every": every}.items():
        check_count(name, value)
    check_choice("optimizer", optimizer, tuple(OPTIMIZERS))
    if not callable(schedule):
        check_choice("schedule", schedule, tuple(SCHEDULES))
    if not (lr > 0 and math.isfinite(lr)):
        raise ModelError(f"lr must be a positive number, got {lr}.")
    if not _trainable(model):
        raise ModelError(f"{type(model).__name__} has no parameter with requires_grad=True: there is nothing to train.")
    if isinstance(data, Iterator):
        name = type(data).__name__
        raise DataError(f"expected batches that can be iterated again, got a one-shot {name}; pass list(batches).")
