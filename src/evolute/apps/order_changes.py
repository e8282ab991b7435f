"""How far a mean over k samples moves when one more comes, on average over all orders in which they may come.

Sample i has the sum of losses s_i and n_i terms; S, N are sums over the first k + 1, L = S/N. If j comes last,

    L_{k+1} − L_k = S/N − (S − s_j)/(N − n_j) = (s_j − n_j L) / (N − n_j),

which is (ℓ_{k+1} − L_k)/(k + 1) where all n are one. Each of the k + 1 may come last, so one order gives the mean over
all j; and it gives it for every group of k + 1 that follow one another.

For equal n the expected change is d_k = E|ℓ − L_k|/(k + 1), of a sample and of a mean without it. A mean of k + 1 is
less spread than one of k, in the convex order, so (k + 1) d_k never rises; it ends at E|ℓ − L| ≥ ½ E|ℓ − ℓ′| = d_1, so

    1/(k + 1) ≤ d_k/d_1 ≤ 2/(k + 1)

for all data: the law is 1/k, and what is special to the data is when, between one level and one of half its height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BUDGET = 1 << 24  # numbers at a time
ENOUGH, GROUPS = 4096, 4  # samples of an order that are used at least, and groups of k + 1


def changes(sums: Tensor, terms: Tensor, k: int) -> Tensor:
    """(…, m·(k+1)) samples in their order → (…, m): the mean of |L_{k+1} − L_k| over which of k + 1 comes last.

    >>> changes(torch.tensor([1.0, 3.0]), torch.ones(2), 1)  # 2 from 1, and 2 from 3
    tensor([1.])
    """
    m = sums.shape[-1] // (k + 1)
    s = sums[..., : m * (k + 1)].unflatten(-1, (m, k + 1))
    n = terms[..., : m * (k + 1)].unflatten(-1, (m, k + 1))
    S, N = s.sum(-1, keepdim=True), n.sum(-1, keepdim=True)
    return ((s - n * (S / N)).abs() / (N - n)).mean(-1)


@dataclass(frozen=True, eq=False)
class Orders:
    """The expected change over the same random orders for every k; sums (points, K), terms (K)."""

    sums: Tensor
    terms: Tensor
    orders: Tensor  # (R, K)
    known: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])

    @property
    def samples(self) -> int:
        return len(self.terms)

    def change(self, k: int) -> tuple[float, float]:
        """E|L_{k+1} − L_k| and its standard error over the orders, for 1 ≤ k < K; without one for k = K − 1."""
        if k not in self.known:
            each = torch.stack([self._of(order, k) for order in self.orders])
            error = float(each.std()) / len(each) ** 0.5 if len(each) > 1 and k + 1 < self.samples else 0.0
            self.known[k] = float(each.mean()), error
        return self.known[k]

    def _of(self, order: Tensor, k: int) -> Tensor:
        """Over all points at once, as far as the budget goes; of a long order the first few groups say enough."""
        order = order[: max(ENOUGH, GROUPS * (k + 1))]
        rows = self.sums.split(max(1, BUDGET // len(order)))
        terms = self.terms[order]
        return torch.cat([changes(row[:, order], terms, k).mean(1) for row in rows]).mean()


def random_orders(samples: int, count: int, generator: torch.Generator) -> Tensor:
    """(count, samples)."""
    return torch.stack([torch.randperm(samples, generator=generator) for _ in range(count)])


def sizes(samples: int, count: int = 60) -> list[int]:
    """Numbers from 1 to samples − 1, even in their logarithm.

    >>> sizes(9), len(sizes(100_000))
    ([1, 2, 3, 4, 5, 6, 7, 8], 56)
    """
    spaced = torch.logspace(0, torch.log10(torch.tensor(samples - 1.0)).item(), count, dtype=torch.float64)
    return sorted({round(x) for x in spaced.tolist()})


def resampled(sums: Tensor, terms: Tensor, k: int, repeats: int, generator: torch.Generator) -> Sequence[float]:
    """The same change when the samples are drawn anew from themselves: what other data of this size would give."""
    found = list[float]()
    for _ in range(repeats):
        drawn = torch.randint(len(terms), (len(terms),), generator=generator)
        found.append(float(changes(sums[:, drawn], terms[drawn], k).mean()))
    return found
