"""Random numbers that a seed decides, while the global generator stays where it was."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def drawn_from(seed: int | None) -> Generator[None]:
    """Inside, PyTorch's CPU generator starts at the seed; afterwards it is as before. None changes nothing.

    >>> with drawn_from(0):
    ...     first = torch.rand(3)
    >>> with drawn_from(0):
    ...     torch.equal(first, torch.rand(3))
    True
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would set those of GPUs too
        yield
