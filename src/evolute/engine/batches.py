"""The data of an objective: iterable again and again, and the same each time."""

from __future__ import annotations

import hashlib
import pickle  # to hash what it writes, never to load
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from evolute.errors import DataChangedError, DataError


class Batches:
    """Re-iterable batches with a fingerprint of each, so that a pass over other data is noticed and named."""

    def __init__(self, source: Iterable[Any], device: torch.device) -> None:
        _check_source(source)
        self.source, self.device = source, device
        self.prints: list[bytes] | None = None

    def __iter__(self) -> Generator[tuple[int, Any]]:
        seen: list[bytes] = []
        for index, batch in enumerate(self.source):
            seen.append(fingerprint(batch))
            self._compare(index, seen[-1])
            yield index, _to_device(batch, self.device)
        if not seen and self.prints:
            raise DataChangedError(
                f"this pass had no batch, the first had {len(self.prints)}: the source ran dry. {_REMEDY}"
            )
        if not seen:
            raise DataError("expected at least one batch, got an empty iterable; is the data set smaller than a batch?")
        if self.prints is not None and len(seen) != len(self.prints):
            raise DataChangedError(f"this pass had {len(seen)} batches, the first had {len(self.prints)}. {_REMEDY}")
        self.prints = seen

    def _compare(self, index: int, digest: bytes) -> None:
        if self.prints is None or (index < len(self.prints) and self.prints[index] == digest):
            return
        if digest in self.prints:
            what = f"batch {index} came as batch {self.prints.index(digest)} in the first pass: the order changes"
        else:
            what = f"batch {index} is not what it was in the first pass: shuffling or random augmentation"
        raise DataChangedError(f"{what}. {_REMEDY}")

    def digest(self) -> str:
        """One fingerprint of all the data; empty before the first pass."""
        return hashlib.blake2b(b"".join(self.prints or []), digest_size=16).hexdigest() if self.prints else ""


_REMEDY = "Use shuffle=False and fixed augmentation, or freeze the data once: Objective(model, list(loader), loss)."


def _check_source(source: Any) -> None:
    if isinstance(source, (Tensor, Mapping, str)):
        raise DataError(
            f"expected an iterable of batches, got one {type(source).__name__}; a single batch goes in a list: [batch]."
        )
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise DataError(f"expected an iterable of batches, got {type(source).__name__}.")
    if isinstance(source, Iterator):
        raise DataError(
            f"expected batches that can be iterated again, got a one-shot {type(source).__name__}; pass list(batches)."
        )
    if isinstance(source, tuple) and len(source) == 2 and all(isinstance(each, Tensor) for each in source):
        raise DataError("expected an iterable of batches, got one pair (x, y); for a single batch pass [(x, y)].")


def fingerprint(batch: Any) -> bytes:
    """A hash of the bytes of every tensor, and of every plain value, in the batch."""
    hasher = hashlib.blake2b(digest_size=16)
    leaves, spec = tree_flatten(_plain(batch))
    hasher.update(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            hasher.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            hasher.update(memoryview(_bytes(leaf)))
        else:
            hasher.update(_other(leaf))
    return hasher.digest()


def _bytes(tensor: Tensor) -> Any:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _other(leaf: Any) -> bytes:
    """NumPy arrays, dataclasses and the like; what cannot be pickled counts by its type only."""
    try:
        return pickle.dumps(leaf)
    except Exception:  # pickling runs the object's own code, which may raise anything
        return type(leaf).__name__.encode()


def _plain(batch: Any) -> Any:
    """Dict-like batches (Hugging Face's BatchEncoding) as dicts, which pytrees understand."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch  # pyright: ignore


def _to_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: _placed(leaf, device) if isinstance(leaf, Tensor) else leaf, _plain(batch))


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; a tensor made in inference mode is copied, since autograd cannot save it."""
    return (tensor.clone() if tensor.is_inference() else tensor).to(device)
