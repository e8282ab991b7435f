"""Each statement on random problems: its largest error, and what either side costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar
from zlib import crc32

from torch import Tensor

from evolute.errors import UnknownGroupError
from evolute.verify.statement import Sampler, Statement

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What became of a statement: seconds are medians of trials; `worst_seed` draws the one of the largest error."""

    name: str
    says: str
    erratum: bool
    trials: int
    largest_error: float
    tolerance: float
    holds: bool
    worst_seed: int
    closed_seconds: float
    oracle_seconds: float
    note: str

    @property
    def as_expected(self) -> bool:
        """A statement holds; what is listed as an erratum does not."""
        return self.holds != self.erratum


@dataclass(frozen=True)
class _Trial:
    seed: int
    error: float
    closed_seconds: float
    oracle_seconds: float
    note: str = ""


def run(statements: Sequence[Statement[Any]], *, seed: int = 0, trials: int = 10) -> Iterator[Outcome]:
    """One outcome after the other. A statement draws the same problems whichever others are run beside it."""
    for statement in statements:
        yield _summary(statement, [_trial(statement, _seed(statement.name, seed, i)) for i in range(trials)])


def select(statements: Sequence[Statement[Any]], only: str) -> tuple[Statement[Any], ...]:
    """Those with the text in their name or in what they say, in capitals or not."""
    found = tuple(s for s in statements if only.casefold() in f"{s.name} {s.says}".casefold())
    if not found:
        raise UnknownGroupError(f"no statement contains {only!r}; `evolute verify --list` shows all of them.")
    return found


def _seed(name: str, seed: int, trial: int) -> int:
    return crc32(f"{name}/{seed}/{trial}".encode())


def _trial(statement: Statement[Any], seed: int) -> _Trial:
    """An exception on either side is a failure of the statement, and told as one."""
    try:
        problem = statement.sample(Sampler(seed))
        closed, ours = _timed(lambda: statement.closed(problem).detach())
        oracle, theirs = _timed(lambda: statement.oracle(problem).detach())
        return _Trial(seed, _error(statement, closed, oracle), ours, theirs)
    except Exception as problem:
        return _Trial(seed, math.inf, math.nan, math.nan, f"{type(problem).__name__}: {problem}".splitlines()[0])


def _error(statement: Statement[Any], closed: Tensor, oracle: Tensor) -> float:
    error = statement.error(closed, oracle)
    return math.inf if math.isnan(error) else error


def _timed(compute: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return compute(), time.perf_counter() - start


def _summary(statement: Statement[Any], trials: list[_Trial]) -> Outcome:
    worst = max(trials, key=lambda trial: trial.error)
    return Outcome(
        name=statement.name,
        says=statement.says,
        erratum=statement.erratum,
        trials=len(trials),
        largest_error=worst.error,
        tolerance=statement.tolerance,
        holds=worst.error <= statement.tolerance,
        worst_seed=worst.seed,
        closed_seconds=median(trial.closed_seconds for trial in trials),
        oracle_seconds=median(trial.oracle_seconds for trial in trials),
        note=worst.note,
    )
