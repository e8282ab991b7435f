"""What a study is: a claim, a configuration, cells that can be measured one by one, and a verdict from their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = dict[str, Any]  # plain JSON values: what one process measures, and nothing else
Row = dict[str, Any]  # plain JSON values
Answer = str  # "holds", "holds in part", "does not hold here" or "undecided"
ANSWERS = ("holds", "holds in part", "does not hold here", "undecided")


@dataclass(frozen=True)
class Verdict:
    """Whether the claim held here, in one word and in one sentence with its uncertainty."""

    answer: Answer
    sentence: str

    def __post_init__(self) -> None:
        assert self.answer in ANSWERS, f"expected one of {ANSWERS}, got {self.answer!r}"

    def __str__(self) -> str:
        return f"{self.answer}: {self.sentence}"


@dataclass(frozen=True)
class Config:
    """What a study can be set to; each study has its own fields."""

    seed: int = 0


C = TypeVar("C", bound=Config)


class Study(ABC, Generic[C]):
    """One claim. Cells are measured in any order and in any process; rows and verdict depend on nothing else."""

    name: ClassVar[str]
    claim: ClassVar[str]
    config: type[C]

    @abstractmethod
    def cells(self, config: C) -> Sequence[Cell]:
        """The work, cut into pieces that know everything they need."""

    @abstractmethod
    def measure(self, cell: Cell) -> list[Row]:
        """One piece; the same rows whenever and wherever it is measured."""

    @abstractmethod
    def table(self, config: C, rows: Sequence[Row]) -> list[Row]:
        """What the rows of all cells say together: the rows of the result."""

    @abstractmethod
    def verdict(self, config: C, table: Sequence[Row]) -> Verdict:
        """Whether the claim holds."""

    @abstractmethod
    def figure(self, table: Sequence[Row], settings: Mapping[str, Any]) -> Figure:
        """The picture, from the saved result alone."""
