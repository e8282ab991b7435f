"""Batches that are not kept: their constants are computed anew by a program that holds no numbers of its own.

What a recording keeps for a batch is itself a function of the batch. It is recorded too, once for all batches of one
signature (shapes, dtypes, plain values): batch → constants, then vector and constants → products. No graph is built.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from evolute.engine.checks import check_replay
from evolute.engine.linear_maps import LinearMap
from evolute.engine.narrow import Window, narrowed
from evolute.engine.objective import Evaluated, Objective
from evolute.engine.program import compile_tape
from evolute.engine.rewriting import drop_dead, drop_noops
from evolute.engine.simplify import simplify
from evolute.engine.sums import broadcast_terms, gather_sums
from evolute.engine.tape import Meta, Recorder, Tape, Unrecordable, Var, leaves, replaced

aten = torch.ops.aten
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
Run = Callable[..., Sequence[Tensor | None]]
FORGET = 32  # new names after which storages that are gone are forgotten: what is held of them splits free memory
TRIALS = 2  # batches of one signature that are compared with autograd: a number baked in shows at the second


class DataRecorder(Recorder):
    """Records what depends on the data, through autograd too, which hands back what it saved under another name."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.places: dict[int, tuple[StorageWeakRef, dict[Any, Var]]] = {}
        super().__init__(inputs)

    def _name(self, tensor: Tensor) -> Var:
        var = super()._name(tensor)
        storage = StorageWeakRef(tensor.untyped_storage())  # while it is held no other storage gets this number
        self.places.setdefault(storage.cdata, (storage, {}))[1][_place(tensor)] = var
        if var.index % FORGET == 0:
            self.places = {number: each for number, each in self.places.items() if not each[0].expired()}
        return var

    def _note(self, func: Any, before: tuple[Any, Any], result: Any) -> None:
        if _DYNAMIC.intersection(func.tags) and self._shaped_by_data(func, before):
            self.verdict = f"{func} gives a shape or a plain value that depends on the numbers"
        else:
            super()._note(func, before, result)

    def _shaped_by_data(self, func: Any, before: tuple[Any, Any]) -> bool:
        """Of x[i], only the shape for a mask i depends on the numbers."""
        found = [leaf for leaf in leaves(before) if isinstance(leaf, Var)]
        if func is aten.index.Tensor:
            return any(self.tape.meta[var].dtype in (torch.bool, torch.uint8) for var in found if var != before[0][0])
        return bool(found)

    def find(self, tensor: Tensor) -> Var | None:
        var = super().find(tensor)
        if var is not None or tensor.layout != torch.strided:
            return var
        _, views = self.places.get(tensor.untyped_storage()._cdata, (None, {}))  # pyright: ignore[reportPrivateUsage]
        if views and _place(tensor) not in views:
            self.verdict = self.verdict or "a tensor is seen through a view that was not recorded"
        return views.get(_place(tensor))


def _place(tensor: Tensor) -> Any:
    shape = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    return *shape, tensor.dtype, tensor._version  # pyright: ignore[reportPrivateUsage]


class _Escapes(TorchFunctionMode):
    """Numbers that leave PyTorch would be taken for constants."""

    def __init__(self, recorder: DataRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVING and self.recorder.find(args[0]) is not None:
            self.recorder.verdict = f"{func.__name__} takes numbers out of PyTorch"
        return func(*args, **(kwargs or {}))


_LEAVING = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}


@dataclass
class Recipe:
    """`data`: the tensors of a batch → constants; `linear`: a vector, and the constants → the product."""

    data: Tape
    linear: Tape
    trials: int = 0
    programs: dict[Window, tuple[Run, Run]] = field(default_factory=dict[Window, tuple[Run, Run]])

    def bound(self, batch: Any, window: Window) -> Run:
        """V ↦ A v for one batch: its constants are computed here, once for all vectors."""
        constants, product = self._program(window)
        held = constants(*_tensors(batch))
        return lambda *vector: product(*vector, *held)

    def _program(self, window: Window) -> tuple[Run, Run]:
        if window not in self.programs:
            self.programs[window] = _compiled(self.data, narrowed(self.linear, window), window)
        return self.programs[window]


class Recipes:
    """Recipes by signature; None where there is none, and autograd does the work."""

    def __init__(self, objective: Objective, make: Callable[[Objective, Evaluated], LinearMap], full: Window) -> None:
        self.objective, self.make, self.full = objective, make, full
        self.known: dict[Any, Recipe | None] = {}
        self.notes: dict[str, None] = {}

    def of(self, batch: Any) -> Recipe | None:
        return self.known.get(signature(batch))

    def learn(self, index: int, batch: Any, probes: tuple[Sequence[Tensor], Sequence[Tensor]]) -> None:
        """Records a new signature; compares the first batches of each with autograd. Within objective.running()."""
        key = signature(batch)
        if key is None or self.objective.dropout_seed is not None:
            return
        try:
            if key not in self.known:
                self.known[key] = self._record(index, batch, probes[0])
            recipe = self.known[key]
            if recipe is not None and recipe.trials < TRIALS:
                self._compare(recipe, index, batch, probes[1])
        except Unrecordable as reason:
            self.known[key] = None
            self.notes[f"recomputed through autograd, not by a recorded program: {reason}"] = None

    def _record(self, index: int, batch: Any, probe: Sequence[Tensor]) -> Recipe:
        with recording(_tensors(batch)) as recorder:
            linear = self.make(self.objective, self.objective.evaluate_one(index, batch))
            with Recorder(probe) as products:
                results = linear.function(*probe)
            tape = products.finish(results)
            tape = _parametrised(simplify(tape, lambda constant: recorder.find(constant) is None), recorder)
        small = sum(each.nbytes for each in probe)
        if _own_bytes((recorder.tape, tape), self.objective) > small:
            raise Unrecordable("too much does not depend on the data")
        return Recipe(recorder.tape, tape)

    def _compare(self, recipe: Recipe, index: int, batch: Any, probe: Sequence[Tensor]) -> None:
        direct = self._direct(index, batch, probe)

        def run(*vector: Tensor) -> Sequence[Tensor | None]:
            return recipe.bound(batch, self.full)(*vector)

        check_replay(run, recipe.linear, probe, direct)
        recipe.trials += 1

    def _direct(self, index: int, batch: Any, probe: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Through autograd, whose graph is gone afterwards."""
        return self.make(self.objective, self.objective.evaluate_one(index, batch)).function(*probe)


@contextmanager
def recording(inputs: Sequence[Tensor]) -> Generator[DataRecorder]:
    with DataRecorder(inputs) as recorder, _Escapes(recorder):
        yield recorder


def _parametrised(tape: Tape, recorder: DataRecorder) -> Tape:
    """The tape with the constants that come from the data as held inputs; they are the outputs of the recorder's."""
    held: dict[Var, Var] = {}

    def swap(leaf: Any) -> Any:
        source = recorder.find(leaf) if isinstance(leaf, Tensor) else None
        if source is None:
            return leaf
        if source not in held:
            held[source] = tape.new(Meta.of(leaf))
        return held[source]

    steps = [step.but(*replaced((step.args, step.kwargs), swap)) for step in tape.steps]
    if recorder.verdict is not None:
        raise Unrecordable(recorder.verdict)
    recorder.tape = drop_dead(recorder.tape.but(outputs=tuple(held)))
    return tape.but(steps=steps, held=tuple(held.values()))


def _compiled(data: Tape, linear: Tape, window: Window) -> tuple[Run, Run]:
    """Only the constants that this block needs."""
    used = {var for step in linear.steps for var in step.inputs()}
    places = [place for place, var in enumerate(linear.held) if var in used]
    linear = linear.but(held=tuple(linear.held[place] for place in places))
    data = drop_noops(data.but(outputs=tuple(data.outputs[place] for place in places)))
    data = drop_dead(broadcast_terms(gather_sums(drop_dead(data))))
    product = compile_tape(linear)
    return compile_tape(data), lambda *values: _at(product(*values), window.outputs)


def _at(results: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
    return [results[place] for place in places]


def _own_bytes(tapes: Sequence[Tape], objective: Objective) -> int:
    """Bytes that the tapes keep alive beside the model's own tensors."""
    mine = {t.untyped_storage()._cdata for t in (*objective.model.parameters(), *objective.model.buffers())}  # pyright: ignore
    storages = [c.untyped_storage() for tape in tapes for c in tape.constants()]
    return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in mine}.values())  # pyright: ignore


def signature(batch: Any) -> Any:
    """What two batches must share to be computed alike; None if they cannot be compared."""
    found, spec = tree_flatten(batch)
    storages: dict[int, int] = {}
    parts = [_part(leaf, storages) for leaf in found]
    return None if None in parts or not storages else (str(spec), *parts)


def _part(leaf: Any, storages: dict[int, int]) -> Any:
    if not isinstance(leaf, Tensor):
        return ("value", type(leaf), leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else None
    if leaf.layout != torch.strided or leaf.requires_grad:
        return None
    number = storages.setdefault(leaf.untyped_storage()._cdata, len(storages))  # pyright: ignore[reportPrivateUsage]
    return (*_place(leaf)[:-1], leaf.device, number)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
