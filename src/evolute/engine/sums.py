"""Sums of a tape in one buffer: a matrix product accumulates where it lands instead of being added afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from evolute.engine.rewriting import RESHAPES, accumulate
from evolute.engine.tape import Meta, Step, Tape, Var

aten = torch.ops.aten

_WIDENING = RESHAPES | {aten.expand.default}
_PRODUCTS: dict[Any, str] = {aten.mm.default: "mm", aten.bmm.default: "bmm", aten.mul.Tensor: "mul"}
_VIEWS = RESHAPES | {aten.t.default, aten.transpose.int, aten.permute.default}


def gather_sums(tape: Tape) -> Tape:
    """((a + b C) + d E) + … in one buffer: products accumulate where they land instead of being added afterwards."""
    made = {step.out: step for step in tape.steps if not step.many}
    counts = Counter(var for step in tape.steps for var in step.inputs())
    counts.update(var for var in tape.outputs if var is not None)
    absorbed: set[Var] = set()
    sums: dict[Var, list[Step]] = {}
    for step in reversed(tape.steps):
        if not step.many and step.op in (aten.add.Tensor, aten.sub.Tensor) and step.out not in absorbed:
            rewritten = _Sum(tape, made, counts, absorbed).of(step)
            if rewritten is not None:
                sums[step.out] = rewritten
    steps: list[Step] = []
    for step in tape.steps:
        if step.many or step.out not in absorbed:
            steps += sums.get(step.out, [step]) if not step.many else [step]
    return tape.but(steps=steps)


def broadcast_terms(tape: Tape) -> Tape:
    """A term that was expanded to the shape of the sum is added as it is: a bias becomes part of the matrix product."""
    made = {step.out: step for step in tape.steps if not step.many}
    steps = [_narrowest(step, made, tape) if step.op is accumulate else step for step in tape.steps]
    return tape.but(steps=steps)


def _narrowest(step: Step, made: dict[Var, Step], tape: Tape) -> Step:
    terms = [("add", _unwidened(term[1], made, tape), term[2]) if term[0] == "add" else term for term in step.args]
    full = any(term[0] != "add" or tape.meta[term[1]].shape == tuple(step.kwargs["shape"]) for term in terms)
    return step.but(tuple(terms), step.kwargs) if full else step


def _unwidened(var: Var, made: dict[Var, Step], tape: Tape) -> Var:
    """B where var = expand(reshape(b)) and b broadcasts to the same."""
    while var in made and made[var].op in _WIDENING and isinstance(made[var].args[0], Var):
        source, result = tape.meta[made[var].args[0]].shape, tape.meta[var].shape
        if len(source) > len(result) or (made[var].op in RESHAPES and _unled(source) != _unled(result)):
            break
        var = made[var].args[0]
    return var


def _unled(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the ones in front."""
    return _unled(shape[1:]) if shape[:1] == (1,) else shape


class _Sum:
    """One sum of the tape: its terms, and the layout in which they are accumulated."""

    def __init__(self, tape: Tape, made: dict[Var, Step], counts: Counter[Var], absorbed: set[Var]) -> None:
        self.tape, self.made, self.counts, self.absorbed = tape, made, counts, absorbed
        self.taken: set[Var] = set()

    def of(self, step: Step) -> list[Step] | None:
        meta = self.tape.meta[step.out]
        found = self._leaves(step, 1.0)
        if found is None or any(not isinstance(leaf, Var) for leaf, _ in found):
            return None
        if any(self.tape.meta[var].dtype != meta.dtype for var, _ in found):
            return None
        full = [var for var, _ in found if self.tape.meta[var].shape == meta.shape]
        if not full:
            return None
        views = next((self._views(var) for var in full if self._product(self._root(var)) in ("mm", "bmm")), [])
        if any(self.tape.meta[var].shape != meta.shape for var, _ in found):
            views = [] if not all(self._fits(var, meta, views) for var, _ in found) else views
        extra: list[Step] = []
        terms = [
            self._term(var, factor, views, extra) if var in full else ("add", var, factor) for var, factor in found
        ]
        self.absorbed |= self.taken
        inner = self.tape.new(self._inner_meta(views, meta)) if views else step.out
        total = Step(accumulate, tuple(terms), {"shape": self.tape.meta[inner].shape}, (inner,))
        return [*extra, total, *self._again(views, inner, step.out)]

    def _fits(self, var: Var, meta: Meta, views: list[Step]) -> bool:
        """A bias-like term needs no view where the accumulation layout keeps the last axis."""
        shape = self.tape.meta[var].shape
        if shape == meta.shape:
            return True
        last = all(view.op in RESHAPES for view in views)
        return last and len(shape) == 1 and bool(views) and self._inner_meta(views, meta).shape[-1:] == shape

    def _leaves(self, step: Step, factor: float) -> list[tuple[Any, float]] | None:
        if len(step.args) != 2:
            return None
        alpha = step.kwargs.get("alpha", 1)
        sign = -1.0 if step.op is aten.sub.Tensor else 1.0
        out: list[tuple[Any, float]] = []
        for arg, scale in ((step.args[0], factor), (step.args[1], factor * sign * alpha)):
            inner = self.made.get(arg) if isinstance(arg, Var) else None
            deeper = None
            if inner is not None and self._mine(arg) and self._same_shape(arg, step.out):
                if inner.op in (aten.add.Tensor, aten.sub.Tensor):
                    deeper = self._leaves(inner, scale)
                elif inner.op is aten.mul.Scalar:
                    deeper = [(inner.args[0], scale * inner.args[1])]
            if deeper is not None and all(isinstance(leaf, Var) for leaf, _ in deeper):
                self.taken.add(arg)
                out += deeper
            else:
                out.append((arg, scale))
        return out

    def _mine(self, var: Var) -> bool:
        return self.counts[var] == 1 and var in self.made

    def _same_shape(self, left: Var, right: Var) -> bool:
        return self.tape.meta[left].shape == self.tape.meta[right].shape

    def _views(self, var: Var) -> list[Step]:
        """The views between a term and the product it comes from, outermost first."""
        views: list[Step] = []
        while self._mine(var) and self.made[var].op in _VIEWS:
            views.append(self.made[var])
            var = self.made[var].args[0]
        return views

    def _root(self, var: Var) -> Var:
        views = self._views(var)
        return views[-1].args[0] if views else var

    def _product(self, var: Var) -> str | None:
        step = self.made.get(var)
        if step is None or not self._mine(var):
            return None
        kind = _PRODUCTS.get(step.op)
        full = self.tape.meta[var].shape
        return None if kind == "mul" and any(self._shape(arg) != full for arg in step.args) else kind

    def _shape(self, value: Any) -> tuple[int, ...]:
        return self.tape.meta[value].shape if isinstance(value, Var) else tuple(value.shape)

    def _term(self, var: Var, factor: float, views: list[Step], extra: list[Step]) -> tuple[Any, ...]:
        chain = self._views(var)
        root = self._root(var)
        alike = [self._form(view) for view in chain] == [self._form(view) for view in views]
        alike = alike and (not views or self.tape.meta[root].shape == self.tape.meta[views[-1].args[0]].shape)
        kind = self._product(root) if alike else None
        if alike and kind is not None:
            self.taken |= {root, *(view.out for view in chain)}
            return (kind, *self.made[root].args, factor)
        if views and alike and chain:
            self.taken |= {view.out for view in chain}
            return ("add", root, factor)
        return ("add", self._back(var, views, extra), factor)

    def _form(self, view: Step) -> Any:
        meta = self.tape.meta
        if view.op in RESHAPES:
            return ("reshape", meta[view.args[0]].shape, meta[view.out].shape)
        return (view.op, str(view.args[1:]), meta[view.args[0]].shape)

    def _back(self, var: Var, views: list[Step], extra: list[Step]) -> Var:
        """The term in the layout of the accumulation: each view undone, outermost first."""
        if not views or len(self.tape.meta[var].shape) < len(self.tape.meta[views[0].out].shape):
            return var
        for view in views:
            shape = self.tape.meta[view.args[0]].shape
            out = self.tape.new(replace(self.tape.meta[var], shape=shape, stride=()))
            extra.append(Step(*_inverse(view, var, shape), {}, (out,)))
            var = out
        return var

    def _inner_meta(self, views: list[Step], meta: Meta) -> Meta:
        return self.tape.meta[views[-1].args[0]] if views else meta

    def _again(self, views: list[Step], inner: Var, final: Var) -> list[Step]:
        steps: list[Step] = []
        for view in reversed(views):
            out = final if view is views[0] else self.tape.new(self.tape.meta[view.out])
            steps.append(Step(view.op, (inner, *view.args[1:]), view.kwargs, (out,)))
            inner = out
        return steps


def _inverse(view: Step, var: Var, shape: tuple[int, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if view.op in RESHAPES:
        return aten.reshape.default, (var, list(shape))
    if view.op is aten.permute.default:
        order = [axis % len(shape) for axis in view.args[1]]
        return aten.permute.default, (var, [order.index(axis) for axis in range(len(order))])
    return view.op, (var, *view.args[1:])
