"""Random vectors: from a generator of the caller's, else from one of our own; never from the global one."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from evolute.errors import VectorError


def stream(generator: torch.Generator | None) -> torch.Generator:
    """The generator itself; without one, a new one with seed 0, so that the same call gives the same answer.

    >>> stream(None).initial_seed()
    0
    """
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(
            f"generator: expected a torch.Generator, got {type(generator).__name__}; "
            "for a seed pass torch.Generator().manual_seed(seed)."
        )
    return generator


def fingerprint(generator: torch.Generator) -> str:
    """Which numbers come next: equal for two generators that will draw the same."""
    state = bytes(generator.get_state().numpy())
    return hashlib.blake2b(state, digest_size=8).hexdigest()


def normal(count: int, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Rows of N(0, I): their directions are uniform, so a few of them meet every eigenvector."""
    draw = torch.randn((count, n), generator=generator, device=generator.device, dtype=like.dtype)
    return draw.to(like.device)


def sphere(count: int, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Rows of uniform direction and of length √n: E v vᵀ = I."""
    rows = normal(count, n, generator, like)
    return rows.mul_(n**0.5 / torch.linalg.vector_norm(rows, dim=1, keepdim=True))


def signs(count: int, n: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Rows of ±1 (Rademacher): E v vᵀ = I, and v_i² = 1 always, so a diagonal matrix is seen exactly."""
    draw = torch.randint(0, 2, (count, n), generator=generator, device=generator.device, dtype=torch.int8)
    return draw.to(like.device, like.dtype).mul_(2).sub_(1)
