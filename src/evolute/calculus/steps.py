"""The steps that a Transformer block is a chain of; each knows how first and second derivatives go through it.

A step reads wires and writes one. Values are (n, p) per wire, tangents and second-order cotangents (k, n, p). Per step:

    push   tangents of what it reads (and of its parameters) → tangent of what it writes
    pull   Jᵀ ġ
    bend   the rest of the second derivative: ∂(Jᵀ g) along the tangents, with g held fixed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evolute.calculus.activations import Pointwise
from evolute.calculus.local import LocalMap

Wires = dict[str, Tensor]
Moved = Mapping[str, Tensor]  # parameter → its tangents, (k, *shape)
Some = Tensor | None


@dataclass(eq=False)
class Step(ABC):
    """One step; `values` and `g` (∂ℓ/∂ what it writes) belong to the point at which the chain was settled."""

    reads: tuple[str, ...]
    writes: str
    values: tuple[Tensor, ...] = field(init=False, default=())
    g: Tensor = field(init=False)

    def run(self, *values: Tensor) -> Tensor:
        self.values = values
        return self.evaluate(*values)

    @abstractmethod
    def evaluate(self, *values: Tensor) -> Tensor: ...

    @abstractmethod
    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some: ...

    @abstractmethod
    def pull(self, g: Tensor) -> tuple[Some, ...]: ...

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        """None for each wire that nothing bends towards; `out` is what `push` gave."""
        return (None,) * len(self.reads)

    def back(self, g: Some, tangents: tuple[Some, ...], moved: Moved, out: Some, *, bends: bool) -> tuple[Some, ...]:
        """Second-order cotangents of what it reads: `pull` and, where second derivatives count, `bend`."""
        pulled = (None,) * len(self.reads) if g is None else self.pull(g)
        bent = self.bend(tangents, moved, out) if bends else (None,) * len(self.reads)
        both = zip(pulled, bent, strict=True)  # what a step that bends pulls is new, so it may be added to
        return tuple(a if b is None else b if a is None else a.add_(b) for a, b in both)

    def settle(self, g: Tensor) -> tuple[Some, ...]:
        """The gradient arrives: remembered, and passed on."""
        self.g = g
        return self.pull(g)

    def gradients(self, g: Some, tangents: tuple[Some, ...], *, functional: bool) -> dict[str, Tensor]:
        """Parameter → ∂(its gradient) along the tangents, (k, *shape)."""
        return {}


def total(*parts: Some) -> Some:
    """The sum of those that are there."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    if len(there) == 1:
        return there[0]
    out = there[0] + there[1]
    for part in there[2:]:
        out.add_(part)
    return out


def plus_product(out: Some, a: Tensor, b: Tensor) -> Tensor:
    """Out + a b, into `out`, which is nobody else's: a (n, p), b (k, p, q)."""
    return a @ b if out is None else out.baddbmm_(a.expand(len(out), -1, -1), b)


@dataclass(eq=False)
class Linear(Step):
    """u = x Wᵀ + b, W as PyTorch stores it, (out, in)."""

    weight: Tensor
    bias: Some
    name: str

    @property
    def bias_name(self) -> str:
        return f"{self.name}.bias"

    def evaluate(self, *values: Tensor) -> Tensor:
        out = values[0] @ self.weight.mT
        return out if self.bias is None else out + self.bias

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        (tangent,), own, shift = tangents, moved.get(self.name), moved.get(self.bias_name)
        out = None if tangent is None else tangent @ self.weight.mT
        out = out if own is None else plus_product(out, self.values[0], own.mT)
        return total(out, None if shift is None else shift[:, None].expand(-1, len(self.values[0]), -1))

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (g @ self.weight,)

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        own = moved.get(self.name)
        return (None if own is None else self.g @ own,)

    def back(self, g: Some, tangents: tuple[Some, ...], moved: Moved, out: Some, *, bends: bool) -> tuple[Some, ...]:
        own = moved.get(self.name) if bends else None
        pulled = None if g is None else g @ self.weight
        return (pulled if own is None else plus_product(pulled, self.g, own),)

    def gradients(self, g: Some, tangents: tuple[Some, ...], *, functional: bool) -> dict[str, Tensor]:
        tangent = tangents[0] if functional else None
        own = None if g is None else g.mT @ self.values[0]
        own = own if tangent is None else plus_product(own, self.g.mT, tangent)
        out = {} if own is None else {self.name: own}
        if g is not None and self.bias is not None:
            out[self.bias_name] = g.sum(1)
        return out


@dataclass(eq=False)
class Local(Step):
    """A token-wise map without parameters, known by its LocalMap."""

    make: Callable[[Tensor], LocalMap]
    map: LocalMap = field(init=False)

    def evaluate(self, *values: Tensor) -> Tensor:
        self.map = self.make(*values)
        return self.map.value

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        return None if tangents[0] is None else self.map.push(tangents[0])

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (self.map.pull(g),)

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        if tangents[0] is None or out is None or (isinstance(self.map, Pointwise) and self.map.straight):
            return (None,)
        return (self.map.bend_along(self.g, tangents[0], out),)


@dataclass(eq=False)
class Gate(Step):
    """a = φ ⊙ h: what a gated feed-forward layer does between its up and its down projection."""

    def evaluate(self, *values: Tensor) -> Tensor:
        return values[0] * values[1]

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        (left, right), (phi, h) = tangents, self.values
        return total(None if left is None else left * h, None if right is None else phi * right)

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        phi, h = self.values
        return g * h, g * phi

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        left, right = tangents
        return None if right is None else self.g * right, None if left is None else self.g * left


@dataclass(eq=False)
class Add(Step):
    """s = x + f: the residual connection."""

    def evaluate(self, *values: Tensor) -> Tensor:
        return values[0] + values[1]

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        return total(*tangents)

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return g, g


@dataclass(eq=False)
class Affine(Step):
    """y = γ ⊙ z + β."""

    weight: Some
    bias: Some
    name: str

    @property
    def weight_name(self) -> str:
        return f"{self.name}.weight"

    @property
    def bias_name(self) -> str:
        return f"{self.name}.bias"

    def evaluate(self, *values: Tensor) -> Tensor:
        y = self._scaled(values[0])
        return y if self.bias is None else y + self.bias

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        (tangent,), own, shift = tangents, moved.get(self.weight_name), moved.get(self.bias_name)
        out = None if tangent is None else self._scaled(tangent)
        if own is not None:
            own = own[:, None]
            out = own * self.values[0] if out is None else torch.addcmul(out, own, self.values[0])
        return total(
            out,
            None if shift is None else shift[:, None].expand(-1, len(self.values[0]), -1),
        )

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (self._scaled(g),)

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        own = moved.get(self.weight_name)
        return (None if own is None else own[:, None] * self.g,)

    def gradients(self, g: Some, tangents: tuple[Some, ...], *, functional: bool) -> dict[str, Tensor]:
        tangent = tangents[0] if functional else None
        own = total(None if g is None else g * self.values[0], None if tangent is None else self.g * tangent)
        out = dict[str, Tensor]()
        if own is not None and self.weight is not None:
            out[self.weight_name] = own.sum(1)
        if g is not None and self.bias is not None:
            out[self.bias_name] = g.sum(1)
        return out

    def _scaled(self, z: Tensor) -> Tensor:
        return z if self.weight is None else self.weight * z
