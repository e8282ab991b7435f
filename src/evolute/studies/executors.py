"""Cells on any executor: processes of one thread each by default, or whatever has `submit`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from evolute.studies.study import Cell, Row

POLL = 0.02  # seconds between two looks at futures that cannot be waited for together


class Future(Protocol):
    """What it gives back."""

    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def cancel(self) -> Any: ...


class Executor(Protocol):
    """What concurrent.futures calls an executor."""

    def submit(self, function: Any, /, *args: Any) -> Any: ...


class Here:
    """In this process, one after the other."""

    def submit(self, function: Any, /, *args: Any) -> Future:
        return _Done(function(*args))


class _Done:
    def __init__(self, value: Any) -> None:
        self.value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.value

    def cancel(self) -> bool:
        return False


@contextmanager
def processes(workers: int | None = None) -> Generator[Executor]:
    """One process per core, each with one thread: small models gain nothing from more."""
    count = workers or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else workers or os.cpu_count()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_quiet_and_small)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _quiet_and_small() -> None:
    """One thread; Ctrl-C is for the process that asked, so that a cell that has begun is finished and kept."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def measure_cell(study: str, cell: Cell, attempt: str = "") -> list[Row]:
    """What a worker runs: it finds the study by its name.

    A Dask client takes one call for another that has the same arguments; `attempt` lets a failed cell be tried again.
    """
    from evolute.studies.registry import find

    return find(study).measure(cell)


Pending = list[tuple[Future, Cell]]  # what an executor has been given, and has not handed over


def finished(
    executor: Executor, study: str, cells: Sequence[Cell], pending: Pending
) -> Generator[tuple[Cell, list[Row] | Exception]]:
    """Each cell with its rows, or with what went wrong, in the order in which they are ready.

    `pending` is filled with the cells that are waited for. Closed early, what has not begun is cancelled.
    """
    if isinstance(executor, Here):
        for cell in cells:
            yield cell, _outcome(lambda cell=cell: measure_cell(study, cell))
        return
    attempt = uuid.uuid4().hex
    try:
        for cell in cells:
            pending.append((executor.submit(measure_cell, study, cell, attempt), cell))
        while pending:
            ready = [pair for pair in pending if pair[0].done()]
            for pair in ready:
                pending[:] = [other for other in pending if other is not pair]
                yield pair[1], _outcome(pair[0].result)
            if not ready:
                time.sleep(POLL)
    finally:
        for future, _ in pending:
            if not future.done():
                future.cancel()


def left_over(pending: Pending) -> list[tuple[Cell, list[Row]]]:
    """What has been measured and was not handed over, because of an interruption."""
    outcomes = [(cell, _outcome_at_last(future)) for future, cell in pending if future.done()]
    return [(cell, rows) for cell, rows in outcomes if rows is not None]


def _outcome_at_last(future: Future) -> list[Row] | None:
    """Cancelled and failed ones are measured again next time."""
    try:
        return future.result()
    except Exception:
        return None


def _outcome(run: Any) -> list[Row] | Exception:
    try:
        return run()
    except Exception as error:  # a cell that fails must not take the others with it
        return error
