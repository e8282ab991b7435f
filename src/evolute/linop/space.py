"""A space is an ordered list of named tensors laid out in one flat vector; groups name pieces of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from evolute.errors import UnknownGroupError, VectorError


@dataclass(frozen=True)
class Part:
    """A whole named tensor, or the slice [start, stop) of it along one dimension (one of Q, K, V in a packed weight).

    >>> Part("attn.in_proj_weight", 0, 0, 64).label
    'attn.in_proj_weight[0:64]'
    """

    name: str
    dim: int = 0
    start: int | None = None
    stop: int | None = None

    @property
    def whole(self) -> bool:
        return self.start is None and self.stop is None

    @property
    def label(self) -> str:
        if self.whole:
            return self.name
        return f"{self.name}[{':, ' * self.dim}{self.start or 0}:{'' if self.stop is None else self.stop}]"

    def of(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """The piece itself, as a view; `lead` axes come before the tensor's own."""
        if self.whole:
            return tensor
        return tensor[(slice(None),) * (lead + self.dim) + (slice(self.start, self.stop),)]

    def shape(self, shape: Sequence[int]) -> torch.Size:
        if self.whole:
            return torch.Size(shape)
        if not 0 <= self.dim < len(shape):
            raise UnknownGroupError(f"{self.label}: no dimension {self.dim} in '{self.name}' of shape {tuple(shape)}.")
        length = len(range(shape[self.dim])[self.start : self.stop])
        return torch.Size((*shape[: self.dim], length, *shape[self.dim + 1 :]))


Group = tuple[Part, ...]
Select = str | Part | Iterable["str | Part"]


@dataclass(frozen=True)
class Space:
    """ℝ^P as named tensors: `shapes` in the order in which they are flattened, `groups` as named sets of parts.

    >>> space = Space({"w": (2, 3), "b": (3,)})
    >>> space.size, space.unflatten(torch.arange(9.0))["b"].tolist()
    (9, [6.0, 7.0, 8.0])
    """

    shapes: Mapping[str, Sequence[int]]
    groups: Mapping[str, Group] = field(default_factory=dict[str, Group])
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(shape) for shape in self.shapes.values())

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    def offsets(self) -> dict[str, int]:
        starts, total = dict[str, int](), 0
        for name, size in zip(self.shapes, self.sizes, strict=True):
            starts[name], total = total, total + size
        return starts

    def views(self, vector: Tensor) -> list[Tensor]:
        """(..., P) → one view (..., *shape) for each name, in order."""
        lead = vector.shape[:-1]
        pieces = vector.split(list(self.sizes), dim=-1)
        return [piece.view((*lead, *shape)) for piece, shape in zip(pieces, self.shapes.values(), strict=True)]

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """(..., P) → name → (..., *shape), as views."""
        return dict(zip(self.shapes, self.views(vector), strict=True))

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Name → tensor, to the flat vector (P,); every name must be there with its own shape."""
        self._check_names(tensors)
        for name, shape in self.shapes.items():
            if not isinstance(tensors[name], Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise VectorError(f"'{name}': expected a tensor, got {type(tensors[name]).__name__}.")
            if tuple(tensors[name].shape) != tuple(shape):
                raise VectorError(f"'{name}': expected shape {tuple(shape)}, got {tuple(tensors[name].shape)}.")
            self._check_kind(name, tensors[name])
        return torch.cat([tensors[name].reshape(-1) for name in self.shapes])

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        unknown = [name for name in tensors if name not in self.shapes]
        if unknown:
            raise VectorError(f"unknown name {unknown[0]!r}{_near(unknown[0], self.shapes)}.")
        missing = [name for name in self.shapes if name not in tensors]
        if missing:
            raise VectorError(f"{len(missing)} names are missing, '{missing[0]}' first; a vector names every tensor.")

    def _check_kind(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise VectorError(f"'{name}': expected a tensor on {self.device}, got {tensor.device}; use .to(H.device).")
        if not tensor.is_floating_point():
            raise VectorError(f"'{name}': expected {self.dtype}, got {tensor.dtype}; use .to(H.dtype).")

    def resolve(self, select: Select) -> Selection:
        """Groups, parameter names or parts → the selection of their entries, each at most once."""
        items = (select,) if isinstance(select, (str, Part)) or not isinstance(select, Iterable) else tuple(select)  # pyright: ignore
        parts = [part for item in items for part in self._parts(item)]
        if not parts:
            raise UnknownGroupError("an empty selection: name at least one group or parameter.")
        return Selection(self, tuple(dict.fromkeys(parts)))

    def _parts(self, item: str | Part) -> Iterator[Part]:
        if not isinstance(item, (str, Part)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UnknownGroupError(f"expected names of groups or parameters, or ev.Part, got {type(item).__name__}.")
        if isinstance(item, Part):
            yield from self._parts(item.name) if item.whole else (self._known(item),)
        elif item in self.groups:
            yield from self.groups[item]
        elif item in self.shapes:
            yield Part(item)
        else:
            below = [name for name in self.groups if name.startswith(item + ".")]
            if not below:
                raise UnknownGroupError(f"no group or parameter {item!r}{_near(item, [*self.groups, *self.shapes])}.")
            for name in below:
                yield from self.groups[name]

    def _known(self, part: Part) -> Part:
        if part.name not in self.shapes:
            raise UnknownGroupError(f"no parameter {part.name!r}{_near(part.name, self.shapes)}.")
        return part


@dataclass(frozen=True)
class Selection:
    """Some entries of a space, in the order they were named; `take` and `put` are adjoint to one another."""

    parent: Space
    parts: Group

    def __post_init__(self) -> None:
        for part in self.parts:
            part.shape(self.parent.shapes[part.name])  # refuses a dimension that is not there
        slices = [part for part in self.parts if not part.whole]
        names = [part.name for part in self.parts]
        clash = [part for part in slices if names.count(part.name) > 1 and self._overlaps(part)]
        if clash:
            raise UnknownGroupError(f"{clash[0].label} is selected twice; name each entry once.")

    def _overlaps(self, part: Part) -> bool:
        size = prod(self.parent.shapes[part.name])
        mark = torch.zeros(size, dtype=torch.int8).view(*self.parent.shapes[part.name])
        for other in self.parts:
            if other.name == part.name:
                other.of(mark).add_(1)
        return bool((mark > 1).any())

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {part.label: part.shape(self.parent.shapes[part.name]) for part in self.parts}

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def space(self) -> Space:
        """The selected entries as a space of their own; groups that lie wholly inside keep their names."""
        here = set(self.parts)
        inside = {
            name: tuple(Part(part.label) for part in parts)
            for name, parts in self.parent.groups.items()
            if parts and all(part in here for part in parts)
        }
        return Space(self.shapes, inside, self.parent.dtype, self.parent.device)

    def smallest(self) -> Selection:
        """The same entries of the smallest space that holds them: only the tensors that are touched."""
        touched = {part.name for part in self.parts}
        shapes = {name: shape for name, shape in self.parent.shapes.items() if name in touched}
        return Selection(Space(shapes, {}, self.parent.dtype, self.parent.device), self.parts)

    def take(self, vector: Tensor) -> Tensor:
        """(..., P) → (..., p), the selected entries."""
        lead = vector.shape[:-1]
        full = self.parent.unflatten(vector)
        sizes = [prod(shape) for shape in self.shapes.values()]
        named = zip(self.parts, sizes, strict=True)
        pieces = [part.of(full[part.name], len(lead)).reshape(*lead, size) for part, size in named]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def put(self, vector: Tensor) -> Tensor:
        """(..., p) → (..., P), zero elsewhere."""
        lead = vector.shape[:-1]
        out = vector.new_zeros((*lead, self.parent.size))
        full, start = self.parent.unflatten(out), 0
        for part, shape in zip(self.parts, self.shapes.values(), strict=True):
            size = prod(shape)
            part.of(full[part.name], len(lead)).copy_(vector[..., start : start + size].view((*lead, *shape)))
            start += size
        return out


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; near matches: {', '.join(map(repr, matches))}" if matches else f"; there are {_few(list(known))}"


def _few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
