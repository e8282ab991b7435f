"""A block of a recorded linear map: what the zero inputs would have fed is left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.engine.rewriting import accumulate, drop_dead, with_names
from evolute.engine.tape import Meta, Step, Tape, Var, replaced

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """Which inputs a product reads and which outputs it writes, by position: a block of the operator."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def narrowed(tape: Tape, window: Window) -> Tape:
    """A block of the linear map: the other inputs are zero, the other outputs not wanted."""
    held = set(tape.held)
    zero = {var for place, var in enumerate(tape.inputs) if place not in window.inputs}
    names: dict[Var, Var] = {}
    steps: list[Step] = []
    for old in tape.steps:
        step = with_names(old, names)
        found = [var for var in step.inputs() if var not in held]
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
    wanted = [var if place in window.outputs and var not in zero else None for place, var in enumerate(tape.outputs)]
    live = tuple(var for place, var in enumerate(tape.inputs) if place in window.inputs)
    final = tuple(None if var is None else names.get(var, var) for var in wanted)
    return drop_dead(tape.but(inputs=live, steps=steps, outputs=final))


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
    blank = {var: _blank(meta[var]) for var in step.inputs() if var in zero}
    swap = lambda leaf: blank.get(leaf, leaf) if isinstance(leaf, Var) else leaf  # noqa: E731
    args, kwargs = replaced((step.args, step.kwargs), swap)
    return Step(step.op, args, kwargs, step.outs, step.many), None


def _blank(meta: Meta) -> Tensor:
    """Zeros of that shape in the memory of one."""
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)
