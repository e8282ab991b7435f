"""Bounds of every block by submultiplicativity over its factors; they always hold.

Per token, a chain of norms takes the place of the chain of derivatives: the tangent of each wire is at most Σ ‖J‖·(what
comes in), and each cotangent at most Σ ‖J‖·ġ + ‖∂J·g‖·(what came in). With the bounds τ_t of ‖∂²ℓ/∂u_i∂u_j‖ at token t
and ι_t of ‖∂in_i/∂u_j‖ that come out,

    ‖H(W_i, W_j)‖  ≤  ‖√τ In_i‖ ‖√τ In_j‖ + ‖√ι g_i‖ ‖√ι In_j‖

by Cauchy's inequality over tokens. The whole is at most the norm of the matrix of block bounds. The parameters of norms
have few rows and columns; these are at hand, and stand in the table with their own norms.          [Theorems 1 and 6]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evolute.calculus.activations import Pointwise
from evolute.calculus.attention_steps import Against, Average, HeadLinear, Weigh
from evolute.calculus.chain import Chain, Split
from evolute.calculus.local import LocalMap, identity
from evolute.calculus.normalization import Normalization
from evolute.calculus.steps import Add, Affine, Gate, Linear, Local, Step
from evolute.calculus.taps import Tap, Tile, input_of
from evolute.linop.exact import spectral
from evolute.linop.tables import PairTable

if TYPE_CHECKING:
    from evolute.calculus.closed_form import ClosedForm

Norms = dict[str, Tensor]  # wire → one bound per token, (n,)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Per pair of groups: a bound of the spectral norm, and the norm itself where it was asked for."""

    groups: tuple[str, ...]
    bound: PairTable
    norm: PairTable | None

    @property
    def looseness(self) -> PairTable:
        """Bound over norm; one where both are zero."""
        if self.norm is None:
            raise ValueError("the true norms were not computed; ask for bounds(norms=True).")
        top, true = self.bound.values_, self.norm.values_
        return PairTable("bound/norm", self.groups, torch.where(top == true, torch.ones_like(top), top / true))

    @property
    def whole(self) -> float:
        """A bound of the whole: the spectral norm of the matrix of block bounds."""
        return float(torch.linalg.matrix_norm(self.bound.values_, 2))

    @property
    def by_count(self) -> float:
        """The published form: the number of groups times the largest block bound; never below `whole`."""
        return len(self.groups) * max(self.bound.values(), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        norm = None if self.norm is None else self.norm.to_dict()
        return {"bound": self.bound.to_dict(), "norm": norm, "whole": self.whole, "by_count": self.by_count}

    def __str__(self) -> str:
        shown = [self.bound] if self.norm is None else [self.bound, self.norm, self.looseness]
        whole = f"whole: at most {self.whole:.3g} (number of groups × largest: {self.by_count:.3g})"
        return "\n\n".join([*map(str, shown), whole])


def bounds(op: ClosedForm, groups: Sequence[str], norms: PairTable | None) -> Bounds:
    """The table for some groups of a closed form."""
    values = torch.zeros(len(groups), len(groups), dtype=torch.float64)
    tiles = _TileBounds(op)
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[: i + 1]):
            values[i, j] = values[j, i] = _of_pair(op, tiles, a, b)
    return Bounds(tuple(groups), PairTable("bound", tuple(groups), values), norms)


def _of_pair(op: ClosedForm, tiles: _TileBounds, a: str, b: str) -> float:
    if a.startswith("norm") or b.startswith("norm"):
        return spectral(op.block(a, b))
    rows, cols = tiles.of(a), tiles.of(b)
    if not rows or not cols:
        return 0.0  # a bias of k under softmax: the loss does not feel it
    return float(torch.linalg.matrix_norm(tiles.values[rows][:, cols], 2))


class _TileBounds:
    """A bound for every pair of weights of the chain per token; a group may be several of them, one per head."""

    def __init__(self, op: ClosedForm) -> None:
        self.chain, self.split, self.taps = op.point.per_token, op.split, op.point.taps
        self.pairs = [(tap, tile) for tap in self.taps for tile in tap.tiles]
        self.factors = Factors.of(self.chain)

    def of(self, group: str) -> list[int]:
        return [i for i, (_, tile) in enumerate(self.pairs) if tile.group == group]

    @cached_property
    def values(self) -> Tensor:
        out = torch.zeros(len(self.pairs), len(self.pairs), dtype=torch.float64)
        for j, (tap, own) in enumerate(self.pairs):
            gains = self.factors.forwards(tap)
            cotangents = self.factors.backwards(gains, self.split)
            for i, (row, tile) in enumerate(self.pairs[j:], j):
                out[i, j] = out[j, i] = self._pair(row, tile, own, gains, cotangents)
        return out

    def _pair(self, row: Tap, tile: Tile, own: Tile, gains: Norms, cotangents: Norms) -> float:
        In_i, In_j, zero = (
            input_of(tile, self.chain),
            input_of(own, self.chain),
            torch.zeros(len(self.chain.loss.gradient)),
        )
        tau = cotangents.get(row.wire.name, zero.to(In_i))
        out = _weighted(In_i, tau) * _weighted(In_j, tau)
        if tile.source is not None and self.split.bends:
            iota = gains.get(tile.source.name, zero.to(In_i))
            out += _weighted(row.wire.of(self.chain.gradients), iota) * _weighted(In_j, iota)
        return out


def _weighted(vectors: Tensor, weights: Tensor) -> float:
    """‖diag(√w) X‖ of the rows of X."""
    return float(torch.linalg.matrix_norm(vectors * weights.sqrt()[:, None], 2))


# ---- norms instead of derivatives


@dataclass(frozen=True, eq=False)
class Factor:
    """A step by its norms: per wire it reads ‖J‖, and per pair of those ‖∂J·g‖, one number per token."""

    reads: tuple[str, ...]
    writes: str
    gain: tuple[Tensor, ...]
    bend: dict[tuple[int, int], Tensor]


@dataclass(frozen=True, eq=False)
class Factors:
    """The chain per token, by norms."""

    factors: list[Factor]
    out: str
    loss: Tensor

    @classmethod
    def of(cls, chain: Chain) -> Factors:
        """Scores, weights and moments are one factor: the second and third moments of the tokens."""
        found, moments = list[Factor](), list[Step]()
        for step in chain.steps:
            if isinstance(step, (Against, Weigh)):
                moments.append(step)
            elif isinstance(step, Average):
                found.append(_moments(moments, step))
            else:
                gain, bend = norms_of(step)
                found.append(Factor(step.reads, step.writes, gain, bend))
        return cls(found, chain.out, _symmetric_norm(chain.loss.curvature))

    def forwards(self, tap: Tap) -> Norms:
        known = {tap.wire.name: torch.ones_like(self.loss)}
        for factor in self.factors:
            parts = [gain * known[wire] for gain, wire in zip(factor.gain, factor.reads, strict=True) if wire in known]
            if parts and factor.writes != tap.wire.name:
                known[factor.writes] = torch.stack(parts).sum(0)
        return known

    def backwards(self, gains: Norms, split: Split) -> Norms:
        known = {self.out: self.loss * gains[self.out]} if split.loss_counts else {}
        for factor in reversed(self.factors):
            for i, wire in enumerate(factor.reads):
                parts = [factor.gain[i] * known[factor.writes]] if factor.writes in known else []
                if split.bends:
                    reads = enumerate(factor.reads)
                    parts += [factor.bend[i, j] * gains[w] for j, w in reads if (i, j) in factor.bend and w in gains]
                if parts:
                    known[wire] = known.get(wire, torch.zeros_like(self.loss)) + torch.stack(parts).sum(0)
        return known


Both = tuple[tuple[Tensor, ...], dict[tuple[int, int], Tensor]]


@singledispatch
def norms_of(step: Step) -> Both:
    """‖J‖ and ‖∂J·g‖ of a step, token by token."""
    raise TypeError(f"no norms are known of {type(step).__name__}.")


@norms_of.register
def _(step: Linear) -> Both:
    return (_everywhere(torch.linalg.matrix_norm(step.weight, 2), step.g),), {}


@norms_of.register
def _(step: HeadLinear) -> Both:
    return (_everywhere(torch.linalg.matrix_norm(step.weight, 2).max(), step.g),), {}


@norms_of.register
def _(step: Affine) -> Both:
    largest = step.g.new_ones(()) if step.weight is None else step.weight.abs().max()
    return (_everywhere(largest, step.g),), {}


@norms_of.register
def _(step: Add) -> Both:
    one = _everywhere(step.g.new_ones(()), step.g)
    return (one, one), {}


@norms_of.register
def _(step: Gate) -> Both:
    phi, h = (value.abs().amax(-1) for value in step.values)
    cross = step.g.abs().amax(-1)
    return (h, phi), {(0, 1): cross, (1, 0): cross}


@norms_of.register
def _(step: Local) -> Both:
    gain, bend = _local(step.map, step.g)
    return (gain,), {(0, 0): bend}


def _local(here: LocalMap, g: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(here, Pointwise):
        return here.slope.abs().amax(-1), (here.second * g).abs().amax(-1)
    assert isinstance(here, Normalization)
    slope, sigma = here.pull(g), here.sigma[:, 0]
    along = (here.z * slope).sum(-1).abs() + here.z.norm(dim=-1) * slope.norm(dim=-1)  # ‖z qᵀ + q zᵀ‖
    return 1 / sigma, (along + (g * here.z).sum(-1).abs() / sigma) / (here.inputs * sigma)


def _everywhere(value: Tensor, like: Tensor) -> Tensor:
    return value.expand(len(like))


def _moments(before: Sequence[Step], average: Average) -> Factor:
    """κ ↦ m: J is the second central moment over √d_K, ∂J·g the third along g over d_K; the largest of the heads."""
    against, weigh = before
    assert isinstance(against, Against) and isinstance(weigh, Weigh)
    p = against.tokens.shape[-1]
    basis = identity(p, against.tokens.flatten(0, 1)).unflatten(1, against.tokens.shape[:2])  # (p, B, L, p)
    scores = (basis[:, :, None] @ against.tokens[:, None].mT) * against.scale  # (p, B, 1, L, L)
    scores = scores.expand(-1, -1, against.setting.heads, -1, -1)
    tokens = average.tokens[:, None]
    J = (weigh.weights.push(scores) @ tokens).movedim(0, -1)  # (B, H, L, p, p)
    C = (weigh.weights.bend(weigh.g, scores) @ tokens * against.scale).movedim(0, -1)
    gain, bend = (_symmetric_norm(each).amax(1).flatten() for each in (J, C))
    return Factor(against.reads, average.writes, (gain,), {(0, 0): bend})


def _symmetric_norm(matrices: Tensor) -> Tensor:
    """The largest |λ| of symmetric matrices (…, p, p)."""
    return torch.linalg.eigvalsh(matrices).abs().amax(-1)
