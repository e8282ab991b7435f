"""What a figure is: how it is drawn, what it shows in words, and the numbers behind it as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from evolute.report.analysis import Analysis
from evolute.report.figures.style import NARROW, WIDE, drawn

Runs = Sequence[Analysis]


@dataclass(frozen=True)
class Table:
    """Head and rows, as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Drawing:
    """One figure of the page, for one run or several side by side. `narrow` is for a phone."""

    name: str
    title: str
    draw: Callable[[Figure, Runs, bool], None]
    height: Callable[[Runs, bool], float]
    alt: Callable[[Runs], str]
    table: Callable[[Runs], Table]
    there: Callable[[Analysis], bool]

    def figure(self, runs: Runs, narrow: bool = False) -> Figure:
        width, height = NARROW if narrow else WIDE, self.height(runs, narrow)
        return drawn(width, height, lambda figure: self.draw(figure, runs, narrow), narrow)


def per_run(runs: Runs, sentence: Callable[[Analysis], str]) -> str:
    """One sentence, or one for each run with its name."""
    if len(runs) == 1:
        return sentence(runs[0])
    return " ".join(f"{run.name}: {sentence(run)}" for run in runs)


def named(runs: Runs, run: Analysis, *cells: str) -> tuple[str, ...]:
    """A row, with the name of the run in front where there are several."""
    return cells if len(runs) == 1 else (run.name, *cells)


def head(runs: Runs, *cells: str) -> tuple[str, ...]:
    return cells if len(runs) == 1 else ("Run", *cells)
