"""Where a parameter is in a Transformer: which layer of which stack, found from its path alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from evolute.engine import groups_rules as rules

Path = tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """One parameter: its true name, the path of its module without wrappers, and the modules it lies in."""

    name: str
    path: Path
    adapter: str
    shape: tuple[int, ...]
    owners: tuple[nn.Module, ...]  # from the model down to the module that owns it
    multihead: int | None  # how many names of the path lead to its nn.MultiheadAttention, if it is in one

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def direct(self) -> bool:
        """Named by itself, like 'in_proj_weight' or 'cls_token', not by its module, like 'q_proj.weight'."""
        return not self.adapter and self.leaf not in ("weight", "bias") and "parametrizations" not in self.name

    @property
    def words(self) -> Path:
        """The names that say what it is."""
        if self.direct:
            return (*self.path, re.sub(r"_(weight|bias)$", "", self.leaf))
        return (*self.path, "in_proj") if self.adapter and self.multihead == len(self.path) else self.path

    @property
    def tail(self) -> str:
        return ".".join(self.words[-2:]).lower()

    @property
    def attends(self) -> bool:
        named = any(rules.ATTENTION.search(word.lower()) for word in self.words)
        return named or self.multihead is not None or rules.PROJECTION.fullmatch(self.tail) is not None


@dataclass(frozen=True)
class Place:
    """A parameter and the name of its layer ('layers.0', '' for a lone one) or, outside of layers, of its stack."""

    site: Site
    prefix: str
    rest: Path  # its module's path in the layer; outside of layers the whole path
    in_layer: bool
    transformer: bool  # there are layers with attention in the model


def places(model: nn.Module) -> list[Place]:
    """A place for every parameter, in order."""
    modules = dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))
    sites = [_site(modules, name, parameter) for name, parameter in model.named_parameters()]
    stacks = _stacks(sites)
    found = {site.name: _in_stack(site, stacks) for site in sites}
    lone = _lone_layers(modules, [site for site in sites if not found[site.name]])
    return [found[site.name] or _in_lone(site, lone) or _outside(site, stacks, bool(stacks or lone)) for site in sites]


def _site(modules: Mapping[str, nn.Module], name: str, parameter: Tensor) -> Site:
    names = name.split(".")[:-1]
    owners = tuple(modules[".".join(names[:depth])] for depth in range(len(names) + 1))
    plain = [getattr(owner, "base_layer", owner) for owner in owners]  # an adapter may be around an attention
    heads = [depth for depth, owner in enumerate(plain) if isinstance(owner, nn.MultiheadAttention)]
    path, adapter = clean(names)
    return Site(
        name, path, adapter, tuple(parameter.shape), owners, len(clean(names[: heads[0]])[0]) if heads else None
    )


def clean(names: list[str]) -> tuple[Path, str]:
    """A module's path without wrappers, and what an adapter adds to the name of the group."""
    kept = [name for name in names if name not in rules.WRAPPERS]
    kept = kept[1:] if kept[:1] == ["module"] else kept
    kept = kept[2:] if kept[:2] == ["base_model", "model"] else kept
    for index, name in enumerate(kept):
        if name == "modules_to_save":
            return (*kept[:index], *kept[index + 2 :]), ""
        if name == "parametrizations":
            return tuple(kept[:index]), ""
        if name in rules.ADAPTERS:
            return tuple(kept[:index]), ".".join(
                (rules.ADAPTERS[name], *(x for x in kept[index + 1 :] if x != "default"))
            )
    return tuple(kept), ""


def join(*names: str) -> str:
    return ".".join(name for name in names if name)


# ---------------------------------------------------------------- layers with numbers, in stacks


@dataclass(frozen=True)
class _Numbered:
    stack: Path
    index: Path
    rest: Path


@dataclass(frozen=True)
class _Stack:
    name: Path  # what tells it from the other stacks
    root: Path  # where it and its embeddings and last norm are
    levels: tuple[int, ...]  # which of its nested numbers tell layers apart


def _numbered(path: Path) -> _Numbered | None:
    """bert.encoder.layer.3.output.dense → stack bert.encoder.layer, index 3, rest output.dense."""
    for start in range(len(path) - 1):
        end = start
        # numbers may be nested: stages of blocks, groups of shared layers; but T5 has sublayers inside a block
        while _opens(path[end : end + 2]) and not (end > start and path[end] == "layer"):
            end += 2
        if end > start:
            return _Numbered(path[: start + 1], path[start + 1 : end : 2], path[end:])
    return None


def _opens(pair: Path) -> bool:
    return len(pair) == 2 and rules.CONTAINER.fullmatch(pair[0]) is not None and pair[1].isdigit()


def _stacks(sites: list[Site]) -> dict[Path, _Stack]:
    """The stacks of layers in which there is attention."""
    found = [(site, numbered) for site in sites if (numbered := _numbered(site.path))]
    paths = list(dict.fromkeys(numbered.stack for site, numbered in found if site.attends))
    indices = {path: {numbered.index for _, numbered in found if numbered.stack == path} for path in paths}
    names, lead = _distinct(paths)
    return {
        path: _Stack(name, (*path[:lead], *name), _levels(indices[path]))
        for path, name in zip(paths, names, strict=True)
    }


def _distinct(paths: list[Path]) -> tuple[list[Path], int]:
    """What tells the paths apart ('encoder' and 'decoder', towers; nothing for one), and where in them it begins."""
    if len(paths) < 2:
        return [()] * len(paths), 0
    lead = _common(paths)
    tail = min(_common([path[::-1] for path in paths]), min(map(len, paths)) - lead)
    names = [path[lead : len(path) - tail] for path in paths]
    short = [name[:-1] for name in names]
    return (short if tail == 0 and len({*short}) == len(short) else names), lead


def _common(paths: list[Path]) -> int:
    """How many names all the paths begin with."""
    columns = zip(*paths, strict=False)
    return next((depth for depth, names in enumerate(columns) if len({*names}) > 1), min(map(len, paths)))


def _levels(indices: set[Path]) -> tuple[int, ...]:
    """Of nested numbers those that tell layers apart, not those that are 0 everywhere (ALBERT's group 0, layer 0)."""
    depth = max(map(len, indices))
    several = [level for level in range(depth) if {index[level] for index in indices if level < len(index)} != {"0"}]
    return tuple(several) or (0,)


def _in_stack(site: Site, stacks: Mapping[Path, _Stack]) -> Place | None:
    numbered = _numbered(site.path)
    stack = stacks.get(numbered.stack) if numbered else None
    if not numbered or not stack:
        return None
    index = [numbered.index[level] for level in stack.levels if level < len(numbered.index)] or numbered.index[:1]
    return Place(site, join(*stack.name, "layers", *index), numbered.rest, in_layer=True, transformer=True)


# ---------------------------------------------------------------- layers by themselves, and what is outside of layers


def _lone_layers(modules: Mapping[str, nn.Module], sites: list[Site]) -> list[Path]:
    """Modules called …Layer or …Block with attention inside; the outermost where one lies in another."""
    found = list[Path]()
    for name, module in modules.items():
        path = clean(name.split("."))[0] if name else ()
        attends = any(site.attends and site.path[: len(path)] == path for site in sites)
        if attends and rules.LAYER_CLASS.search(type(module).__name__) and not _inside(path, found):
            found.append(path)
    return found


def _inside(path: Path, roots: Iterable[Path]) -> Path | None:
    """The longest of the roots that the path begins with."""
    return max((root for root in roots if path[: len(root)] == root), key=len, default=None)


def _in_lone(site: Site, lone: list[Path]) -> Place | None:
    root = _inside(site.path, lone)
    return None if root is None else Place(site, join(*root), site.path[len(root) :], in_layer=True, transformer=True)


def _outside(site: Site, stacks: Mapping[Path, _Stack], transformer: bool) -> Place:
    names = {stack.root: stack.name for stack in stacks.values() if stack.name}
    root = _inside(site.path, names)
    return Place(site, join(*names[root]) if root else "", site.path, in_layer=False, transformer=transformer)
