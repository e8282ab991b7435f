"""‖H_ij‖_F of all pairs of groups: vectors that live on one group j give the whole block column H_:j at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from evolute.errors import UnknownGroupError, VectorError
from evolute.krylov.block_table import BlockNorms
from evolute.krylov.checkpoint import State
from evolute.krylov.randomness import sphere
from evolute.krylov.sums import jackknife
from evolute.krylov.work import Work
from evolute.linop.exact import NoStructure, frobenius
from evolute.linop.operator import LinearOperator
from evolute.linop.space import Part, Select, Selection

Groups = Iterable["str | Part"] | Mapping[str, Select]


def block_norms(
    H: LinearOperator,
    groups: Groups | None = None,
    probes: int = 8,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> BlockNorms:
    """‖H_ij‖²_F = E ‖H_ij v‖² for v of uniform direction on group j: one set of probes for each block column.

    >>> import evolute as ev
    >>> space = ev.Space({"a": (2,), "b": (3,)}, dtype=torch.float64)
    >>> H = ev.from_dense(torch.ones(5, 5, dtype=torch.float64), space=space)
    >>> print(ev.block_norms(H, ["a", "b"]))
             a        b
    a        2     2.45
    b     2.45        3
    [probes on each group: 5 products, exact]

    Blocks H_ij and H_ji are transposes of one another: both sets of samples are used for both, and `asymmetry` says how
    well they agree. A group with no more entries than probes is done column by column, so exactly; and all of them are
    where the structure of H gives the norms of its blocks, as that of a closed form does.

    Args:
        H: A symmetric operator.
        groups: Names of groups or parameters, parts of them, or name → selection; all groups of H without it.
        probes: Random vectors on each group.
        generator: Where the random vectors come from; seed 0 without one.
        dtype: Of the vectors: float32 or float64, whatever the operator computes in.
        progress: A line on a terminal, once the work has lasted some seconds.
        checkpoint: A file to which the state goes now and then; when it is there, the work goes on from it.
    """
    if not isinstance(probes, int) or probes < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"probes: expected a number, at least 1, got {probes!r}.")
    work = Work(H, "block norms", generator=generator, dtype=dtype, progress=progress)
    selections = _selections(H, groups)
    with suppress(NoStructure):
        return _exact(work, selections)
    work.meter.total = sum(min(probes, each.size) for each in selections.values())
    with work.running():
        run = Run(work, selections, probes)
        run.resume(work.resume(checkpoint, {"groups": [*selections], "probes": probes}))
        return run.run().result()


def _exact(work: Work, selections: Mapping[str, Selection]) -> BlockNorms:
    """By the structure of the operator, without a product."""
    count, sides = len(selections), list(selections.values())
    norms = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        for j in range(i + 1):
            norms[i, j] = norms[j, i] = frobenius(work.op.block(sides[i].parts, sides[j].parts))
    return BlockNorms(
        names=tuple(selections),
        sizes=tuple(each.size for each in sides),
        norms=norms,
        standard_errors=torch.zeros_like(norms),
        samples=torch.zeros(count, count, dtype=torch.long),
        asymmetry=0.0,
        rounding=work.rounding,
        products=0,
        status="exact",
        method="structure of the operator",
        provenance=work.provenance(random=False),
    )


def _selections(H: LinearOperator, groups: Groups | None) -> dict[str, Selection]:
    """Name → entries."""
    if isinstance(groups, str):
        raise UnknownGroupError(f"groups: expected a list of names, got the name {groups!r}; write [{groups!r}].")
    if groups is None:
        groups = [*(H.space.groups or H.space.names)]
    found = {name: H.space.resolve(select) for name, select in _named(groups)}
    if not found:
        raise UnknownGroupError("groups: expected at least one name, got none.")
    return found


def _named(groups: Groups) -> Iterable[tuple[str, Select]]:
    if isinstance(groups, Mapping):
        return cast("Mapping[str, Select]", groups).items()
    return [(_name(each), each) for each in groups]


def _name(item: str | Part) -> str:
    return item.label if isinstance(item, Part) else str(item)


@dataclass
class Run:
    """One group after the other. `columns[j]` (vectors, groups): ‖H_ij v‖² of each vector on group j."""

    work: Work
    selections: dict[str, Selection]
    probes: int

    def __post_init__(self) -> None:
        self.columns = list[Tensor]()

    def run(self) -> Run:
        self.work.known = lambda: f"{len(self.columns)} of {len(self.selections)} groups"
        for selection in list(self.selections.values())[len(self.columns) :]:
            if self.work.stopped and self.columns:
                break
            self.columns.append(self._column(selection))
            self.work.save(self.state)
        self.work.save(self.state, now=True)
        return self

    def _column(self, selection: Selection) -> Tensor:
        width = max(1, self.work.op.preferred_block)
        parts = [self._squares(selection.put(rows)) for rows in self._vectors(selection).split(width)]
        return self.work.finite(torch.cat(parts).to("cpu", torch.float64))

    def _vectors(self, selection: Selection) -> Tensor:
        """Uniform directions on the group; all unit vectors, where they are no more than the probes."""
        size, like = selection.size, self.work.like
        if size <= self.probes:
            return torch.eye(size, dtype=like.dtype, device=like.device)
        return sphere(self.probes, size, self.work.generator, like)

    def _squares(self, vectors: Tensor) -> Tensor:
        images = self.work(vectors)
        norms = [torch.linalg.vector_norm(each.take(images), dim=1) for each in self.selections.values()]
        return torch.stack(norms, 1).square()

    # ---- on disk

    def state(self) -> State:
        return State({f"column.{j}": column for j, column in enumerate(self.columns)}, {"columns": len(self.columns)})

    def resume(self, state: State | None) -> None:
        if state is not None:
            self.columns = [state.tensors[f"column.{j}"] for j in range(state.values["columns"])]

    # ---- the answer

    def result(self) -> BlockNorms:
        count, sizes = len(self.selections), [each.size for each in self.selections.values()]
        norms, errors = torch.full((count, count), torch.nan), torch.full((count, count), torch.inf)
        norms, errors, used = norms.double(), errors.double(), torch.zeros(count, count, dtype=torch.long)
        for i in range(count):
            for j in range(i + 1):
                samples, exact = self._samples(i, j, sizes)
                values = _norm(samples, exact)
                for cell in ((i, j), (j, i)):
                    norms[cell], errors[cell], used[cell] = values[0], values[1], 0 if exact else len(samples)
        done = len(self.columns) == count
        exact = done and all(size <= self.probes for size in sizes)
        return BlockNorms(
            names=tuple(self.selections),
            sizes=tuple(sizes),
            norms=norms,
            standard_errors=errors,
            samples=used,
            asymmetry=self._asymmetry(sizes),
            rounding=self.work.rounding,
            products=self.work.products,
            status="interrupted" if not done else "exact" if exact else "sampled",
            method="probes on each group",
            provenance=self.work.provenance(random=not exact),
        )

    def _samples(self, i: int, j: int, sizes: list[int]) -> tuple[Tensor, bool]:
        """‖H_ij v‖² and ‖H_ji v‖², or the exact sum of one of them."""
        sides = [(a, b) for a, b in {(i, j), (j, i)} if b < len(self.columns)]
        for a, b in sorted(sides):
            if sizes[b] <= self.probes:
                return self.columns[b][:, a].sum()[None], True
        empty = torch.zeros(0, dtype=torch.float64)
        return torch.cat([empty, *(self.columns[b][:, a] for a, b in sorted(sides))]), False

    def _asymmetry(self, sizes: list[int]) -> float:
        """The largest |‖H_ij‖² − ‖H_ji‖²| in standard errors of the difference, both from samples."""
        free = [j for j in range(len(self.columns)) if sizes[j] > self.probes]
        scores = [_score(self.columns[j][:, i], self.columns[i][:, j]) for i in free for j in free if i < j]
        return max(scores, default=0.0)


def _norm(samples: Tensor, exact: bool) -> tuple[float, float]:
    """√mean, and its jackknife error."""
    if len(samples) == 0:
        return float("nan"), float("inf")
    error = 0.0 if exact else float(jackknife(samples[:, None], lambda mean: mean[..., 0].clamp_min(0).sqrt()))
    return float(samples.mean().sqrt()), error


def _score(one: Tensor, other: Tensor) -> float:
    error = (one.var() / len(one) + other.var() / len(other)).sqrt() if min(len(one), len(other)) > 1 else one.sum()
    return float((one.mean() - other.mean()).abs() / error) if float(error) > 0 else 0.0
