"""A tape as straight Python: one line for each operation, each value freed after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evolute.engine.rewriting import MAKE, accumulate
from evolute.engine.tape import Step, Tape, Var, leaves

aten = torch.ops.aten

# The Python bindings parse their arguments faster than the generic operator call does.
_BINDINGS: dict[Any, Any] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.mul.Scalar: operator.mul,
    aten.div.Scalar: operator.truediv,
    aten.neg.default: torch.neg,
    aten.cat.default: torch.cat,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.sum.dim_IntList: torch.sum,
    aten.addcmul.default: torch.addcmul,
}
_METHODS = {aten.reshape.default: "reshape", aten.expand.default: "expand"}


def compile_tape(tape: Tape) -> Callable[..., list[Tensor | None]]:
    """A function of the inputs that runs the tape; the inputs themselves are never written to."""
    writer = _Writer(tape)
    source = writer.source()
    namespace = dict(writer.names)
    exec(compile(source, "<evolute tape>", "exec"), namespace)
    return namespace["run"]


class _Writer:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.lines: list[str] = []

    def source(self) -> str:
        last = self._last_uses()
        for number, step in enumerate(self.tape.steps):
            self._step(step)
            gone = [var for var in {*step.inputs(), *filter(None, step.outs)} if last.get(var, number) == number]
            gone = [f"v{var.index}" for var in gone if last.get(var) != len(self.tape.steps)]
            if gone:
                self.lines.append("del " + ", ".join(sorted(gone)))
        inputs = ", ".join(f"v{var.index}" for var in (*self.tape.inputs, *self.tape.held))
        outputs = ", ".join("None" if var is None else f"v{var.index}" for var in self.tape.outputs)
        return f"def run({inputs}):\n    " + "\n    ".join([*self.lines, f"return [{outputs}]"]) + "\n"

    def _last_uses(self) -> dict[Var, int]:
        last = {var: number for number, step in enumerate(self.tape.steps) for var in step.inputs()}
        end = len(self.tape.steps)
        return last | dict.fromkeys((*self.tape.inputs, *self.tape.held, *filter(None, self.tape.outputs)), end)

    def _step(self, step: Step) -> None:
        if step.op is accumulate:
            self._accumulate(f"v{step.out.index}", list(step.args), step.kwargs["shape"])
            return
        outs = ", ".join("_" if var is None else f"v{var.index}" for var in step.outs)
        target = f"({outs},)" if step.many else outs
        self.lines.append(f"{target} = {self._call(step)}")

    def _call(self, step: Step) -> str:
        if step.op in _METHODS and len(step.args) == 2:
            return f"{self._text(step.args[0])}.{_METHODS[step.op]}({self._text(step.args[1])})"
        if step.op is aten.mul.Tensor:
            return f"{self._text(step.args[0])} * {self._text(step.args[1])}"
        function = self._name(_BINDINGS.get(step.op, step.op), "f")
        args = [self._text(arg) for arg in step.args]
        args += [f"{key}={self._text(value)}" for key, value in step.kwargs.items()]
        return f"{function}({', '.join(args)})"

    def _accumulate(self, out: str, terms: list[Any], shape: tuple[int, ...]) -> None:
        """The first term makes the buffer, the others are added into it."""
        terms = self._ordered(terms, shape)
        kind, *operands, factor = terms.pop(0)
        bias = next((term for term in terms if kind == "mm" and self._is_bias(term, factor)), None)
        if kind == "add":
            self._start_from_two(out, operands[0], factor, terms)
        elif bias is not None:
            terms.remove(bias)
            self.lines.append(f"{out} = {self._name(torch.addmm, 'f')}({self._list([bias[1], *operands])})")
        else:
            scaled = "" if factor == 1 else f".mul_({factor!r})"
            self.lines.append(f"{out} = {self._name(MAKE[kind], 'f')}({self._list(operands)}){scaled}")
        for kind, *operands, factor in terms:
            self._add_in(out, kind, operands, factor)

    def _is_bias(self, term: Any, factor: float) -> bool:
        return term[0] == "add" and term[2] == 1 and factor == 1 and len(self._shape(term[1])) == 1

    def _start_from_two(self, out: str, first: Any, factor: float, terms: list[Any]) -> None:
        """No product among the terms: one addition out of place makes the buffer."""
        second = next((term for term in terms if term[0] == "add"), None)
        if second is None or factor != 1:
            self.lines.append(f"{out} = {self._text(first)} * {factor!r}")
            return
        terms.remove(second)
        alpha = "" if second[2] == 1 else f", alpha={second[2]!r}"
        self.lines.append(f"{out} = {self._name(torch.add, 'f')}({self._text(first)}, {self._text(second[1])}{alpha})")

    def _add_in(self, out: str, kind: str, operands: list[Any], factor: float) -> None:
        method, keyword = {
            "mm": ("addmm_", "alpha"),
            "bmm": ("baddbmm_", "alpha"),
            "mul": ("addcmul_", "value"),
            "add": ("add_", "alpha"),
        }[kind]
        scale = "" if factor == 1 else f", {keyword}={factor!r}"
        self.lines.append(f"{out}.{method}({self._list(operands)}{scale})")

    def _ordered(self, terms: list[Any], shape: tuple[int, ...]) -> list[Any]:
        """Matrix products first, then other terms of full shape, factors of one before others."""
        rank = {"mm": 0, "bmm": 0, "mul": 1, "add": 2}
        full = [self._shape(term[1]) == tuple(shape) if term[0] == "add" else True for term in terms]
        order = sorted(range(len(terms)), key=lambda i: (not full[i], rank[terms[i][0]], terms[i][-1] != 1, i))
        return [terms[i] for i in order]

    def _shape(self, value: Any) -> tuple[int, ...]:
        return self.tape.meta[value].shape if isinstance(value, Var) else tuple(value.shape)

    def _list(self, values: Any) -> str:
        return ", ".join(self._text(value) for value in values)

    def _text(self, value: Any) -> str:
        if isinstance(value, Var):
            return f"v{value.index}"
        if isinstance(value, (list, tuple)) and leaves(value):
            return "[" + self._list(value) + "]"  # pyright: ignore[reportUnknownArgumentType]
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        return self._name(value, "c")

    def _name(self, value: Any, letter: str) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = f"{letter}{len(self.names)}"
            self.names[self.known[id(value)]] = value
        return self.known[id(value)]
