"""Elementwise chains of a tape as one product with a constant: φ'(h) and φ''(h) are computed once, not per vector."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from evolute.engine.tape import Step, Tape, Var

aten = torch.ops.aten

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
    return tape.but(steps=steps)


class _Chains:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.source: dict[Var, Var] = {}
        self.length: dict[Var, int] = {}
        self.made: dict[Var, Step] = {}
        self.value: dict[Var, Tensor] = {}
        self.users = _users(tape)
        self._ones = cache(_ones)

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
        if any(
            self.tape.meta[var].shape != result.shape or self.tape.meta[var].dtype != result.dtype for var in inputs
        ):
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
            meta = self.tape.meta[var]
            return self._ones(meta.shape, meta.dtype, meta.device)
        if var not in self.value:
            step = self.made[var]
            args = tuple(self._diagonal(arg) if isinstance(arg, Var) else arg for arg in step.args)
            self.value[var] = step.op(*args, **step.kwargs)
        return self.value[var]


def _ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device).expand(shape)


def _users(tape: Tape) -> dict[Var, list[Step | None]]:
    users: dict[Var, list[Step | None]] = {var: [] for var in tape.meta}
    for step in tape.steps:
        for var in step.inputs():
            users[var].append(step)
    for var in tape.outputs:
        if var is not None:
            users[var].append(None)
    return users
