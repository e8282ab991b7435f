"""Rewrites of a tape that keep its meaning: what is not needed goes, and what does nothing is renamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evolute.engine.tape import Meta, Step, Tape, Var, leaves, replaced

aten = torch.ops.aten

# A view becomes a reshape: a rewritten sum may come in another layout than the recorded one.
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SCALINGS = {aten.mul.Tensor: aten.mul.Scalar, aten.div.Tensor: aten.div.Scalar}
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def accumulate(*terms: Any, shape: tuple[int, ...]) -> Tensor:
    """Σ of terms ("mm" | "bmm" | "mul", a, b, c) = c·(a·b) and ("add", a, c) = c·a. Compiled, in one buffer."""
    total: Tensor | None = None
    for kind, *operands, factor in terms:
        each = operands[0] if kind == "add" else MAKE[kind](*operands)
        each = each if total is not None or factor == 1 else each * factor
        total = each if total is None else torch.add(total, each, alpha=factor)
    assert total is not None
    return total.expand(shape)


MAKE: dict[str, Callable[..., Tensor]] = {"mm": torch.mm, "bmm": torch.bmm, "mul": torch.mul}


def drop_dead(tape: Tape) -> Tape:
    """Only the steps that an output needs."""
    needed = {var for var in tape.outputs if var is not None}
    kept: list[Step] = []
    for step in reversed(tape.steps):
        if any(out in needed for out in step.outs if out is not None):
            needed.update(step.inputs())
            kept.append(_only(step, needed) if step.many else step)
    return tape.but(steps=kept[::-1])


def _only(step: Step, needed: set[Var]) -> Step:
    """Only the results that are needed, and where an operation can be told so, only these are computed."""
    step.outs = tuple(out if out in needed else None for out in step.outs)
    if step.op is aten.native_layer_norm_backward.default:
        step.args = *step.args[:-1], [out is not None for out in step.outs]
    return step


def rename(tape: Tape, steps: list[Step], names: dict[Var, Var]) -> Tape:
    return tape.but(steps=steps, outputs=tuple(None if v is None else names.get(v, v) for v in tape.outputs))


def with_names(step: Step, names: dict[Var, Var]) -> Step:
    args, kwargs = replaced(
        (step.args, step.kwargs), lambda leaf: names.get(leaf, leaf) if isinstance(leaf, Var) else leaf
    )
    return step.but(args, kwargs)


def drop_noops(tape: Tape, fixed: Callable[[Tensor], bool] = lambda _: True) -> Tape:
    """x.detach(), x + 0, 1 ⊙ x, x.view(its own shape), t(t(x)), view(view(x)), repetitions: what is there already.

    `fixed` says of which constants the numbers may be looked at.
    """
    names: dict[Var, Var] = {}
    made: dict[Var, Step] = {}
    seen: dict[Any, Var] = {}
    steps: list[Step] = []
    for old in tape.steps:
        step = with_names(old, names)
        step = _shorter(step, made, tape)
        same = _noop(step, made, tape, fixed) if not step.many else None
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


def _noop(step: Step, made: dict[Var, Step], tape: Tape, fixed: Callable[[Tensor], bool]) -> Var | None:
    first = step.args[0] if step.args else None
    if step.op is aten.add.Tensor:
        return _unchanged(step, made, tape, 0, fixed)
    if step.op is aten.mul.Tensor:
        return _unchanged(step, made, tape, 1, fixed)
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
    twice = step.op is aten.transpose.int and inner is not None and inner.op is aten.transpose.int
    if inner is not None and twice and _axes(step, result) == _axes(inner, result):
        return inner.args[0]
    return None


def _axes(step: Step, meta: Meta) -> set[int]:
    return {axis % len(meta.shape) for axis in step.args[1:3]}


def _unchanged(
    step: Step, made: dict[Var, Step], tape: Tape, neutral: int, fixed: Callable[[Tensor], bool]
) -> Var | None:
    """X where x + 0 or 1 ⊙ x is what the step says."""
    for kept, other in ((step.args[0], step.args[1]), (step.args[1], step.args[0])):
        if not isinstance(kept, Var) or not _all(other, neutral, made, fixed):
            continue
        source, result = tape.meta[kept], tape.meta[step.out]
        if source.shape == result.shape and source.dtype == result.dtype:
            return kept
    return None


def _all(value: Any, number: int, made: dict[Var, Step], fixed: Callable[[Tensor], bool]) -> bool:
    """Whether each entry is that number: a constant whose numbers may be looked at, or zeros made on the way."""
    if isinstance(value, Var):
        return number == 0 and value in made and made[value].op is aten.zeros_like.default
    return isinstance(value, Tensor) and fixed(value) and not bool((value != number).any())
