"""A piece of work: products with one symmetric operator, counted, shown, interruptible, resumable."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evolute.errors import CheckpointError, NonFiniteError, VectorError
from evolute.krylov.checkpoint import Checkpoint, State
from evolute.krylov.interrupt import Interrupt
from evolute.krylov.progress import Meter
from evolute.krylov.provenance import Provenance, provenance
from evolute.krylov.randomness import fingerprint, stream
from evolute.linop.operator import LinearOperator

HALF = (torch.float16, torch.bfloat16)


class Work:
    """Products of an operator in the precision of the vectors, in blocks as wide as the operator likes them."""

    def __init__(
        self,
        op: LinearOperator,
        what: str,
        *,
        total: int = 0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        progress: bool = True,
    ) -> None:
        self.op, self.what = symmetric(op), what
        self.dtype = precision(op, dtype)
        self.generator = stream(generator)
        self.interrupt = Interrupt()
        self.meter = Meter(what, total, progress)
        self.products = 0
        self.known: Callable[[], str] = str
        self.checkpoint: Checkpoint | None = None

    @property
    def n(self) -> int:
        return self.op.shape[0]

    @property
    def like(self) -> Tensor:
        """Of the kind of the vectors: device and precision."""
        return torch.empty(0, dtype=self.dtype, device=self.op.device)

    @property
    def resolution(self) -> float:
        """The relative rounding of one number."""
        return max(torch.finfo(self.dtype).eps, torch.finfo(self.op.dtype).eps)

    @property
    def rounding(self) -> float:
        """The relative error of a product: sums of many terms, which half precision adds up in float32."""
        return self.resolution if self.op.dtype in HALF else 10 * self.resolution

    @property
    def stopped(self) -> bool:
        return self.interrupt.asked

    def provenance(self, *, random: bool = True) -> Provenance:
        return provenance(self.op, self.dtype, self.generator.initial_seed() if random else None)

    @contextmanager
    def running(self) -> Generator[None]:
        """Ctrl-C is heard, and the line of progress is taken away in the end."""
        with self.interrupt, torch.no_grad():
            try:
                yield
            finally:
                self.meter.close()

    # ---- products

    def __call__(self, rows: Tensor) -> Tensor:
        """(k, n) → (k, n), A applied to each row."""
        block = max(1, self.op.preferred_block)
        parts = [self._product(part) for part in rows.split(block)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _product(self, rows: Tensor) -> Tensor:
        scale = self._scale()
        out = self.op.apply_rows((rows * scale if scale != 1 else rows).to(self.op.dtype)).to(self.dtype)
        self.products += len(rows)
        self.meter.update(self.products, self.known)
        return out / scale if scale != 1 else out

    def _scale(self) -> float:
        """Entries of a unit vector are near 1/√n, too small for float16: a power of two, taken back exactly."""
        return 2.0 ** ((self.n - 1).bit_length() // 2) if self.op.dtype in HALF else 1.0

    def finite(self, small: Tensor) -> Tensor:
        """Numbers computed from products, which show a NaN anywhere in them."""
        if not bool(torch.isfinite(small).all()):
            raise NonFiniteError(
                f"a product of {self.op!r} with a finite vector is NaN or infinite; "
                "look at the model's weights and loss, or use a wider dtype."
            )
        return small

    # ---- checkpoints

    def resume(self, path: str | Path | None, settings: Mapping[str, Any]) -> State | None:
        """What was done before under this path, if it is the same work with the same operator."""
        if path is None:
            return None
        signature = self._signature()
        common = {"work": self.what, "operator": repr(self.op), "precision": str(self.dtype)}
        random = {"seed": self.generator.initial_seed(), "random numbers": fingerprint(self.generator)}
        self.checkpoint = Checkpoint(Path(path), {**common, **settings, **random})
        state = self.checkpoint.load()
        self._signed = signature
        if state is None:
            return None
        self._compare(state.values["signature"], signature)
        self.products = state.values["products"]
        self.generator.set_state(state.tensors["generator"])
        return state

    def _signature(self) -> tuple[float, float]:
        """vᵀAv and ‖Av‖ for one v: what tells an operator from another of the same size. It is not counted."""
        probe = torch.Generator().manual_seed(20)
        row = torch.randn((1, self.n), generator=probe, dtype=self.dtype).to(self.op.device)
        product = self._product(row)
        self.products -= 1
        return float((product * row).sum()), float(product.norm() * row.norm())

    def _compare(self, before: tuple[float, float], now: tuple[float, float]) -> None:
        if abs(before[0] - now[0]) > self.resolution**0.5 * max(before[1], now[1]):
            assert self.checkpoint is not None
            raise CheckpointError(
                f"checkpoint '{self.checkpoint.path}' belongs to another operator of the same size: one product is "
                "not what it was (other weights, other data?). Delete it to start anew, or give another path."
            )

    def save(self, state: Callable[[], State], *, now: bool = False) -> None:
        """To disk, when it is time or when it is the last chance."""
        if self.checkpoint is None:
            return
        if now:
            self.checkpoint.save(self._complete(state()))
        else:
            self.checkpoint.save_if_due(lambda: self._complete(state()))

    def _complete(self, state: State) -> State:
        values = {"products": self.products, "signature": list(self._signed)}
        return State({**state.tensors, "generator": self.generator.get_state()}, {**state.values, **values})


def symmetric(op: object) -> LinearOperator:
    """Refuses what has no real spectrum."""
    if not isinstance(op, LinearOperator):
        raise VectorError(
            f"expected an operator, got {type(op).__name__}; wrap a matrix in ev.from_dense(M), "
            "a function in ev.from_matvec(f, n)."
        )
    if op.shape[0] != op.shape[1] or not op.symmetric:
        raise VectorError(f"expected a symmetric operator, got {op!r}; for singular values take A.T @ A as a function.")
    if op.shape[0] == 0:
        raise VectorError(f"expected at least one entry, got {op!r}.")
    return op


def at_least_one(max_products: int | None) -> None:
    """Refuses a limit that lets no product through."""
    if max_products is None:
        return
    if not isinstance(max_products, int) or max_products < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"max_products: expected a number, at least 1, got {max_products!r}.")


def precision(op: LinearOperator, dtype: torch.dtype | None) -> torch.dtype:
    """Of the vectors: as asked, else the operator's own, but at least float32."""
    if dtype is None:
        return torch.float32 if op.dtype in HALF else op.dtype
    if dtype not in (torch.float32, torch.float64):
        raise VectorError(f"dtype: expected torch.float32 or torch.float64 for the vectors, got {dtype}.")
    return dtype
