"""A model that has learnt something, in seconds: a place to look at curvature that is not random weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import torch

from evolute.zoo.config import BlockOptions
from evolute.zoo.data import Dataset
from evolute.zoo.data_addition import addition
from evolute.zoo.models import GPT
from evolute.zoo.training import TrainingResult, train


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, the data that it was trained on, and how it went."""

    model: GPT
    data: Dataset
    result: TrainingResult


def trained_addition(
    *,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    steps: int = 600,
    batch: int = 64,
    lr: float = 3e-3,
    seed: int = 0,
    progress: bool = True,
    **options: Unpack[BlockOptions],
) -> Trained:
    """A GPT of 101,000 parameters that adds numbers of five digits: 96 % of the digits right, loss from 2.51 to 0.14.

    Measured with seed 0 on sums that it has not seen, after 600 steps of AdamW in 9 s on one CPU core; more are not
    used. Options are those of `GPT`.

    >>> trained = trained_addition(width=32, heads=2, layers=1, steps=60)
    >>> trained.result.losses[0] > 2.4, trained.result.loss < 2.2
    (True, True)
    """
    data = addition(seed=seed)
    model = GPT(data.vocabulary, data.length, width, heads, layers, seed=seed, **options)
    schedule = "warmup_cosine"
    with one_thread():
        result = train(model, data, steps=steps, batch=batch, lr=lr, schedule=schedule, seed=seed, progress=progress)
    return Trained(model, data, result)


@contextmanager
def one_thread() -> Generator[None]:
    """Matrices this small gain little from a second core, and lose tenfold where another process is at work on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
