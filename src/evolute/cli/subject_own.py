"""`--from my_module:build`: any model, from a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evolute import Objective
from evolute.cli.refusal import refuse
from evolute.cli.subject import Options, Subject, chosen, refuse_non_finite
from evolute.cli.theirs import theirs
from evolute.zoo.seeding import drawn_from

EXPECTED = "(model, batches, loss), a dict with these three, or an ev.Objective"
KEYS = ("model", "batches", "loss")


def own(spec: str, options: Options) -> Subject:
    """What `my_module:build` or `path/to/file.py:build` returns; random numbers in it come from the seed."""
    function = _function(spec)
    with drawn_from(options.seed), theirs(f"--from: '{spec}'"):
        made = function()
    if isinstance(made, Objective):
        _refuse_settings(spec, options)
        objective = made
    else:
        objective = _objective(*_parts(spec, made), options)
    refuse_non_finite(objective.model, spec)
    with theirs(f"--from: the model on the batches, or the loss, of '{spec}'"):
        objective.value()
    about = {"data": f"the batches of {spec}"}
    return Subject(objective, type(objective.model).__name__, about, source=spec)


# ---------------------------------------------------------------- from a name to a function


def _function(spec: str) -> Callable[[], Any]:
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name.isidentifier()):
        refuse(f"--from: expected my_module:build or path/to/file.py:build, got {spec!r}")
    module = _file(place) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if function is None:
        near = get_close_matches(name, dir(module), 1)
        refuse(f"--from: '{place}' has no function {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    _refuse_arguments(spec, function)
    return function


def _module(name: str) -> ModuleType:
    """A module of that name, from here or from what is installed."""
    if not all(part.isidentifier() for part in name.split(".")):
        refuse(f"--from: expected my_module:build or path/to/file.py:build, got the module {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    with theirs(f"--from: importing '{name}'"):
        if not _there(name):
            refuse(f"--from: there is no module {name!r} in '{Path.cwd()}' or among the installed ones")
        return importlib.import_module(name)


def _there(name: str) -> bool:
    """Packages around it are imported to find out."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as problem:
        if not name.startswith(problem.name or ""):
            raise
        return False
    except ValueError:
        return name in sys.modules


def _file(place: str) -> ModuleType:
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        refuse(f"--from: there is no file '{place}'")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    with theirs(f"--from: importing '{place}'"):
        spec.loader.exec_module(module)
    return module


def _refuse_arguments(spec: str, function: object) -> None:
    if not callable(function):
        refuse(f"--from: '{spec}' is no function but {type(function).__name__}; expected one that returns {EXPECTED}")
    if inspect.iscoroutinefunction(function):
        refuse(f"--from: '{spec}' is async; expected a plain function that returns {EXPECTED}")
    try:
        inspect.signature(function).bind()
    except TypeError:
        refuse(f"--from: '{spec}' takes arguments; expected a function that is called without any")


# ---------------------------------------------------------------- from what it returns to an objective


def _parts(spec: str, made: object) -> tuple[nn.Module, Any, Any]:
    if isinstance(made, Mapping) and {*KEYS[:2]} <= {*made} <= {*KEYS}:
        given = cast("Mapping[str, Any]", made)
        made = tuple(given.get(key) for key in KEYS)
    if not isinstance(made, (tuple, list)) or len(cast("list[Any]", made)) != 3:
        refuse(f"--from: '{spec}' returned {_described(made)}; expected {EXPECTED}")
    model, batches, loss = cast("list[Any]", made)
    if not isinstance(model, nn.Module):
        refuse(f"--from: '{spec}' returned {type(model).__name__} as the model; expected a torch.nn.Module")
    return model, batches, loss


def _described(made: object) -> str:
    if isinstance(made, Mapping):
        return f"a dict with {', '.join(map(repr, cast('Mapping[str, Any]', made))) or 'nothing in it'}"
    if isinstance(made, (tuple, list)):
        return f"a {type(cast('object', made)).__name__} of {len(cast('list[Any]', made))}"
    return "nothing" if made is None else type(made).__name__


def _objective(model: nn.Module, batches: Any, loss: Any, options: Options) -> Objective:
    """Without a loss it is a Hugging Face model, whose own loss is known."""
    model = model.to(device=options.device, dtype=options.dtype)
    batches = batches if options.dtype is None else Cast(batches, options.dtype)
    settings: dict[str, Any] = {"params": chosen(model, options.params), "memory": options.memory}
    if loss is None:
        return Objective.from_hf(model, batches, **settings)
    if isinstance(loss, nn.Module):
        loss.to(device=options.device, dtype=options.dtype)
    return Objective(model, batches, loss, **settings)


def _refuse_settings(spec: str, options: Options) -> None:
    for name in ("dtype", "device", "memory", "params"):
        if getattr(options, name) is not None:
            refuse(
                f"--{name} does not go with '{spec}', which returns an ev.Objective that is made already; set it there"
            )


class Cast:
    """Batches whose floating-point tensors have the dtype of the model."""

    def __init__(self, source: Iterable[Any], dtype: torch.dtype) -> None:
        self.source, self.dtype = source, dtype

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source:
            yield tree_map(self._cast, batch)

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
