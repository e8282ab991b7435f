"""A tape: the operations of one linear computation, recorded once below autograd and replayed for other vectors.

The backward pass of a kept gradient graph is a linear function of the vector it is given. Recording the operations
that depend on that vector leaves a short straight-line program; all else in it is a constant, computed once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten


class Unrecordable(Exception):
    """The computation cannot be replayed from a tape; the message names the operation."""


@dataclass(frozen=True, slots=True)
class Var:
    """The n-th value of a tape."""

    index: int


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of a value before it is computed."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def leaves(value: Any) -> list[Any]:
    """The plain values in nested lists, tuples and dicts; a tenth of the time of a general pytree."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves(each)]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]  # pyright: ignore[reportUnknownVariableType]
    return [value]


def replaced(value: Any, swap: Callable[[Any], Any]) -> Any:
    """The same nest with each leaf swapped."""
    if isinstance(value, (list, tuple)):
        return type(value)([replaced(each, swap) for each in value])  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {key: replaced(each, swap) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return swap(value)


@dataclass(slots=True)
class Step:
    """outs = op(*args, **kwargs); args hold Vars, constant tensors and plain values, possibly in lists."""

    op: Any  # an operator of aten, or a function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Var | None, ...]
    many: bool = False

    def but(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        return Step(self.op, args, kwargs, self.outs, self.many)

    def inputs(self) -> list[Var]:
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Var)]

    @property
    def out(self) -> Var:
        only = self.outs[0]
        assert only is not None
        return only


@dataclass(slots=True)
class Tape:
    """A straight-line program: inputs → steps → outputs (an output is a Var, or None for zero).

    `held` are inputs too, which come after the others: what is a constant for the linear map, but not for the data.
    """

    inputs: tuple[Var, ...]
    steps: list[Step] = field(default_factory=list[Step])
    outputs: tuple[Var | None, ...] = ()
    meta: dict[Var, Meta] = field(default_factory=dict[Var, Meta])
    held: tuple[Var, ...] = ()

    def but(self, **changes: Any) -> Tape:
        return replace(self, **changes)

    def new(self, meta: Meta) -> Var:
        var = Var(len(self.meta))
        self.meta[var] = meta
        return var

    def constants(self) -> list[Tensor]:
        return [c for step in self.steps for c in leaves((step.args, step.kwargs)) if isinstance(c, Tensor)]

    def nbytes(self) -> int:
        """Bytes of the distinct storages that the constants keep alive."""
        storages = {c.untyped_storage()._cdata: c.untyped_storage().nbytes() for c in self.constants()}  # pyright: ignore
        return sum(storages.values())

    def interpret(self, *values: Tensor) -> list[Tensor | None]:
        """Run step by step (the compiled program does the same, faster)."""
        env: dict[Var, Any] = dict(zip((*self.inputs, *self.held), values, strict=True))
        for step in self.steps:
            args, kwargs = replaced((step.args, step.kwargs), lambda leaf: env[leaf] if isinstance(leaf, Var) else leaf)
            result = step.op(*args, **kwargs)
            for var, value in zip(step.outs, result if step.many else (result,), strict=True):
                if var is not None:
                    env[var] = value
        return [None if var is None else env[var] for var in self.outputs]


class Recorder(TorchDispatchMode):
    """Notes each operation that depends on the registered inputs; what does not is a constant of the tape."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.tape = Tape(())
        self.vars: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.blank: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffers of a constant, not yet written to
        self.tape.inputs = tuple(self._name(each) for each in inputs)
        self.verdict: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports the whole compiler, a second of waiting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_here, "unrecorded", False):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written and self.verdict is None:
            return self._mutation(func, args, kwargs, written)
        before = self._replaced(args, kwargs)
        result = func(*args, **kwargs)
        if self.verdict is None:
            self._note(func, before, result)
        return result

    def finish(self, outputs: Sequence[Tensor | None]) -> Tape:
        if self.verdict is not None:
            raise Unrecordable(self.verdict)
        self.tape.outputs = tuple(None if out is None else self.find(out) for out in outputs)
        return self.tape

    def find(self, tensor: Tensor) -> Var | None:
        """The name of a tensor; None for a constant."""
        return self.vars.get(tensor)

    def _name(self, tensor: Tensor) -> Var:
        var = self.tape.new(Meta.of(tensor))
        self.vars[tensor] = var
        return var

    def _replaced(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return replaced((args, kwargs), lambda leaf: self.find(leaf) or leaf if isinstance(leaf, Tensor) else leaf)

    def _note(self, func: Any, before: tuple[Any, Any], result: Any) -> None:
        args, kwargs = before
        if not any(isinstance(leaf, Var) for leaf in leaves(before)):
            if func in _BLANKS and isinstance(result, Tensor):
                self.blank[result] = (_BLANKS[func], Meta.of(result), result.device, result._version)
            return
        many = isinstance(result, (tuple, list))
        results = tuple(result) if many else (result,)  # pyright: ignore[reportUnknownArgumentType]
        if not all(each is None or isinstance(each, Tensor) for each in results):
            self.verdict = f"{func} turns the vector into a plain value"
            return
        outs = tuple(None if each is None else self._name(each) for each in results)
        self.tape.steps.append(Step(func, tuple(args), dict(kwargs), outs, many))

    def _mutation(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """x.op_(…) is noted as x' = op(x, …) when x is seen through one name only."""
        before = self._replaced(args, kwargs)
        target = written[0]
        depends = any(isinstance(leaf, Var) for leaf in leaves(before))
        if depends:
            self.verdict = self._why_not(func, args, written)
            if self.verdict is None and self.find(target) is None:
                self._create(target)
                before = self._replaced(args, kwargs)
        result = func(*args, **kwargs)
        if depends and self.verdict is None:
            step_args, step_kwargs = before
            self.tape.steps.append(Step(_functional(func), tuple(step_args), dict(step_kwargs), (self._name(target),)))
        return result

    def _why_not(self, func: Any, args: Any, written: list[Tensor]) -> str | None:
        target = written[0]
        if len(written) > 1 or not args or args[0] is not target or _functional(func) is None:
            return f"{func} writes in place in a way that has no functional form"
        storage = target.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        others = [t for t in self.vars if t is not target and t.untyped_storage()._cdata == storage]
        blank = self.blank.get(target)
        if others or (self.find(target) is None and (blank is None or blank[3] != target._version)):
            return f"{func} writes into a tensor that is seen through several names"
        return None

    def _create(self, target: Tensor) -> None:
        fill, meta, device, _ = self.blank[target]
        var = self._name(target)
        kwargs = {"dtype": meta.dtype, "device": device}
        self.tape.steps.append(Step(aten.full.default, (list(meta.shape), fill), kwargs, (var,)))


_here = threading.local()


@contextmanager
def unrecorded() -> Generator[None]:
    """Inside, no recorder sees anything: checks whose outcome is not part of the result."""
    before, _here.unrecorded = getattr(_here, "unrecorded", False), True
    try:
        yield
    finally:
        _here.unrecorded = before


_BLANKS: dict[Any, float] = {
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that the operation writes into, by its schema."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return found


def _functional(func: Any) -> Any:
    """aten.add_.Tensor → aten.add.Tensor; None where there is none."""
    name, _, overload = str(func).removeprefix("aten.").partition(".")
    packet = getattr(aten, name.removesuffix("_"), None) if str(func).startswith("aten.") else None
    return getattr(packet, overload, None) if packet is not None and name.endswith("_") else None


def record(function: Callable[..., Sequence[Tensor | None]], *inputs: Tensor) -> tuple[Tape, Sequence[Tensor | None]]:
    """The tape of function(*inputs), and what it returned this time."""
    with Recorder(inputs) as recorder:
        outputs = function(*inputs)
    return recorder.finish(outputs), outputs
