"""Ask before you spend: what a batch will need, measured by one forward pass that keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from evolute.engine.objective import Objective
from evolute.errors import TooLargeError
from evolute.linop.memory import available, human

SHARE = 0.6  # of the memory that is free, for what is kept between products
# Bytes at the height of the work for each byte that a gradient saves, measured on Transformers (tests/test_plan.py).
RECORDING, RECOMPUTING = 9.5, 7.5


@dataclass(frozen=True)
class Plan:
    """What is kept between products, and what is computed anew for each."""

    batches: int
    kept: int
    kept_bytes: int
    budget: int
    block: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        anew = self.batches - self.kept
        text = (
            f"{self.kept} of {self.batches} batches kept ({human(self.kept_bytes)} of a budget of {human(self.budget)})"
        )
        text += f", {anew} recomputed for each product" if anew else ""
        text += f", {self.block} vectors at once" if self.block > 1 else ", one vector at a time"
        return text + "".join(f"; {each}" for each in self.notes)


def budget_of(objective: Objective) -> int:
    if objective.memory is not None:
        return objective.memory
    return int(SHARE * available(objective.space.device))


class _Meter:
    """Counts the distinct storages that autograd would save, and saves none of them."""

    def __init__(self, objective: Objective) -> None:
        self.total = 0
        self.seen = {StorageWeakRef(p.untyped_storage()) for p in objective.model.parameters()}

    def pack(self, tensor: Tensor) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in self.seen:
            self.seen.add(storage)
            self.total += tensor.untyped_storage().nbytes()

    @staticmethod
    def unpack(_: Any) -> Tensor:
        raise _Differentiated


class _Differentiated(Exception):
    """The model takes a gradient inside its forward pass: what was counted until then has to do."""


def saved_bytes(objective: Objective, index: int, batch: Any) -> int:
    """Bytes that a gradient of this batch keeps between its forward and its backward pass."""
    meter = _Meter(objective)
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
        try:
            objective.evaluate_one(index, batch)
        except _Differentiated:
            return 4 * meter.total  # the gradient inside keeps about as much again for each derivative
    return meter.total


def room_to_record(objective: Objective, index: int, batch: Any) -> bool:
    """Whether a batch can be recorded; one that cannot even be recomputed is refused before anything is built."""
    saved, free = saved_bytes(objective, index, batch), available(objective.space.device)
    if RECOMPUTING * saved > free:
        pieces = int(RECOMPUTING * saved / max(free, 1)) + 1
        raise TooLargeError(
            f"a second derivative of batch {index} needs about {human(RECOMPUTING * saved)}; {human(free)} are free on "
            f"{objective.space.device}. Cut it into {pieces} smaller batches: the operator stays the same."
        )
    return RECORDING * saved <= free


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
