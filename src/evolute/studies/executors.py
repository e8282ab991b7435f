"""Cells on any executor: processes of one thread each by default, or whatever has `submit`."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from evolute.errors import StudyError
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
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_one_thread)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)


def measure_cell(study: str, cell: Cell) -> list[Row]:
    """What a worker runs: it finds the study by its name."""
    from evolute.studies.registry import find

    return find(study).measure(cell)


def finished(executor: Executor, study: str, cells: Sequence[Cell]) -> Generator[tuple[Cell, list[Row] | Exception]]:
    """Each cell with its rows, or with what went wrong, in the order in which they are ready."""
    if isinstance(executor, Here):
        for cell in cells:
            yield cell, _outcome(lambda cell=cell: measure_cell(study, cell))
        return
    waiting = [(executor.submit(measure_cell, study, cell), cell) for cell in cells]
    try:
        while waiting:
            ready = [(future, cell) for future, cell in waiting if future.done()]
            waiting = [pair for pair in waiting if not any(pair[0] is future for future, _ in ready)]
            for future, cell in ready:
                yield cell, _outcome(future.result)
            if not ready:
                time.sleep(POLL)
    finally:
        for future, _ in waiting:
            future.cancel()


def _outcome(run: Any) -> list[Row] | Exception:
    try:
        return run()
    except StudyError:
        raise
    except Exception as error:  # a cell that fails must not take the others with it
        return error
