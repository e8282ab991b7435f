"""What one slice of a sum of Kronecker terms is computed in, and how."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PAD = 8  # entries between two rows of a product: rows at a power of two would share few lines of the cache
FEW = 0.75  # of the tokens; gathering them pays below that
Factors = tuple[Tensor, Tensor]


class Work:
    """Memory that every slice uses again: fresh pages cost more than what is computed in them. One thread has one."""

    def __init__(self) -> None:
        self._kept = dict[str, Tensor]()

    def product(self, factors: list[Factors], col: Tensor, tokens: Tensor | None, u: slice, es: int) -> Tensor:
        """Σ_t col[t, c] Z_u[t, e, v], (U, c, e, v)."""
        z = None
        for own, shared in factors:
            a, b = own[u, :, :es], shared[:, :es]
            if tokens is not None:
                here = torch.arange(len(a), device=a.device)[:, None]
                a, b = a[here, tokens], self._gathered(b, tokens)
            if z is None:
                z = torch.mul(a, b, out=self.room("z", a, torch.broadcast_shapes(a.shape, b.shape)))
            else:
                z.addcmul_(a, b)
        assert z is not None
        left = (col.expand(len(z), -1, -1) if tokens is None else col[tokens]).mT
        room = self.room("out", z, (len(z), left.shape[1], z.shape[2] * z.shape[3] + PAD))
        out = torch.bmm(left, z.flatten(2), out=room[..., :-PAD])
        return out.unflatten(2, z.shape[2:])

    def _gathered(self, shared: Tensor, tokens: Tensor) -> Tensor:
        room = self.room("b", shared, (tokens.numel(), *shared.shape[1:]))
        return torch.index_select(shared, 0, tokens.flatten(), out=room).unflatten(0, tokens.shape)

    def room(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        return self._kept.setdefault(name, like.new_empty(0)).resize_(tuple(shape))
