"""Where a number comes from: versions, seed, precision, operator."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from evolute.krylov.storage import saveable
from evolute.linop.operator import LinearOperator


@saveable
@dataclass(frozen=True)
class Provenance:
    """What has to be the same for the number to be the same. `precision` is that of the vectors, not of the model."""

    operator: str
    precision: str
    seed: int | None
    evolute: str
    torch: str
    python: str

    def __str__(self) -> str:
        seed = "no random numbers" if self.seed is None else f"seed {self.seed}"
        return f"{self.operator}; vectors {self.precision}, {seed}; evolute {self.evolute}, torch {self.torch}"


def provenance(op: LinearOperator, precision: torch.dtype, seed: int | None) -> Provenance:
    """Of a result that is being made here and now."""
    name = str(precision).removeprefix("torch.")
    return Provenance(repr(op), name, seed, installed_version(), str(torch.__version__), platform.python_version())


def installed_version() -> str:
    """Of evolute, or that it runs from its sources without being installed."""
    try:
        return version("evolute")
    except PackageNotFoundError:
        return "not installed"
