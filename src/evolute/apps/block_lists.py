"""The blocks of a model, one after the other: found as the list of modules of one class, or named by the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn

from evolute.errors import ModelError

Blocks = str | Sequence[nn.Module]
HOW = "Name the list of blocks, blocks='encoder.layers', or hand in the modules, blocks=[model.first, model.second]."


def blocks_of(model: nn.Module, blocks: Blocks | None = None) -> dict[str, nn.Module]:
    """Name → block, in order.

    >>> from evolute.zoo import GPT
    >>> list(blocks_of(GPT(12, 5, 8, layers=2)))
    ['layers.0', 'layers.1']
    """
    if blocks is None:
        return _listed(model, _only(model))
    if isinstance(blocks, str):
        return _listed(model, blocks)
    return _given(model, blocks)


def _only(model: nn.Module) -> str:
    """The name of the one list of blocks; lists inside of a block of another list do not count."""
    found = list[str]()
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and isinstance(module, nn.ModuleList) and _alike(module):
            found.append(name)
    if len(found) == 1:
        return found[0]
    what = f"several lists of blocks ({', '.join(found)})" if found else "no list of blocks (nn.ModuleList)"
    raise ModelError(f"{type(model).__name__} has {what}. {HOW}")


def _alike(modules: nn.ModuleList) -> bool:
    """Of one class, and with parameters."""
    kinds = {type(module) for module in modules}
    return len(kinds) == 1 and all(any(True for _ in module.parameters()) for module in modules)


def _listed(model: nn.Module, path: str) -> dict[str, nn.Module]:
    try:
        outer = model.get_submodule(path)
    except AttributeError as error:
        raise ModelError(f"blocks: {type(model).__name__} has no module '{path}'. {HOW}") from error
    inner = dict(outer.named_children())
    if not inner:
        raise ModelError(f"blocks: '{path}' is a {type(outer).__name__} with no modules inside. {HOW}")
    return {f"{path}.{name}" if path else name: module for name, module in inner.items()}


def _given(model: nn.Module, blocks: Sequence[object]) -> dict[str, nn.Module]:
    names = {id(module): name for name, module in model.named_modules()}
    strange = [block for block in blocks if id(block) not in names]
    if strange or not blocks:
        got = type(strange[0]).__name__ if strange else "none"
        raise ModelError(f"blocks: expected modules of the {type(model).__name__}, got {got}. {HOW}")
    return {names[id(block)]: cast("nn.Module", block) for block in blocks}
