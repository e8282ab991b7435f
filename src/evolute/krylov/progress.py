"""One line about long work: products done, time left, what is known. On a terminal only, and not for short work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 3.0  # seconds without a line


class Meter:
    """Counts products; draws itself once the work has lasted."""

    def __init__(self, what: str, total: int, wanted: bool) -> None:
        self.what, self.total = what, total
        self.console = Console(stderr=True)
        self.started = time.monotonic()
        self.wanted = wanted and self.console.is_terminal
        self._progress: Progress | None = None
        self._drawn = 0

    def update(self, products: int, known: Callable[[], str]) -> None:
        if not self.wanted or time.monotonic() - self.started < PATIENCE:
            return
        progress, text = self._progress or self._start(products), known()
        progress.update(progress.task_ids[0], completed=products, known=text, total=max(self.total, products))

    def expect(self, products: int, residual: float, goal: float, tol: float) -> None:
        """How many there will be, if the logarithm of the residual goes on falling as it did: from 1 to tol."""
        if residual > goal > 0:
            done = 1 - math.log(residual / goal) / math.log(1 / tol)
            self.total = int(products / max(done, 0.05))

    def _start(self, products: int) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("products"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[known]}"),
        )
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._progress.add_task(self.what, total=self.total, completed=products, known="")
        self._progress.start()
        return self._progress

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
