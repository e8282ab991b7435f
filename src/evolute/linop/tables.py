"""A number for every pair of groups, as a table that prints, indexes by name and turns into plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evolute.errors import UnknownGroupError


@dataclass(frozen=True, eq=False)
class PairTable(Mapping[tuple[str, str], float]):
    """values[i, j] belongs to groups[i] and groups[j].

    >>> import torch
    >>> table = PairTable("norms", ("q", "k"), torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
    >>> table["q", "k"]
    2.0
    >>> print(table)
    norms      q      k
    q          1      2
    k          2      3
    """

    title: str
    groups: tuple[str, ...]
    values_: Tensor

    def __getitem__(self, pair: tuple[str, str]) -> float:
        i, j = (self._place(name) for name in pair)
        return float(self.values_[i, j])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((a, b) for a in self.groups for b in self.groups)

    def __len__(self) -> int:
        return len(self.groups) ** 2

    def _place(self, name: str) -> int:
        if name not in self.groups:
            raise UnknownGroupError(f"no group {name!r} in this table; there are {', '.join(self.groups)}.")
        return self.groups.index(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON or a data frame."""
        return {"title": self.title, "groups": list(self.groups), "values": self.values_.tolist()}

    def __str__(self) -> str:
        wide = max(len(name) for name in (self.title, *self.groups))
        cells = [max(6, len(name)) for name in self.groups]
        head = f"{self.title:<{wide}} " + " ".join(f"{n:>{w}}" for n, w in zip(self.groups, cells, strict=True))
        lines = [
            f"{name:<{wide}} " + " ".join(f"{float(v):>{w}.3g}" for v, w in zip(row, cells, strict=True))
            for name, row in zip(self.groups, self.values_, strict=True)
        ]
        return "\n".join([head, *lines])
