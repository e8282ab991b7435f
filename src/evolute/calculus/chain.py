"""A chain of steps at a point: gradients, tangents and second-order cotangents of every wire.

    tangent     ẇ = J ẋ, wire by wire, forwards
    cotangent   ġ = ∂g along the tangents, wire by wire, backwards:  ġ_in = Jᵀ ġ_out + (∂J)ᵀ g

The loss gives the first ġ, which is G ẏ. Without it, only the functional Hessian H_f is left; without the second term,
only the outer-product Hessian H_o.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from evolute.calculus.losses import LossPoint
from evolute.calculus.steps import Moved, Some, Step, Wires


class Split(Enum):
    """Which part of H = H_o + H_f."""

    FULL = "H"
    OUTER = "H_o"
    FUNCTIONAL = "H_f"

    @property
    def bends(self) -> bool:
        return self is not Split.OUTER

    @property
    def loss_counts(self) -> bool:
        return self is not Split.FUNCTIONAL


@dataclass(eq=False)
class Chain:
    """Steps in order, settled at the values they ran with; the last one writes what the loss reads."""

    steps: Sequence[Step]
    loss: LossPoint
    values: Wires
    gradients: Wires
    upstream: dict[str, frozenset[str]]

    @classmethod
    def settled(cls, steps: Sequence[Step], given: Wires, loss_at: Callable[[Tensor], LossPoint]) -> Chain:
        """Runs forwards, asks the loss, and sends the gradient back."""
        values, upstream = dict(given), {wire: frozenset({wire}) for wire in given}
        for step in steps:
            values[step.writes] = step.run(*(values[wire] for wire in step.reads))
            upstream[step.writes] = frozenset({step.writes}).union(*(upstream[wire] for wire in step.reads))
        loss = loss_at(values[steps[-1].writes])
        gradients: Wires = {steps[-1].writes: loss.gradient}
        for step in reversed(steps):
            _add(gradients, step.reads, step.settle(gradients[step.writes]))
        return cls(steps, loss, values, gradients, upstream)

    @property
    def out(self) -> str:
        return self.steps[-1].writes

    def tangents(self, seeds: Wires, moved: Moved) -> Wires:
        """ẋ of the wires in `seeds` and of the parameters in `moved` → every wire that moves with them."""
        known = dict(seeds)
        for step in self.steps:
            _add(known, (step.writes,), (step.push(tuple(known.get(wire) for wire in step.reads), moved),))
        return known

    def cotangents(self, tangents: Wires, moved: Moved, split: Split, needed: Set[str]) -> Wires:
        """ġ of the needed wires, and of all that lie after them."""
        known: Wires = {}
        if split.loss_counts and self.out in tangents:
            known[self.out] = self.loss.curve(tangents[self.out])
        for step in reversed(self.steps):
            if any(needed & self.upstream[wire] for wire in step.reads):
                here = tuple(tangents.get(wire) for wire in step.reads)
                out = tangents.get(step.writes)
                _add(known, step.reads, step.back(known.get(step.writes), here, moved, out, bends=split.bends))
        return known


def _add(known: Wires, wires: Iterable[str], parts: Iterable[Some]) -> None:
    for wire, part in zip(wires, parts, strict=True):
        if part is not None:
            known[wire] = known[wire] + part if wire in known else part
