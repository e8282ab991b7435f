"""ev.closed_form: the exact Hessian of a Transformer block as an operator, without automatic differentiation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from evolute.calculus import losses, reading
from evolute.calculus.activations import at_kink, say_kinks
from evolute.calculus.attention_steps import Setting
from evolute.calculus.bounds import Bounds, bounds
from evolute.calculus.chain import Chain, Split
from evolute.calculus.closed_block import ClosedBlock
from evolute.calculus.graph import augmented, over_sequences, per_token
from evolute.calculus.losses import LossPoint, TokenLoss
from evolute.calculus.masks import masks
from evolute.calculus.taps import Tap, Tile, Wire, linear_source
from evolute.calculus.weights import BlockWeights
from evolute.errors import NonFiniteError, VectorError
from evolute.linop.convert import to_dense
from evolute.linop.exact import diagonal, frobenius, spectral, squares
from evolute.linop.memory import require
from evolute.linop.operator import LinearOperator, SymmetricOperator
from evolute.linop.space import Part, Select, Space
from evolute.linop.tables import PairTable


@dataclass(frozen=True, eq=False)
class Point:
    """A block at its weights, its tokens and its loss: the two chains, settled."""

    weights: BlockWeights
    setting: Setting
    tokens: Tensor  # (B·L, d)
    loss: TokenLoss
    target: Tensor

    def _loss_at(self, z: Tensor) -> LossPoint:
        point = self.loss.at(z, self.target)
        losses.check_finite(point)
        return point.detached

    @cached_property
    def sequences(self) -> Chain:
        wiring = over_sequences(self.weights, self.setting)
        return Chain.settled(wiring.steps, {"x": self.tokens}, self._loss_at)

    @cached_property
    def source(self) -> Tensor:
        """What attention reads: x, or its norm."""
        return self.sequences.values[over_sequences(self.weights, self.setting).source]

    @cached_property
    def per_token(self) -> Chain:
        seen = self.source.unflatten(0, (self.setting.batch, self.setting.length))
        wiring = per_token(self.weights, self.setting, seen)
        return Chain.settled(wiring.steps, {"x": self.tokens, "source": self.source}, lambda _: self.sequences.loss)

    @property
    def at_kink(self) -> int:
        """How many entries lie exactly at the kink of a ReLU."""
        values, gated = self.sequences.values, self.weights.gate is not None
        before = values.get("hg" if gated else "h")
        return self.setting.at_kink(values["s"]) + (0 if before is None else at_kink(self.weights.activation, before))

    # ---- parameters

    def offset(self, part: Part) -> int:
        shape = self.weights.space.shapes[part.name]
        return self.weights.space.offsets()[part.name] + (part.start or 0) * (shape[1] if len(shape) > 1 else 1)

    def shape(self, part: Part) -> torch.Size:
        return part.shape(self.weights.space.shapes[part.name])

    @cached_property
    def places(self) -> dict[str, tuple[slice, torch.Size]]:
        """Group → its entries of the flat vector, and their shape."""
        known = self.weights.parts.items()
        return {
            group: (slice(self.offset(part), self.offset(part) + self.shape(part).numel()), self.shape(part))
            for group, part in known
        }

    @cached_property
    def taps(self) -> list[Tap]:
        """In the order of the chain."""
        heads, d = self.weights.heads, self.tokens.shape[1]
        taps = [self._tap("q", Wire("q"), Wire("source"))]
        p = d + augmented(self.weights)
        taps += [tap for h in range(heads) for tap in self._key_taps(h, p, d)]
        taps += [self._value_tap(h, p, d) for h in range(heads)]
        for group, wire in (("o", "o"), ("w1", "h"), ("gate", "hg"), ("w2", "f")):
            if wire in self.per_token.values:
                taps.append(self._tap(group, Wire(wire), linear_source(self.per_token, group)))
        return [tap for tap in taps if tap.tiles]

    @cached_property
    def tile_sizes(self) -> dict[Tile, int]:
        values = self.per_token.values
        width = {tap: tap.wire.of(values).shape[-1] for tap in self.taps}
        return {
            tile: width[tap] * (tile.source.of(values).shape[-1] if tile.source else 1)
            for tap in self.taps
            for tile in tap.tiles
        }

    def _tap(self, group: str, wire: Wire, source: Wire) -> Tap:
        return Tap(wire, (*self._tile(group, source), *self._tile(f"{group}.bias", None)))

    def _tile(self, group: str, source: Wire | None, rows: slice = slice(None), out_first: bool = True) -> list[Tile]:
        """A group, or some of its rows; none if it is frozen or not there."""
        if group not in self.places:
            return []
        place, shape = self.places[group]
        skipped = (rows.start or 0) * (shape[1] if len(shape) > 1 else 1)
        return [Tile(group, place.start + skipped, source, out_first)]

    def _key_taps(self, h: int, p: int, d: int) -> list[Tap]:
        """κ_h = W_K^h q_h: stored with its input first. A bias of k is felt only where a row's sum may change."""
        d_K = self.weights.q.weight.shape[0] // self.weights.heads
        rows, source = slice(h * d_K, (h + 1) * d_K), Wire("q", h * d_K, (h + 1) * d_K)
        taps = [Tap(Wire("kappa", h * p, h * p + d), tuple(self._tile("k", source, rows, out_first=False)))]
        if p > d:
            last = Wire("kappa", h * p + d, h * p + p)
            taps.append(Tap(last, tuple(self._tile("k.bias", source, rows, out_first=False))))
        return taps

    def _value_tap(self, h: int, p: int, d: int) -> Tap:
        d_V = self.weights.v.weight.shape[0] // self.weights.heads
        rows = slice(h * d_V, (h + 1) * d_V)
        one = Wire("m", h * p + d, h * p + p) if p > d else None
        tiles = (*self._tile("v", Wire("m", h * p, h * p + d), rows), *self._tile("v.bias", one, rows))
        return Tap(Wire("c", h * d_V, (h + 1) * d_V), tiles)


class ClosedForm(SymmetricOperator):
    """The Hessian of a block's loss in its weights, or one of its two parts; made by `closed_form`.

    Products go through the chain of the whole block. Blocks are sums of straight and crossed Kronecker terms.
    """

    def __init__(self, point: Point, split: Split = Split.FULL) -> None:
        self.point, self.split = point, split

    @property
    def space(self) -> Space:
        return self.point.weights.space

    @property
    def groups(self) -> dict[str, tuple[Part, ...]]:
        """Name → the part of the parameters that it is."""
        return dict(self.space.groups)

    @property
    def outer(self) -> ClosedForm:
        """H_o = Jᵀ (∂²ℓ/∂z²) J, the Gauss–Newton part."""
        return ClosedForm(self.point, Split.OUTER)

    @property
    def functional(self) -> ClosedForm:
        """H_f = Σ_k (∂ℓ/∂z_k) ∂²z_k, the rest."""
        return ClosedForm(self.point, Split.FUNCTIONAL)

    @property
    def value(self) -> float:
        """The loss itself."""
        return float(self.point.sequences.loss.value)

    @property
    def preferred_block(self) -> int:
        widest = max(value.numel() for value in self.point.sequences.values.values())
        return max(1, min(64, (5 << 17) // max(1, widest)))  # what a step makes stays in the cache

    def apply_rows(self, rows: Tensor) -> Tensor:
        out, pieces = rows.new_empty(rows.shape), -(-len(rows) // self.preferred_block)
        for part, into in zip(rows.tensor_split(max(1, pieces)), out.tensor_split(max(1, pieces)), strict=True):
            if len(part):
                self._apply(part, into)
        return out

    def _apply(self, rows: Tensor, out: Tensor) -> None:
        """The second-order gradients of all parameters, into one flat row per vector."""
        chain, places = self.point.sequences, self.point.places
        moved = {group: rows[:, place].unflatten(1, shape) for group, (place, shape) in places.items()}
        tangents = chain.tangents({}, moved)
        cotangents = chain.cotangents(tangents, moved, self.split, {step.writes for step in chain.steps})
        untouched = set(places)
        for step in chain.steps:
            here = tuple(tangents.get(wire) for wire in step.reads)
            found = step.gradients(cotangents.get(step.writes), here, functional=self.split.bends)
            for group, gradient in found.items():
                if group in places:
                    out[:, places[group][0]] = gradient.flatten(1)
                    untouched.discard(group)
        for group in untouched:
            out[:, places[group][0]] = 0

    def gradient(self) -> Tensor:
        """∂ℓ/∂w, flat."""
        chain = self.point.sequences
        out = torch.zeros(self.space.size, dtype=self.dtype, device=self.device)
        for step in chain.steps:
            still = (None,) * len(step.reads)
            for group, gradient in step.gradients(chain.gradients[step.writes][None], still, functional=False).items():
                if group in self.point.places:
                    out[self.point.places[group][0]] = gradient.flatten()
        return out

    @property
    def input(self) -> InputHessian:
        """The Hessian of the same loss in the tokens x: what curvature hands on to the layer below."""
        return InputHessian(self.point, self.split)

    # ---- blocks

    def norms(self, kind: str = "fro", groups: Sequence[str] | None = None) -> PairTable:
        """The norm of every block, exact.

        Args:
            kind: "fro", from the Kronecker terms; or "spectral", the largest singular value.
            groups: which ones; all, if not said.
        """
        if kind not in ("fro", "spectral"):
            raise VectorError(f"expected the norm 'fro' or 'spectral', got {kind!r}.")
        names = tuple(self.groups if groups is None else groups)
        measure = frobenius if kind == "fro" else spectral
        values = torch.zeros(len(names), len(names), dtype=torch.float64)
        for i, a in enumerate(names):
            for j, b in enumerate(names[: i + 1]):
                values[i, j] = values[j, i] = measure(self.block(a, b))
        return PairTable(kind, names, values)

    def bounds(self, groups: Sequence[str] | None = None, *, norms: bool = True) -> Bounds:
        """A bound of the spectral norm of every block and of the whole, beside the norms, to show how loose it is.

        Args:
            groups: which ones; all, if not said.
            norms: whether to compute the norms themselves, which takes longer.
        """
        names = tuple(self.groups if groups is None else groups)
        return bounds(self, names, self.norms("spectral", names) if norms else None)

    def block(self, rows: Select, cols: Select) -> LinearOperator:
        return ClosedBlock.of(self, self.space.resolve(rows), self.space.resolve(cols))


class InputHessian(SymmetricOperator):
    """∂²ℓ/∂x² of a block's loss in its tokens, (B, L, d): sequences do not feel one another."""

    def __init__(self, point: Point, split: Split) -> None:
        self.point, self.split = point, split

    @property
    def space(self) -> Space:
        setting, tokens = self.point.setting, self.point.tokens
        shape = (setting.batch, setting.length, tokens.shape[1])
        return Space({"x": shape}, {}, tokens.dtype, tokens.device)

    def apply_rows(self, rows: Tensor) -> Tensor:
        chain = self.point.sequences
        tangents = chain.tangents({"x": rows.unflatten(1, self.point.tokens.shape)}, {})
        return chain.cotangents(tangents, {}, self.split, {"x"})["x"].flatten(1) if len(rows) else rows.clone()

    def per_sequence(self) -> Tensor:
        """The blocks of the diagonal, (B, L·d, L·d); all that lies between sequences is zero."""
        batch, size = self.point.setting.batch, self.space.size // self.point.setting.batch
        unit = torch.eye(size, dtype=self.dtype, device=self.device)
        return (
            torch.stack([self.apply_rows(row.repeat(1, batch))[0] for row in unit])
            .view(size, batch, size)
            .transpose(0, 1)
        )


@to_dense.register
def _(op: InputHessian) -> Tensor:
    require(
        op.space.size**2 * op.point.tokens.element_size(),
        op.device,
        "the Hessian in the input",
        "Take op.per_sequence().",
    )
    return torch.block_diag(*op.per_sequence())


@diagonal.register
def _(op: InputHessian) -> Tensor:
    return op.per_sequence().diagonal(dim1=1, dim2=2).flatten()


@squares.register
def _(op: InputHessian) -> Tensor:
    return op.per_sequence().square().sum()


def closed_form(
    layer: nn.Module,
    x: Tensor,
    target: Tensor,
    loss: str | TokenLoss | nn.Module = "mse",
    *,
    mask: Tensor | None = None,
    padding: Tensor | None = None,
) -> ClosedForm:
    """The exact Hessian of ℓ(layer(x), target) in the weights of the layer, in closed form.

    Args:
        layer: nn.TransformerEncoderLayer, or a block of evolute.zoo.
        x: tokens, as the layer takes them: (B, L, d), or (L, B, d) where it is not batch_first; or (L, d).
        target: what the loss compares with, with the same leading axes.
        loss: "mse", or one of ev.losses: cross_entropy(unembedding), token(…), autodiff(…).
        mask: (L, L), as PyTorch takes it: true where a query may not look, or numbers that are added to the scores.
        padding: (B, L), true at keys that nobody looks at; (L,) for a single sequence.

    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> H = closed_form(layer, torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    >>> H.block("v", "q").shape
    (64, 64)
    """
    weights, resolved = reading.read(layer), losses.resolve(loss)
    x, target = _arranged(layer, x, target)
    _check_tokens(x, weights)
    batch, length, _ = x.shape
    flat = resolved.flat_target(target.to(x.device), x.shape)
    allowed = masks(x, mask, padding, causal=weights.causal, sink=weights.sink, kind=weights.attention)
    setting = Setting(batch, length, weights.heads, weights.attention, allowed.kept, allowed.bias)
    tokens = x.detach().reshape(batch * length, -1).clone()
    point = Point(weights, setting, tokens, resolved, flat.detach().clone())
    say_kinks(point.at_kink)
    return ClosedForm(point)


def _arranged(layer: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Batch first."""
    for name, each in (("x", x), ("target", target)):
        if not isinstance(each, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise VectorError(f"{name}: expected a tensor, got {type(each).__name__}.")
    if x.ndim == 2:
        return x[None], target[None]
    attention = getattr(layer, "self_attn", None)
    if x.ndim == 3 and attention is not None and not attention.batch_first:
        return x.transpose(0, 1), target.transpose(0, 1) if target.ndim > 1 else target
    return x, target


def _check_tokens(x: Tensor, weights: BlockWeights) -> None:
    d, space = weights.q.weight.shape[1], weights.space
    if x.ndim != 3 or x.shape[-1] != d or not x.numel():
        raise VectorError(f"expected tokens (B, L, {d}) or (L, {d}), none of them empty; got {tuple(x.shape)}.")
    if x.dtype != space.dtype or x.device != space.device:
        raise VectorError(
            f"the layer is {space.dtype} on {space.device}, the tokens are {x.dtype} on {x.device}; they must agree."
        )
    if not torch.isfinite(x).all():
        raise NonFiniteError("the tokens x are not finite.")


@to_dense.register
def _(op: ClosedForm) -> Tensor:
    return to_dense(op.block(op.space.names, op.space.names))


@diagonal.register
def _(op: ClosedForm) -> Tensor:
    return diagonal(op.block(op.space.names, op.space.names))


@squares.register
def _(op: ClosedForm) -> Tensor:
    return squares(op.block(op.space.names, op.space.names))
