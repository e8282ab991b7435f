"""What a block is made of, whoever made it: projections, norms, and where their entries lie among the parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from evolute.linop.space import Part, Space


@dataclass(frozen=True, eq=False)
class Projection:
    """u = x Wᵀ + b: W (out, in), b (out,) or none."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """A LayerNorm, or (not centred) an RMSNorm, with its affine map."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = True


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """Everything that the Hessian of a block depends on, beside tokens and loss.

    `parts` says which piece of which parameter each group ('q', 'q.bias', 'w1', 'norm1.weight', …) is; a group that is
    not there is frozen, or not part of the block.
    """

    heads: int
    q: Projection
    k: Projection
    v: Projection
    space: Space
    parts: dict[str, Part]
    o: Projection | None = None
    up: Projection | None = None
    down: Projection | None = None
    gate: Projection | None = None
    norm1: Norm | None = None
    norm2: Norm | None = None
    order: str = "post"  # or "pre": where the norms are
    residual: bool = True
    attention: str = "softmax"
    activation: str = "relu"
    causal: bool = False
    sink: float = 0.0
    notes: tuple[str, ...] = field(default=())


PROJECTIONS = {"q": "q", "k": "k", "v": "v", "o": "o", "w1": "up", "w2": "down", "gate": "gate"}
"""Group → the attribute of BlockWeights that holds it."""
