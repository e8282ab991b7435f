"""What is being measured, how much time is left, what each measurement cost; a measurement out of time is cut short."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from evolute.linop.operator import LinearOperator, SymmetricOperator
from evolute.linop.space import Space
from evolute.report.analysis import Cost

T = TypeVar("T")


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Clock:
    """Runs measurements one after the other."""

    budget: float | None
    progress: Progress
    costs: list[Cost] = field(default_factory=list[Cost])
    notes: list[str] = field(default_factory=list[str])
    started: float = field(default_factory=time.perf_counter)
    stopped: bool = False

    def measure(self, what: str, planned: int, run: Callable[[Stage], T]) -> T | None:
        """What `run` returns; None, with a note, where there was no time for it."""
        if self.over:
            self.notes.append(f"There was no time for {what}.")
            return None
        stage, began = Stage(self, what, planned), time.perf_counter()
        result = self._guarded(stage, run)
        stage.close()
        self.costs.append(Cost(what, stage.products, time.perf_counter() - began, result is not None and not stage.cut))
        return result

    def _guarded(self, stage: Stage, run: Callable[[Stage], T]) -> T | None:
        try:
            return run(stage)
        except OutOfTime:
            self.notes.append(f"Time ran out during this measurement, so it is missing: {stage.what}.")
        except KeyboardInterrupt:
            self.stopped = True
            self.notes.append(f"The analysis was stopped during this measurement: {stage.what}.")
        return None

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    @property
    def over(self) -> bool:
        return self.stopped or (self.budget is not None and self.elapsed > self.budget)


class Stage:
    """One measurement under way."""

    def __init__(self, clock: Clock, what: str, planned: int) -> None:
        self.clock, self.what, self.planned = clock, what, planned
        self.products, self.cut = 0, False
        clock.progress.update(clock.progress.task_ids[0], description=what)

    def tick(self, products: int) -> None:
        """So many products are done."""
        self.products += products
        self.clock.progress.advance(self.clock.progress.task_ids[0], products)

    def watched(self, op: LinearOperator) -> LinearOperator:
        """The operator, its products counted; it stops when time is up."""
        return Watched(op, self)

    def close(self) -> None:
        """A measurement that took fewer products than planned leaves the bar where it would have ended."""
        self.clock.progress.advance(self.clock.progress.task_ids[0], self.planned - self.products)


@dataclass(frozen=True, eq=False, repr=False)
class Watched(SymmetricOperator):
    """The same operator, counted."""

    op: LinearOperator
    stage: Stage

    @property
    def space(self) -> Space:
        return self.op.space

    @property
    def preferred_block(self) -> int:
        return self.op.preferred_block

    def apply_rows(self, rows: Tensor) -> Tensor:
        if self.stage.clock.over:
            raise OutOfTime
        out = self.op.apply_rows(rows)
        self.stage.tick(len(rows))
        return out


def bar(wanted: bool, total: int) -> Progress:
    """On a terminal only, and on standard error."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    progress = Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal))
    progress.add_task("", total=total)
    return progress


def timed(function: Callable[[], Tensor]) -> float:
    """Seconds of one call, the second: the first one records."""
    function()
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
