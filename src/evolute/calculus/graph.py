"""The two chains of a block: over sequences, for products with all of H; per query token, for its Kronecker terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from evolute.calculus.activations import activation
from evolute.calculus.attention_steps import Against, Average, HeadLinear, Mix, Scores, Setting, Weigh
from evolute.calculus.normalization import Normalization, layernorm, rmsnorm
from evolute.calculus.steps import Add, Affine, Gate, Linear, Local, Step
from evolute.calculus.weights import BlockWeights, Norm, Projection


@dataclass(frozen=True, eq=False)
class Wiring:
    """Steps from x on; `source` is the wire that attention reads."""

    steps: list[Step]
    source: str


def over_sequences(block: BlockWeights, setting: Setting) -> Wiring:
    """Queries, keys and values move together."""
    before, source = _norm_before(block, block.norm1, "x", "norm1")
    return Wiring([*before, *attend(block.q, block.k, block.v, setting, source), *_after_attention(block)], source)


def attend(q: Projection, k: Projection, v: Projection, setting: Setting, source: str) -> list[Step]:
    """From the tokens on wire `source` to the mixed values c of all heads."""
    taps: list[Step] = [linear(each, name, source, name) for name, each in (("q", q), ("k", k), ("v", v))]
    return [*taps, Scores(("q", "k"), "s", setting), Weigh(("s",), "A", setting), Mix(("A", "v"), "c", setting)]


def per_token(block: BlockWeights, setting: Setting, tokens: Tensor) -> Wiring:
    """Keys and values of `tokens` (B, L, d), which attention reads, stay where they are; W_K and W_V are taps."""
    d_K = block.q.weight.shape[0] // block.heads
    seen, keys, values, offset = _augmented(block, tokens)
    steps = [
        linear(block.q, "q", "source", "q"),
        HeadLinear(("q",), "kappa", keys),
        Against(("kappa",), "s", setting, seen, d_K**-0.5),
        Weigh(("s",), "A", setting),
        Average(("A",), "m", setting, seen),
        HeadLinear(("m",), "c", values, offset),
    ]
    return Wiring([*steps, *_after_attention(block)], "source")


def augmented(block: BlockWeights) -> bool:
    """Whether tokens are seen as (x, 1): where the weights of a row do not sum to one, biases of k and v count."""
    return block.attention != "softmax" and (block.k.bias is not None or block.v.bias is not None)


def _augmented(block: BlockWeights, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tokens, W_K (H, d_K, p), W_V (H, p, d_V), and what is left to add; p is d, or d + 1."""
    keys = block.k.weight.unflatten(0, (block.heads, -1))
    values = block.v.weight.unflatten(0, (block.heads, -1)).mT
    if not augmented(block):
        return tokens, keys, values, block.v.bias
    ones = tokens.new_ones(*tokens.shape[:-1], 1)
    keys = torch.cat([keys, _or_zero(block.k, block.heads)[:, :, None]], 2)
    values = torch.cat([values, _or_zero(block.v, block.heads)[:, None]], 1)
    return torch.cat([tokens, ones], -1), keys, values, None


def _or_zero(projection: Projection, heads: int) -> Tensor:
    bias = projection.bias if projection.bias is not None else projection.weight.new_zeros(len(projection.weight))
    return bias.unflatten(0, (heads, -1))


# ---- what both have in common


def _after_attention(block: BlockWeights) -> list[Step]:
    steps, out = list[Step](), "c"
    if block.o is not None:
        steps, out = [linear(block.o, "o", "c", "o")], "o"
    first, y = _sublayer(block, steps, "x", out, ("s1", "y"), block.norm1, "norm1")
    if block.up is None or block.down is None:
        return first
    before, source = _norm_before(block, block.norm2, y, "norm2")
    feed, f = _feed_forward(block, block.up, block.down, source)
    return _sublayer(block, [*first, *before, *feed], y, f, ("s2", "z"), block.norm2, "norm2")[0]


def _sublayer(
    block: BlockWeights, steps: list[Step], x: str, out: str, names: tuple[str, str], norm: Norm | None, name: str
) -> tuple[list[Step], str]:
    """The residual connection, and the norm after it."""
    if block.residual:
        steps, out = [*steps, Add((x, out), names[0])], names[0]
    if norm is not None and block.order == "post":
        steps, out = [*steps, *_norm(norm, out, names[1], name)], names[1]
    return steps, out


def _feed_forward(block: BlockWeights, up: Projection, down: Projection, source: str) -> tuple[list[Step], str]:
    phi = partial(activation, name=block.activation)
    steps: list[Step] = [linear(up, "w1", source, "h")]
    if block.gate is None:
        steps.append(Local(("h",), "a", phi))
    else:
        steps += [linear(block.gate, "gate", source, "hg"), Local(("hg",), "phi", phi), Gate(("phi", "h"), "a")]
    return [*steps, linear(down, "w2", "a", "f")], "f"


def _norm_before(block: BlockWeights, norm: Norm | None, x: str, name: str) -> tuple[list[Step], str]:
    if norm is None or block.order != "pre":
        return [], x
    return _norm(norm, x, f"{name}.out", name), f"{name}.out"


def _norm(norm: Norm, x: str, out: str, name: str) -> list[Step]:
    if norm.weight is None and norm.bias is None:
        return [Local((x,), out, _normalise(norm))]
    return [Local((x,), f"{name}.z", _normalise(norm)), Affine((f"{name}.z",), out, norm.weight, norm.bias, name)]


def _normalise(norm: Norm) -> Callable[[Tensor], Normalization]:
    return partial(layernorm, eps=norm.eps) if norm.centred else partial(rmsnorm, eps=norm.eps)


def linear(projection: Projection, name: str, source: str, to: str) -> Step:
    return Linear((source,), to, projection.weight, projection.bias, name)
