"""Operators with a known spectrum whose structure nobody can see, and helpers to count, to stop, to disturb."""

import signal
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

import evolute as ev

D = torch.float64


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def _rotation(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=draw(seed), dtype=D)).Q


def hidden(values: Tensor, seed: int = 0, dtype: torch.dtype = D) -> ev.LinearOperator:
    """U diag(values) Uᵀ for a random rotation U, known by its products only."""
    U = _rotation(len(values), seed)
    M = (U * values.to(D)) @ U.T
    return matrix(((M + M.T) / 2).to(dtype))


def matrix(M: Tensor) -> ev.LinearOperator:
    """A matrix behind a function."""
    return ev.from_matvec(lambda v: M @ v, len(M), dtype=M.dtype)


def plain(values: Tensor, dtype: torch.dtype = D) -> ev.LinearOperator:
    """diag(values): quick, for sizes at which a rotation is slow."""
    values = values.to(dtype)
    return ev.from_matvec(lambda v: values * v, len(values), dtype=dtype)


def pressing_ctrl_c(op: ev.LinearOperator, at: int, times: int = 1) -> ev.LinearOperator:
    """The same operator; during product number `at`, and those after it, Ctrl-C is pressed: so many times in all."""
    done = 0

    def product(v: Tensor) -> Tensor:
        nonlocal done
        done += 1
        if at <= done < at + times:
            signal.raise_signal(signal.SIGINT)
        return op @ v

    return ev.from_matvec(product, op.shape[0], dtype=op.dtype)


def covered(trial: Callable[[int], tuple[float, float]], truth: float, trials: int = 200) -> float:
    """The share of seeded trials whose interval holds the truth."""
    intervals = [trial(seed) for seed in range(trials)]
    return sum(low <= truth <= high for low, high in intervals) / trials


def outliers(n: int = 400) -> Tensor:
    """Some eigenvalues far out, on both sides of a bulk around 0: as the Hessian of a trained network."""
    bulk = 0.1 * torch.randn(n - 4, generator=draw(3), dtype=D)
    return torch.cat([torch.tensor([50.0, 20.0, 10.0, -4.0], dtype=D), bulk])


def decaying(n: int = 400) -> Tensor:
    """1/i up and −0.3/i down: no gap anywhere."""
    ladder = 1 / torch.arange(1, n // 2 + 1, dtype=D)
    return torch.cat([ladder, -0.3 * ladder])


def flat(n: int = 400) -> Tensor:
    return torch.linspace(-1, 3, n, dtype=D)


def ends(values: Tensor, k: int) -> Tensor:
    ordered = values.to(D).sort().values
    return torch.cat([ordered[:k], ordered[-k:]])


SPECTRA = {"outliers": outliers(), "decaying": decaying(), "flat": flat()}
