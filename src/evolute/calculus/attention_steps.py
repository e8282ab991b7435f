"""Attention as steps: over sequences (`Scores`, `Weigh`, `Mix`), and per query token (`Against`, `Weigh`, `Average`).

Over sequences q, k and v move together, at twelve L×L products per Hessian product. Per query token t the keys and
values are constants, and what is left is a chain like any other,

    q_t = x_t W_Q    κ_t = W_K q_t    A_t = softmax(X κ_t/√d_K)    m_t = Σ_s A_ts x_s    c_t = m_t W_V

in which W_K and W_V are taps too. That is why every block of the Hessian is a sum over tokens of Kronecker products.

Wires of scores and weights are (…, B, H, L, L); those of tokens (…, B·L, H·width).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from evolute.calculus import scores
from evolute.calculus.activations import at_kink
from evolute.calculus.steps import Moved, Some, Step, total


@dataclass(frozen=True, eq=False)
class Setting:
    """B sequences of L tokens, H heads; who may look at whom; what is added to the scores."""

    batch: int
    length: int
    heads: int
    kind: str = "softmax"
    kept: Tensor | None = None  # (B or 1, 1, L, L), bool
    bias: Tensor | None = None  # (B or 1, H or 1, L, L)

    def split(self, tokens: Tensor) -> Tensor:
        """(…, B·L, H·w) → (…, B, H, L, w)."""
        shape = (*tokens.shape[:-2], self.batch, self.length, self.heads, tokens.shape[-1] // self.heads)
        return tokens.reshape(shape).transpose(-3, -2)

    def join(self, heads: Tensor) -> Tensor:
        """(…, B, H, L, w) → (…, B·L, H·w)."""
        lead, width = heads.shape[:-4], heads.shape[-1]
        return heads.transpose(-3, -2).reshape(*lead, self.batch * self.length, self.heads * width)

    def weights(self, raw: Tensor) -> scores.Weights:
        return scores.weights(self.kind, self._biased(raw), self.kept)

    def at_kink(self, raw: Tensor) -> int:
        """How many scores lie exactly where their weight has a kink."""
        return 0 if self.kind == "softmax" else at_kink(scores.KINDS[self.kind], self._biased(raw), self.kept)

    def _biased(self, raw: Tensor) -> Tensor:
        return raw if self.bias is None else raw + self.bias


def product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b where one of them may have an axis k in front that the other has not: k joins its rows or its columns."""
    if a.ndim < b.ndim and len(b) > 1:
        columns = b.movedim(0, -2).flatten(-2, -1)
        return (a @ columns).unflatten(-1, (len(b), b.shape[-1])).movedim(-2, 0)
    if a.ndim <= b.ndim or len(a) == 1:
        return a @ b
    rows = a.movedim(0, -3).flatten(-3, -2)
    return (rows @ b).unflatten(-2, (len(a), a.shape[-2])).movedim(-3, 0)


@dataclass(eq=False)
class Scores(Step):
    """s = q kᵀ/√d_K; `q` and `k` are kept divided by √d_K."""

    setting: Setting
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)

    def evaluate(self, *values: Tensor) -> Tensor:
        q, k = (self.setting.split(value) for value in values)
        self.scale = q.shape[-1] ** -0.5
        self.q, self.k = q * self.scale, k * self.scale
        return self.q @ k.mT

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        q, k = self._split(tangents)
        return total(None if q is None else product(q, self.k.mT), None if k is None else product(self.q, k.mT))

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return self.setting.join(product(g, self.k)), self.setting.join(product(g.mT, self.q))

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        (q, k), g, join = self._split(tangents), self.g * self.scale, self.setting.join
        return None if k is None else join(product(g, k)), None if q is None else join(product(g.mT, q))

    def _split(self, tangents: tuple[Some, ...]) -> tuple[Some, ...]:
        return tuple(None if each is None else self.setting.split(each) for each in tangents)


@dataclass(eq=False)
class Weigh(Step):
    """A = softmax(s + bias), or another function of the scores."""

    setting: Setting
    weights: scores.Weights = field(init=False)

    def evaluate(self, *values: Tensor) -> Tensor:
        self.weights = self.setting.weights(values[0])
        return self.weights.value

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        return None if tangents[0] is None else self.weights.push(tangents[0])

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (self.weights.pull(g),)

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        if tangents[0] is None or out is None:
            return (None,)
        return (self.weights.bend_along(self.g, tangents[0], out),)


@dataclass(eq=False)
class Mix(Step):
    """c = A v."""

    setting: Setting
    v: Tensor = field(init=False)

    def evaluate(self, *values: Tensor) -> Tensor:
        self.v = self.setting.split(values[1])
        return self.setting.join(values[0] @ self.v)

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        weights, v = tangents
        mixed = total(
            None if weights is None else product(weights, self.v),
            None if v is None else product(self.values[0], self.setting.split(v)),
        )
        return None if mixed is None else self.setting.join(mixed)

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        heads = self.setting.split(g)
        return product(heads, self.v.mT), self.setting.join(product(self.values[0].mT, heads))

    def bend(self, tangents: tuple[Some, ...], moved: Moved, out: Some) -> tuple[Some, ...]:
        weights, v = tangents
        heads = self.setting.split(self.g)
        return (
            None if v is None else product(heads, self.setting.split(v).mT),
            None if weights is None else self.setting.join(product(weights.mT, heads)),
        )


@dataclass(eq=False)
class HeadLinear(Step):
    """u_h = x_h W_h for every head: W (H, p, q)."""

    weight: Tensor
    offset: Some = None

    def evaluate(self, *values: Tensor) -> Tensor:
        out = self._times(values[0], self.weight)
        return out if self.offset is None else out + self.offset

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        return None if tangents[0] is None else self._times(tangents[0], self.weight)

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (self._times(g, self.weight.mT),)

    def _times(self, x: Tensor, weight: Tensor) -> Tensor:
        if len(weight) == 1:
            return x @ weight[0]
        heads = x.reshape(-1, len(weight), weight.shape[1]).transpose(0, 1)  # (H, …·n, p)
        return (heads @ weight).transpose(0, 1).reshape(*x.shape[:-1], -1)


@dataclass(eq=False)
class Against(Step):
    """s_ts = κ_t · x_s/√d_K, with the tokens x (B, L, p) held fixed."""

    setting: Setting
    tokens: Tensor
    scale: float

    def evaluate(self, *values: Tensor) -> Tensor:
        return product(self.setting.split(values[0]), self._across()) * self.scale

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        return None if tangents[0] is None else self.evaluate(tangents[0])

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (self.setting.join(product(g, self._across().mT)) * self.scale,)

    def _across(self) -> Tensor:
        return self.tokens[:, None].mT  # (B, 1, p, L)


@dataclass(eq=False)
class Average(Step):
    """m_t = Σ_s A_ts x_s: the first moment, with the tokens x (B, L, p) held fixed."""

    setting: Setting
    tokens: Tensor

    def evaluate(self, *values: Tensor) -> Tensor:
        return self.setting.join(product(values[0], self.tokens[:, None]))

    def push(self, tangents: tuple[Some, ...], moved: Moved) -> Some:
        return None if tangents[0] is None else self.evaluate(tangents[0])

    def pull(self, g: Tensor) -> tuple[Some, ...]:
        return (product(self.setting.split(g), self.tokens[:, None].mT),)
