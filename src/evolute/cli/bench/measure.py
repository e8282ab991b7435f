"""Every library in turn, again and again: what disturbs the machine disturbs all of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from statistics import median
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from evolute.cli.bench.libraries import LIBRARIES
from evolute.cli.bench.problem import Asked, Problem


@dataclass(frozen=True)
class Row:
    """What one library came to, in gradients; `top_value` is its largest eigenvalue, `failure` why there is none."""

    library: str
    hessian: float | None = None
    gauss_newton: float | None = None
    top: float | None = None
    top_value: float | None = None
    failure: str = ""


def measure(
    problem: Problem, names: Sequence[str], rounds: int, tell: Callable[[str], object]
) -> tuple[float, list[Row]]:
    """Seconds of one gradient, and a row per library."""
    gradient = problem.gradient()
    asked = {name: _set_up(name, problem, tell) for name in names}
    calls = {(name, what): call for name, each in asked.items() for what, call in _products(each)}
    times: dict[Any, list[float]] = {key: [] for key in [None, *calls]}
    for turn in range(rounds):
        tell(f"products, round {turn + 1} of {rounds}")
        for key, call in [(None, gradient), *calls.items()]:
            times[key].append(_timed(call, key is not None and key[0] != "evolute")[0])
    unit = median(times[None])
    ratios = {key: median(each) / unit for key, each in times.items()}
    return unit, [_row(name, each, ratios, unit, tell) for name, each in asked.items()]


def _set_up(name: str, problem: Problem, tell: Callable[[str], object]) -> Asked | str:
    """Its products are computed once, so that set-up is not timed. A library that fails is a line of the table."""
    tell(f"setting up {name}")
    try:
        with _setting(name != "evolute"):
            asked = LIBRARIES[name](problem)
        for _, call in _products(asked):
            _timed(call, name != "evolute")
        return asked
    except Exception as problem_of_theirs:
        return f"{type(problem_of_theirs).__name__}: {problem_of_theirs}".splitlines()[0]


def _products(asked: Asked | str) -> list[tuple[str, Callable[[], Any]]]:
    if isinstance(asked, str):
        return []
    pairs = [("hessian", asked.hessian), ("gauss_newton", asked.gauss_newton)]
    return [(what, call) for what, call in pairs if call is not None]


def _row(name: str, asked: Asked | str, ratios: dict[Any, float], unit: float, tell: Callable[[str], object]) -> Row:
    if isinstance(asked, str):
        return Row(name, failure=asked)
    tell(f"largest eigenvalue, {name}")
    products = ratios.get((name, "hessian")), ratios.get((name, "gauss_newton"))
    try:
        seconds, value = _timed(asked.top, name != "evolute")
    except Exception as problem:
        return Row(name, *products, failure=f"{type(problem).__name__}: {problem}".splitlines()[0])
    return Row(name, *products, seconds / unit, value)


def _timed(call: Callable[[], Any], composed: bool) -> tuple[float, Any]:
    with _setting(composed):
        began = time.perf_counter()
        result = call()
        return time.perf_counter() - began, result


@contextmanager
def _setting(composed: bool) -> Generator[None]:
    """PyTorch's composed attention for those who need it (fused attention has no second derivative), and no chatter."""
    attention = sdpa_kernel(SDPBackend.MATH) if composed else nullcontext()
    with redirect_stdout(StringIO()), warnings.catch_warnings(), attention:
        warnings.simplefilter("ignore")
        yield
