"""How much memory there is, before asking for it."""

from __future__ import annotations

import mmap
from contextlib import suppress

import psutil
import torch

from evolute.errors import TooLargeError

HUGE = 1 << 25  # bytes from which on a matrix has pages of its own


def available(device: torch.device) -> int:
    """Bytes that can be allocated on the device now, without swapping."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return int(psutil.virtual_memory().available)


def human(count: float) -> str:
    """Bytes in words: 34 GB reads better than 34359738368.

    >>> human(34_359_738_368)
    '34.4 GB'
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def require(count: int, device: torch.device, what: str, instead: str) -> None:
    """Refuse a request larger than what is free, with what to do instead."""
    free = available(device)
    if count > free:
        raise TooLargeError(f"{what} needs {human(count)}; {human(free)} are free on {device}. {instead}")


def fresh(m: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zero m×n matrix; a large one in huge pages, where the system has them.

    Of small pages, the first touch of each costs more than the entries that are written there.
    """
    size = m * n * torch.empty((), dtype=dtype).element_size()
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(m, n, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them gives small pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(m, n)
