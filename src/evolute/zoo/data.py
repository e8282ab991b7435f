"""Data as two tensors, inputs and targets: the same batches in every pass, and a fingerprint that says which data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from evolute.errors import DataError

IGNORED = -100  # the target that is no term of the loss, as everywhere in torch
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs x and targets y, sample i at x[i] and y[i].

    >>> samples = Samples(torch.arange(5), torch.arange(5))
    >>> [x.tolist() for x, _ in samples.batches(2)]
    [[0, 1], [2, 3], [4]]
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"expected one target per input, got {len(self.x)} inputs and {len(self.y)} targets.")

    def __len__(self) -> int:
        return len(self.x)

    def batches(self, size: int) -> list[Batch]:
        """All samples in order, as views: a list, so that every pass is the same. The last batch may be smaller."""
        if size < 1:
            raise DataError(f"expected batches of at least one sample, got size {size}.")
        return list(zip(self.x.split(size), self.y.split(size), strict=True))

    def first(self, count: int) -> Samples:
        """The first `count` samples."""
        if not 1 <= count <= len(self):
            raise DataError(f"expected between 1 and {len(self)} samples, got {count}.")
        return Samples(self.x[:count], self.y[:count])


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named task: samples to train on, samples to test on, and what each output stands for.

    `batches` are those of the training samples. `name` and `fingerprint` are for provenance: two data sets with one
    fingerprint are the same bit by bit.

    >>> samples = Samples(torch.tensor([[0, 1]]), torch.tensor([[1, 1]]))
    >>> data = Dataset("example", samples, samples, labels=("a", "b"))
    >>> data, data.vocabulary, data.decode(data.train.x[0])
    (Dataset('example', 1 to train, 1 to test, 2 labels), 2, 'ab')
    """

    name: str
    train: Samples
    test: Samples
    labels: tuple[str, ...]

    def batches(self, size: int) -> list[Batch]:
        return self.train.batches(size)

    def first(self, count: int) -> Dataset:
        """With the first `count` training samples only."""
        return replace(self, name=f"{self.name}[:{count}]", train=self.train.first(count))

    @property
    def vocabulary(self) -> int:
        """How many symbols there are, of text."""
        return len(self.labels)

    @property
    def classes(self) -> int:
        """How many classes there are, of images."""
        return len(self.labels)

    @property
    def length(self) -> int:
        """Tokens per sample, of text."""
        return self.train.x.shape[1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every tensor and label."""
        tensors = (self.train.x, self.train.y, self.test.x, self.test.y)
        return _digest([repr(self.labels).encode(), *(part for each in tensors for part in _bytes(each))])

    def decode(self, tokens: Tensor) -> str:
        """The text of a row of tokens; targets that are left out are spaces."""
        return "".join(" " if index == IGNORED else self.labels[index] for index in tokens.tolist())

    def __repr__(self) -> str:
        sizes = f"{len(self.train):,} to train, {len(self.test):,} to test, {len(self.labels)} labels"
        return f"Dataset({self.name!r}, {sizes})"


def shuffled(samples: Samples, seed: int) -> Samples:
    """In an order that the seed decides."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    return Samples(samples.x[order], samples.y[order])


def split(samples: Samples, test: float) -> tuple[Samples, Samples]:
    """All but the last, and the last `test` of the samples: at least one on either side."""
    if not 0 < test < 1 or len(samples) < 2:
        raise DataError(f"expected 0 < test < 1 and two samples or more, got test={test} of {len(samples)} samples.")
    kept = min(max(1, round(len(samples) * (1 - test))), len(samples) - 1)
    return Samples(samples.x[:kept], samples.y[:kept]), Samples(samples.x[kept:], samples.y[kept:])


def _bytes(tensor: Tensor) -> tuple[bytes, Any]:
    described = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return described, tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _digest(pieces: Iterable[Any]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()
