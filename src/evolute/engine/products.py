"""Products with a curvature operator: each batch is recorded once and replayed, while the memory budget lasts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evolute.engine.checks import Point, check_finite_product, check_product, check_replay, explained
from evolute.engine.guards import random_state_kept
from evolute.engine.linear_maps import LinearMap, Pieces
from evolute.engine.narrow import Window, narrowed
from evolute.engine.objective import Evaluated, Objective
from evolute.engine.plan import Plan, budget_of, nbytes, room_to_record
from evolute.engine.program import compile_tape
from evolute.engine.recompute import Recipes
from evolute.engine.simplify import simplify
from evolute.engine.tape import Recorder, Tape, Unrecordable
from evolute.engine.vectorise import vectorised
from evolute.errors import CurvatureWarning
from evolute.linop.space import Space

MakeMap = Callable[[Objective, Evaluated], LinearMap]
Run = Callable[..., Sequence[Tensor | None]]

WORKING_SET = {"cpu": 8 << 20, "cuda": 256 << 20}  # bytes of one intermediate up to which more vectors at once pay
NARROWEST, WIDEST = 2, 32  # vectors at once: one by one below, and nothing saved by more


@dataclass
class Kept:
    """One batch whose products are replayed: a program for each window and each number of vectors at once."""

    index: int
    whole: Run
    tape: Tape | None
    nbytes: int
    programs: dict[tuple[Window, int], Run] = field(default_factory=dict[tuple[Window, int], Run])


class Products:
    """Σ_batches A_b v / Σ terms at the parameters as they were when this was made."""

    def __init__(self, objective: Objective, make: MakeMap) -> None:
        self.objective, self.make = objective, make
        self.parameters = list(objective.parameters.values())
        self.full = Window(tuple(range(len(self.parameters))), tuple(range(len(self.parameters))))
        self.kept: dict[int, Kept] = {}
        self.plan: Plan | None = None
        self._block, self._terms = 1, 0.0
        self._notes: list[str] = []
        self.recipes = Recipes(objective, make, self.full)
        self._point = Point(objective)

    def __call__(self, rows: Tensor, source: Space, target: Space, window: Window | None = None) -> Tensor:
        """A v for each of the rows v, (k, size of source) → (k, size of target): the two spaces of the window."""
        self._point.check()
        plan, window = self.prepared(), window or self.full
        total: Tensor | None = None
        for kept in self.kept.values():
            parts = self._replay(kept, rows, source, target, window)
            total = _sum(total, _stacked(parts, len(rows), target))
        if plan.kept < plan.batches:
            for index, more in self._recompute(rows, source, target, window):
                check_finite_product(index, [more], rows)
                total = _sum(total, more)
        assert total is not None
        return total.div_(self.objective.normaliser(self._terms))

    @property
    def block(self) -> int:
        """How many vectors at once are cheapest per vector, as the recorded sizes say."""
        self.prepared()
        return self._block

    # ---- the first pass over the data

    def prepared(self) -> Plan:
        """Each batch recorded while the budget lasts."""
        if self.plan is None:
            self.plan = self._prepare()
        return self.plan

    def _prepare(self) -> Plan:
        budget, spent, used = budget_of(self.objective), 0, set[str]()
        kept, terms, count = dict[int, Kept](), 0.0, 0
        with self.objective.running():
            for index, batch in self.objective.batches:
                room = room_to_record(self.objective, index, batch)
                with explained(index):
                    each = self.objective.evaluate_one(index, batch)
                count, terms = count + 1, terms + each.terms
                one, names = self._keep(each) if room and spent < budget else (None, self._used(each))
                del each
                used |= names
                if one is not None and spent + one.nbytes <= budget:
                    kept[index], spent = one, spent + one.nbytes
                elif one is not None:
                    budget = spent  # the first that does not fit ends it: later batches are not tried
                one = None
                if room and index not in kept:
                    self.recipes.learn(index, batch, (self._probe(0), self._probe(1)))
        self.objective.note_used(used)
        self.objective.normaliser(terms)
        self.kept, self._terms = kept, terms
        self._block = min((_width(one.tape, self.objective.space.device) for one in kept.values()), default=1)
        while self._block > 1 and self._block * spent > budget_of(self.objective):
            self._block //= 2  # a program for k vectors may keep its constants k times
        notes = (*dict.fromkeys(self._notes), *self.recipes.notes)
        return Plan(count, len(kept), spent, budget_of(self.objective), self._block, notes)

    def _used(self, each: Evaluated) -> set[str]:
        gradients = torch.autograd.grad(self.objective.attached(each), self.parameters, allow_unused=True)
        self.objective.check_finite(each, gradients)
        return self._names(gradients)

    def _names(self, pieces: Pieces) -> set[str]:
        return {name for name, each in zip(self.objective.parameters, pieces, strict=True) if each is not None}

    def _keep(self, each: Evaluated) -> tuple[Kept, set[str]]:
        with explained(each.index):
            linear = self.make(self.objective, each)
            self.objective.check_finite(each, linear.gradient)
            kept = self._recorded(each, linear)
        return kept, self._names(linear.gradient)

    def _recorded(self, each: Evaluated, linear: LinearMap) -> Kept:
        first, second = self._probe(0), self._probe(1)
        recorder = Recorder(first)
        with recorder:
            products = linear.function(*first)
        direct = linear(*second)
        check_product(each.index, (first, products), (second, direct))
        try:
            tape = simplify(recorder.finish(products))
            run = compile_tape(tape)
            check_replay(run, tape, second, direct)
        except Unrecordable as reason:
            return self._keep_graph(each, linear, str(reason))
        return Kept(each.index, run, tape, self._held(tape))

    def _keep_graph(self, each: Evaluated, linear: LinearMap, reason: str) -> Kept:
        """Autograd's own graph instead of a tape: the same products, slower."""
        message = f"products run through autograd's graph, not a recorded tape: {reason}"
        if message not in self._notes:
            warnings.warn(message, CurvatureWarning, stacklevel=2)
        self._notes.append(message)
        return Kept(each.index, linear.function, None, 0)

    def _probe(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in self.parameters]
        return [draw.to(p.device, p.dtype) for draw, p in zip(draws, self.parameters, strict=True)]

    def _held(self, tape: Tape) -> int:
        """Bytes that the tape keeps alive, the parameters themselves not counted."""
        mine = {p.untyped_storage()._cdata for p in self.parameters}  # pyright: ignore
        storages = [c.untyped_storage() for c in tape.constants()]
        return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in mine}.values())  # pyright: ignore

    # ---- each product

    def _replay(self, kept: Kept, rows: Tensor, source: Space, target: Space, window: Window) -> Generator[Tensor]:
        """Blocks of vectors together, as wide as pays, the last few one by one."""
        start = 0
        for width in _widths(len(rows), self._block):
            values = self._cast(rows[start : start + width] if width > 1 else rows[start], source, window)
            with torch.set_grad_enabled(kept.tape is None):
                run = self._single if width == 1 else self._several
                part = _flat(run(kept, window, values), width, target)
            yield part
            start += width

    def _cast(self, vectors: Tensor, source: Space, window: Window) -> list[Tensor]:
        """(…, P) as one view for each parameter, in the dtype of that."""
        views = zip(source.views(vectors), window.inputs, strict=True)
        return [view.to(self.parameters[place].dtype) for view, place in views]

    def _single(self, kept: Kept, window: Window, values: list[Tensor]) -> Sequence[Tensor | None]:
        if kept.tape is None:
            return self._through_graph(kept.whole, window, values)
        return (kept.whole if window == self.full else self._program(kept, window, 1))(*values)

    def _several(self, kept: Kept, window: Window, values: list[Tensor]) -> Sequence[Tensor | None]:
        return self._program(kept, window, len(values[0]))(*values)

    def _through_graph(self, function: Run, window: Window, values: list[Tensor]) -> list[Tensor | None]:
        given = dict(zip(window.inputs, values, strict=True))
        vector = [given[i] if i in given else torch.zeros_like(p) for i, p in enumerate(self.parameters)]
        results = function(*vector)
        return [results[place] for place in window.outputs]

    def _program(self, kept: Kept, window: Window, width: int) -> Run:
        if (window, width) not in kept.programs:
            assert kept.tape is not None
            tape = kept.tape if window == self.full else narrowed(kept.tape, window)
            tape = tape if width == 1 else self._batched(tape, width, window)
            kept.programs[window, width] = _picked(compile_tape(tape), window.outputs)
        return kept.programs[window, width]

    def _batched(self, tape: Tape, width: int, window: Window) -> Tape:
        probe = self._probe(2)
        return vectorised(
            tape, [probe[i].unsqueeze(0).expand(width, *probe[i].shape).contiguous() for i in window.inputs]
        )

    def _recompute(self, rows: Tensor, source: Space, target: Space, window: Window) -> Generator[tuple[int, Tensor]]:
        """(number, product) of each batch that is not kept: the primal pass anew, once for all the vectors."""
        with random_state_kept():
            for index, batch in self.objective.batches:
                if index not in self.kept:
                    with self._computed(index, batch, window) as function, explained(index):
                        parts = (_flat(function(*self._cast(row, source, window)), 1, target) for row in rows)
                        more = _stacked(parts, len(rows), target)
                    yield index, more

    @contextmanager
    def _computed(self, index: int, batch: Any, window: Window) -> Generator[Run]:
        """The product with one batch: by its recipe if there is one, else by autograd."""
        recipe = self.recipes.of(batch)
        if recipe is not None:
            with torch.no_grad():
                yield recipe.bound(batch, window)
            return
        with self.objective.running():
            with explained(index):
                linear = self.make(self.objective, self.objective.evaluate_one(index, batch))
            yield lambda *values: self._through_graph(linear.function, window, list(values))


def _picked(run: Run, places: Sequence[int]) -> Callable[..., list[Any]]:
    """The results at some places."""

    def picked(*values: Tensor) -> list[Any]:
        results = run(*values)
        return [results[place] for place in places]

    return picked


def _flat(results: Sequence[Tensor | None], width: int, target: Space) -> Tensor:
    """(*shape) or (width, *shape) for each output → (width, size of the space)."""
    pieces = [
        torch.zeros((width, size), dtype=target.dtype, device=target.device)
        if each is None
        else each.reshape(width, size)
        for each, size in zip(results, target.sizes, strict=True)
    ]
    return torch.cat(pieces, 1).detach().to(target.dtype)


def _stacked(parts: Iterable[Tensor], count: int, target: Space) -> Tensor:
    """(count, size of the space), part below part; a single part is handed on, several never take twice the memory."""
    out, start = torch.empty((0, target.size), dtype=target.dtype, device=target.device), 0
    for part in parts:
        if len(part) == count:
            return part
        out = out if start else out.new_empty((count, target.size))
        out[start : start + len(part)] = part
        start += len(part)
    return out


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


def _widths(total: int, block: int) -> Generator[int]:
    """The total as few powers of two, none above the block, and ones for what is below the narrowest that pays."""
    while total:
        width = min(block, 1 << (total.bit_length() - 1))
        width = width if width >= NARROWEST else 1
        yield width
        total -= width


def _width(tape: Tape | None, device: torch.device) -> int:
    """How many vectors keep the largest intermediate in the cache: a power of two."""
    if tape is None:
        return 1
    largest = max((nbytes(meta.shape, meta.dtype) for meta in tape.meta.values()), default=1)
    fits = WORKING_SET.get(device.type, 8 << 20) // max(1, largest)
    return min(WIDEST, 1 << (fits.bit_length() - 1)) if fits >= NARROWEST else 1
