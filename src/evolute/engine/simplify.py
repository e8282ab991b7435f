"""Rewrites of a tape that keep its meaning: no-ops go, elementwise chains become one product, sums accumulate in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from evolute.engine.tape import Meta, Step, Tape, Var, leaves, replaced

aten = torch.ops.aten

# A view becomes a reshape: a rewritten sum may come in another layout than the recorded one.
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SCALINGS = {aten.mul.Tensor: aten.mul.Scalar, aten.div.Tensor: aten.div.Scalar}
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def simplify(tape: Tape) -> Tape:
    """The same linear map in fewer passes over memory."""
    tape = drop_noops(tape)
    tape = drop_dead(tape)
    tape = collapse_diagonals(tape)
    tape = drop_dead(tape)
    tape = gather_sums(tape)
    return drop_dead(tape)


def drop_dead(tape: Tape) -> Tape:
    """Only the steps that an output needs."""
    needed = {var for var in tape.outputs if var is not None}
    kept: list[Step] = []
    for step in reversed(tape.steps):
        if any(out in needed for out in step.outs if out is not None):
            needed.update(step.inputs())
            step.outs = tuple(out if out in needed else None for out in step.outs) if step.many else step.outs
            kept.append(step)
    return Tape(tape.inputs, kept[::-1], tape.outputs, tape.meta)


def rename(tape: Tape, steps: list[Step], names: dict[Var, Var]) -> Tape:
    return Tape(tape.inputs, steps, tuple(None if v is None else names.get(v, v) for v in tape.outputs), tape.meta)


def _with(step: Step, names: dict[Var, Var]) -> Step:
    args, kwargs = replaced((step.args, step.kwargs), lambda leaf: names.get(leaf, leaf) if isinstance(leaf, Var) else leaf)
    return Step(step.op, args, kwargs, step.outs, step.many)


def narrowed(tape: Tape, inputs: Collection[int], outputs: Collection[int]) -> Tape:
    """A block of the linear map: the other inputs are zero, the other outputs not wanted."""
    zero = {var for place, var in enumerate(tape.inputs) if place not in inputs}
    names: dict[Var, Var] = {}
    steps: list[Step] = []
    for old in tape.steps:
        step = _with(old, names)
        found = step.inputs()
        if found and all(var in zero for var in found):
            zero.update(out for out in step.outs if out is not None)
        elif any(var in zero for var in found):
            step, same = _without_zeros(step, zero, tape)
            if same is not None:
                names[step.out] = same
            else:
                steps.append(step)
        else:
            steps.append(step)
    wanted = [var if place in outputs and var not in zero else None for place, var in enumerate(tape.outputs)]
    live = tuple(var for place, var in enumerate(tape.inputs) if place in inputs)
    final = tuple(None if var is None else names.get(var, var) for var in wanted)
    return drop_dead(Tape(live, steps, final, tape.meta))


def _without_zeros(step: Step, zero: set[Var], tape: Tape) -> tuple[Step, Var | None]:
    """The step with its zero Vars gone; where they cannot simply go, constant zeros stand in."""
    meta = tape.meta
    if step.op is accumulate:
        terms = [term for term in step.args if not any(v in zero for v in term[1:-1] if isinstance(v, Var))]
        shapes = [meta[step.out].shape if term[0] != "add" else meta[term[1]].shape for term in terms]
        if meta[step.out].shape in shapes:
            only = terms[0][1] if len(terms) == 1 and terms[0][0] == "add" and terms[0][2] == 1 else None
            return Step(accumulate, tuple(terms), step.kwargs, step.outs), only
    if step.op in (aten.add.Tensor, aten.sub.Tensor) and step.kwargs.get("alpha", 1) == 1:
        left, right = step.args
        if right in zero and meta[left].shape == meta[step.out].shape:
            return step, left
        if left in zero and step.op is aten.add.Tensor and meta[right].shape == meta[step.out].shape:
            return step, right
    device = next(c.device for c in tape.constants())
    blank = {v: torch.zeros((), dtype=meta[v].dtype, device=device).expand(meta[v].shape) for v in step.inputs() if v in zero}
    args, kwargs = replaced((step.args, step.kwargs), lambda leaf: blank.get(leaf, leaf) if isinstance(leaf, Var) else leaf)
    return Step(step.op, args, kwargs, step.outs, step.many), None


def drop_noops(tape: Tape) -> Tape:
    """x.detach(), x + 0, x.view(its own shape), t(t(x)), view(view(x)) and repeated views are names of what is there."""
    names: dict[Var, Var] = {}
    made: dict[Var, Step] = {}
    seen: dict[Any, Var] = {}
    steps: list[Step] = []
    for old in tape.steps:
        step = _with(old, names)
        step = _shorter(step, made, tape)
        same = _noop(step, made, tape) if not step.many else None
        same = same or (seen.get(_key(step)) if not step.many else None)
        if same is not None:
            names[step.out] = same
            continue
        if not step.many:
            made[step.out] = step
            seen[_key(step)] = step.out
        steps.append(step)
    return rename(tape, steps, names)


def _key(step: Step) -> Any:
    found = leaves((step.args, step.kwargs))
    return (step.op, *(id(leaf) if isinstance(leaf, Tensor) else (type(leaf).__name__, str(leaf)) for leaf in found))


def _shorter(step: Step, made: dict[Var, Step], tape: Tape) -> Step:
    """view(view(x)) = view(x) where x is contiguous; x * 2.0 is a scaling, not a product of tensors."""
    if step.op in RESHAPES and step.op is not aten.reshape.default:
        step = Step(aten.reshape.default, (step.args[0], list(tape.meta[step.out].shape)), {}, step.outs)
    if step.op in _SCALINGS and isinstance(step.args[1], (int, float)):
        return Step(_SCALINGS[step.op], step.args, {}, step.outs)
    if step.op in RESHAPES:
        inner = made.get(step.args[0])
        if inner is not None and inner.op in RESHAPES and tape.meta[inner.args[0]].contiguous:
            shape = list(tape.meta[step.out].shape)
            return Step(aten.reshape.default, (inner.args[0], shape), {}, step.outs)
    return step


def _noop(step: Step, made: dict[Var, Step], tape: Tape) -> Var | None:
    first = step.args[0] if step.args else None
    if step.op is aten.add.Tensor:
        return _plus_zero(step, tape)
    if not isinstance(first, Var):
        return None
    source, result = tape.meta[first], tape.meta[step.out]
    if step.op in _SAME or (step.op in RESHAPES | {aten.expand.default} and source.shape == result.shape):
        return first
    if step.op is aten.clone.default and source == result:
        return first
    if step.op is aten._to_copy.default and source == result:
        return first
    inner = made.get(first)
    if step.op is aten.t.default and inner is not None and inner.op is aten.t.default:
        return inner.args[0]
    if step.op is aten.transpose.int and inner is not None and inner.op is aten.transpose.int:
        if _axes(step, result) == _axes(inner, result):
            return inner.args[0]
    return None


def _axes(step: Step, meta: Meta) -> set[int]:
    return {axis % len(meta.shape) for axis in step.args[1:3]}


def _plus_zero(step: Step, tape: Tape) -> Var | None:
    left, right = step.args[0], step.args[1]
    if isinstance(left, Tensor):
        left, right = right, left
    if isinstance(left, Var) and isinstance(right, Tensor) and tape.meta[left].shape == tape.meta[step.out].shape:
        if tape.meta[left].dtype == tape.meta[step.out].dtype and not right.any():
            return left
    return None


# Operations that act on each entry alone and linearly in their first Var, the rest being constant.
_ENTRYWISE = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.threshold_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.softplus_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.log_sigmoid_backward.default,
}
_LINEAR_IN_FIRST = _ENTRYWISE - {aten.mul.Tensor, aten.tanh_backward.default}


def collapse_diagonals(tape: Tape) -> Tape:
    """A chain x → f(g(x)) of entrywise linear operations is κ ⊙ x with κ = f(g(1)), computed here once."""
    chains = _Chains(tape)
    steps: list[Step] = []
    for step in tape.steps:
        replacement = chains.visit(step)
        steps.append(replacement)
    return Tape(tape.inputs, steps, tape.outputs, tape.meta)


class _Chains:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.source: dict[Var, Var] = {}
        self.length: dict[Var, int] = {}
        self.made: dict[Var, Step] = {}
        self.value: dict[Var, Tensor] = {}
        self.users = _users(tape)

    def visit(self, step: Step) -> Step:
        source = self._source(step)
        if source is None:
            return step
        self.source[step.out], self.made[step.out] = source, step
        self.length[step.out] = 1 + max(self.length.get(var, 0) for var in step.inputs())
        if not self._leaves(step.out) or (self.length[step.out] == 1 and step.op in (aten.mul.Tensor, aten.mul.Scalar)):
            return step
        return Step(aten.mul.Tensor, (source, self._diagonal(step.out)), {}, step.outs)

    def _source(self, step: Step) -> Var | None:
        """The Var of which the result is an entrywise multiple, if it is one."""
        if step.many or not (step.op in _ENTRYWISE or step.op in (aten.add.Tensor, aten.sub.Tensor)):
            return None
        inputs, result = step.inputs(), self.tape.meta[step.out]
        if any(self.tape.meta[var].shape != result.shape or self.tape.meta[var].dtype != result.dtype for var in inputs):
            return None
        sources = {self.source.get(var, var) for var in inputs}
        if len(sources) != 1:
            return None
        if step.op in (aten.add.Tensor, aten.sub.Tensor):
            return sources.pop() if all(isinstance(arg, Var) for arg in step.args) else None
        return sources.pop() if len(inputs) == 1 and self._linear(step) else None

    def _linear(self, step: Step) -> bool:
        return step.op is aten.mul.Tensor or isinstance(step.args[0], Var)

    def _leaves(self, var: Var) -> bool:
        """Whether anyone outside the chain wants this value."""
        return any(user is None or self._source_of_user(user) != self.source[var] for user in self.users[var])

    def _source_of_user(self, step: Step) -> Var | None:
        return self._source(step)

    def _diagonal(self, var: Var) -> Tensor:
        if var not in self.made:
            some = next(c for c in self.tape.constants() if c.device is not None)
            meta = self.tape.meta[var]
            return torch.ones((), dtype=meta.dtype, device=some.device).expand(meta.shape)
        if var not in self.value:
            step = self.made[var]
            args = tuple(self._diagonal(arg) if isinstance(arg, Var) else arg for arg in step.args)
            self.value[var] = step.op(*args, **step.kwargs)
        return self.value[var]


def _users(tape: Tape) -> dict[Var, list[Step | None]]:
    users: dict[Var, list[Step | None]] = {var: [] for var in tape.meta}
    for step in tape.steps:
        for var in step.inputs():
            users[var].append(step)
    for var in tape.outputs:
        if var is not None:
            users[var].append(None)
    return users


def accumulate(*terms: Any, shape: tuple[int, ...]) -> Tensor:
    """Σ of terms ("mm" | "bmm" | "mul", a, b, c) = c·(a·b) and ("add", a, c) = c·a; program.py does it in one buffer."""
    total: Tensor | None = None
    for kind, *operands, factor in terms:
        each = operands[0] if kind == "add" else MAKE[kind](*operands)
        each = each if total is not None or factor == 1 else each * factor
        total = each if total is None else torch.add(total, each, alpha=factor)
    assert total is not None
    return total.expand(shape)


MAKE: dict[str, Callable[..., Tensor]] = {"mm": torch.mm, "bmm": torch.bmm, "mul": torch.mul}
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
    return Tape(tape.inputs, steps, tape.outputs, tape.meta)


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
            out = self.tape.new(Meta(shape, (), self.tape.meta[var].dtype))
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
