"""One pass for the whole spectrum: random vectors, some steps of Lanczos from them, and all that these products say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from evolute.errors import VectorError
from evolute.krylov.checkpoint import State
from evolute.krylov.density import density
from evolute.krylov.lanczos import Lanczos, fits
from evolute.krylov.matrix import matrix
from evolute.krylov.quadrature import Reading, read
from evolute.krylov.randomness import sphere, stream
from evolute.krylov.results import Quantity
from evolute.krylov.spectrum_result import Spectra, Spectrum
from evolute.krylov.subsets import together
from evolute.krylov.sums import Sums
from evolute.krylov.work import Work, symmetric
from evolute.linop import exact
from evolute.linop.operator import LinearOperator


class Options(TypedDict, total=False):
    """What goes to every run."""

    generator: torch.Generator | None
    dtype: torch.dtype | None
    progress: bool


@overload
def spectrum(
    H: LinearOperator,
    probes: int = 8,
    steps: int = 80,
    *,
    k: int = 10,
    checkpoint: str | Path | None = None,
    **options: Unpack[Options],
) -> Spectrum: ...
@overload
def spectrum(
    H: Sequence[LinearOperator],
    probes: int = 8,
    steps: int = 80,
    *,
    k: int = 10,
    checkpoint: str | Path | None = None,
    **options: Unpack[Options],
) -> Spectra: ...
def spectrum(
    H: LinearOperator | Sequence[LinearOperator],
    probes: int = 8,
    steps: int = 80,
    *,
    k: int = 10,
    checkpoint: str | Path | None = None,
    **options: Unpack[Options],
) -> Spectrum | Spectra:
    """E vᵀf(H)v = tr f(H): density, trace, norms, both ends, sign, rank and condition, from probes × steps products.

    >>> import evolute as ev
    >>> x = torch.linspace(-1, 3, 1000)
    >>> s = ev.spectrum(ev.from_matvec(lambda v: x * v, 1000), probes=4, steps=30)
    >>> low, high = s.trace.interval(0.99)
    >>> low < 1000 < high, s.products, round(float(s.negative_count), 1)
    (True, 120, 0.2)

    The probes share one block Lanczos run, as far as memory allows, else one run for some of them after the other.
    Eigenvectors that have settled are set apart from what is left to chance, which makes the errors smaller. What the
    operator's structure gives exactly is taken from there; of an operator with n ≤ probes × steps the matrix is written
    down, and all numbers are exact.

    Args:
        H: A symmetric operator; or several, one for each data subset, to see how much of the spread is data.
        probes: Random vectors; errors shrink with their square root.
        steps: Products with each; the density gets finer and the ends more accurate.
        k: Eigenvalues to show at each end.
        generator: Where the random vectors come from; seed 0 without one.
        dtype: Of the vectors: float32 or float64, whatever the operator computes in.
        progress: A line on a terminal, once the work has lasted some seconds.
        checkpoint: A file to which the state goes now and then; when it is there, the work goes on from it.
    """
    _check(probes, steps, k)
    if not isinstance(H, (list, tuple)):
        return _one(cast("LinearOperator", H), probes, steps, k, checkpoint, options)
    if len(H) < 2:
        raise VectorError(f"expected an operator, or two data subsets or more to compare; got {len(H)}.")
    sizes = {symmetric(op).shape[0] for op in H}
    if len(sizes) > 1:
        raise VectorError(f"expected operators on the same parameters, got sizes {', '.join(map(str, sorted(sizes)))}.")
    options["generator"] = stream(options.get("generator"))  # one stream of numbers through all subsets
    parts = list[Spectrum]()
    for i, op in enumerate(H):
        parts.append(_one(op, probes, steps, k, f"{checkpoint}.{i}" if checkpoint else None, options))
        if parts[-1].interrupted:
            break
    return together(parts)


def _check(probes: int, steps: int, k: int) -> None:
    for name, value in {"probes": probes, "steps": steps, "k": k}.items():
        if not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise VectorError(f"{name}: expected a number, at least 1, got {value!r}.")


def _one(op: LinearOperator, probes: int, steps: int, k: int, path: str | Path | None, options: Options) -> Spectrum:
    work = Work(op, "spectrum", total=probes * steps, **options)
    with work.running():
        if work.n <= probes * steps:
            return _exact(work, k)
        run = Run(work, probes, steps, max(1, fits(work, probes * (steps + 1), 1) // (steps + 1)))
        run.resume(work.resume(path, {"probes": probes, "steps": steps}))
        return run.run().result(k)


# ---------------------------------------------------------------- the pass


@dataclass
class Run:
    """Groups of probes one after the other; a group shares one Lanczos run."""

    work: Work
    probes: int
    steps: int
    group: int

    def __post_init__(self) -> None:
        self.readings, self.orthogonality = list[Reading](), 0.0
        self.lanczos: Lanczos | None = None
        self.coordinates = torch.zeros(0, 0, dtype=torch.float64)
        self.done = 0

    @property
    def left(self) -> int:
        return self.probes - sum(len(each.counts) for each in self.readings)

    def run(self) -> Run:
        self.work.known = self.known
        while self.left and not (self.work.stopped and self.done):
            lanczos = self.lanczos or self._start()
            lanczos.step()
            self.done += 1
            if self.done == self.steps or lanczos.exhausted:
                self._finish(lanczos)
            self.work.save(self.state)
        self.work.save(self.state, now=True)
        if self.lanczos is not None and self.done:
            self._finish(self.lanczos)
        return self

    def _start(self) -> Lanczos:
        count = min(self.group, self.left)
        self.lanczos, self.done = Lanczos(self.work, count * (self.steps + 1)), 0
        self.coordinates = self.lanczos.add(sphere(count, self.work.n, self.work.generator, self.work.like))
        return self.lanczos

    def _finish(self, lanczos: Lanczos) -> None:
        self.readings.append(read(lanczos, self.coordinates, self.work.n, self.work.rounding * lanczos.scale))
        self.orthogonality = max(self.orthogonality, lanczos.orthogonality())
        self.lanczos = None

    def known(self) -> str:
        if self.lanczos is None or not self.done:
            return ""
        values = self.lanczos.ritz().values
        return f"λ from {float(values[0]):.3g} to {float(values[-1]):.3g}"

    # ---- on disk

    def state(self) -> State:
        inner = self.lanczos.state() if self.lanczos else State({}, {})
        past = {f"{i}.{f.name}": getattr(r, f.name) for i, r in enumerate(self.readings) for f in fields(Reading)}
        mine = {"group": self.group, "readings": len(self.readings), "done": self.done, "q": self.orthogonality}
        values = {**inner.values, **mine, "running": self.lanczos is not None}
        return State({**inner.tensors, **past, "coordinates": self.coordinates}, values)

    def resume(self, state: State | None) -> None:
        if state is None:
            return
        values, tensors = state.values, state.tensors
        self.group, self.done, self.orthogonality = values["group"], values["done"], values["q"]
        self.coordinates = tensors["coordinates"]
        names = [each.name for each in fields(Reading)]
        self.readings = [Reading(*(tensors[f"{i}.{name}"] for name in names)) for i in range(values["readings"])]
        if values["running"]:
            self.lanczos = Lanczos(self.work, len(self.coordinates) * (self.steps + 1))
            self.lanczos.restore(state)

    # ---- the answer

    def result(self, k: int) -> Spectrum:
        best = min(self.readings, key=lambda each: float(each.bounds[:k].sum() + each.bounds[-k:].sum()))
        sums = Sums.of(self.readings, self.work.rounding)
        stopped = self.work.stopped and bool(self.left)
        return _spectrum(
            self.work,
            sums,
            ends=(best.nodes, best.bounds),
            k=k,
            steps=self.steps,
            condition=_condition(best),
            settled=int(best.settled.sum()),
            orthogonality=self.orthogonality,
            status="interrupted" if stopped or self.work.stopped else "sampled",
            method=f"Lanczos quadrature, {len(sums.counts)} probes × {self.steps} steps",
        )


def _condition(reading: Reading) -> tuple[float, str]:
    """Of what is known apart from zero: a lower bound of the whole."""
    sizes = reading.nodes[reading.bounds <= 1e-2 * reading.nodes.abs()].abs()
    if len(sizes) == 0:
        return float("nan"), "nothing: no eigenvalue is known to 1 %"
    name = f"the {len(sizes)} eigenvectors whose λ is known to 1 %, a lower bound for the whole space"
    return float(sizes.max() / sizes.min()), name


def _exact(work: Work, k: int) -> Spectrum:
    values, U = torch.linalg.eigh(matrix(work))
    margin = work.rounding * float(values.abs().max())
    bounds = torch.full_like(values, margin)
    sizes = values.abs()[values.abs() > margin]
    rank = f"the range: {len(sizes)} of {work.n} dimensions with |λ| above rounding"
    return _spectrum(
        work,
        Sums.all(values, work.rounding),
        ends=(values, bounds),
        k=k,
        steps=100,
        condition=(float(sizes.max() / sizes.min()) if len(sizes) else float("nan"), rank),
        settled=work.n,
        orthogonality=float((U.mT @ U - torch.eye(work.n, dtype=U.dtype)).abs().max()),
        status="exact",
        method=f"the {work.n}×{work.n} matrix, written down",
    )


def _spectrum(
    work: Work,
    sums: Sums,
    *,
    ends: tuple[Tensor, Tensor],
    k: int,
    steps: int,
    condition: tuple[float, str],
    settled: int,
    orthogonality: float,
    status: str,
    method: str,
) -> Spectrum:
    """The numbers that the sums give."""
    (nodes, bounds), n = ends, work.n
    margin = work.rounding * float(nodes.abs().max())
    grid, curve, band = density(sums, steps)
    squares = sums.quantity(lambda mean: mean[..., 0].clamp_min(0).sqrt(), torch.square, positive=True)
    size = torch.abs
    top = nodes.abs().max()
    return Spectrum(
        products=work.products,
        status=status,
        method=method,
        provenance=work.provenance(random=not sums.exact),
        n=n,
        trace=_structured_trace(work) or sums.quantity(lambda mean: mean[..., 0], lambda x: x),
        frobenius=_structured_frobenius(work) or squares,
        nuclear=sums.quantity(lambda mean: mean[..., 0], size, positive=True),
        negative_mass=sums.quantity(_ratio, lambda x: x.clamp_max(0).abs(), size),
        negative_count=sums.quantity(lambda mean: mean[..., 0] / n, lambda x: (x < -margin).to(x)),
        effective_rank=sums.quantity(_participation, size, torch.square, positive=True),
        stable_rank=sums.quantity(lambda mean: _over(mean[..., 0], top.square()), torch.square, positive=True),
        largest=nodes.flip(0)[:k],
        largest_bounds=bounds.flip(0)[:k].clamp_min(margin),
        smallest=nodes[:k],
        smallest_bounds=bounds[:k].clamp_min(margin),
        condition=condition[0],
        condition_on=condition[1],
        grid=grid,
        density=curve,
        band=band,
        nodes=sums.nodes,
        counts=sums.counts,
        settled=settled,
        orthogonality=orthogonality,
    )


def _ratio(mean: Tensor) -> Tensor:
    return _over(mean[..., 0], mean[..., 1])


def _participation(mean: Tensor) -> Tensor:
    return _over(mean[..., 0].square(), mean[..., 1])


def _over(above: Tensor, below: Tensor) -> Tensor:
    """0/0 = 0: a zero operator has no negative share and rank 0."""
    return torch.where(below > 0, above / below, 0.0)


def _structured_trace(work: Work) -> Quantity | None:
    with suppress(exact.NoStructure):
        entries = exact.diagonal(work.op).to(torch.float64)
        rounding = work.resolution * float(entries.abs().sum())
        return Quantity(estimate=float(entries.sum()), standard_error=0.0, samples=0, solver_error=rounding)
    return None


def _structured_frobenius(work: Work) -> Quantity | None:
    with suppress(exact.NoStructure):
        norm = float(exact.squares(work.op).to(torch.float64).clamp_min(0).sqrt())
        return Quantity(estimate=norm, standard_error=0.0, samples=0, solver_error=work.rounding * norm)
    return None
