"""Self-attention with its four weights apart: F_t = Σ_s A_ts v_s, A = softmax(q kᵀ/√d_K) or another map of the scores.

Shapes: B samples, L tokens, H heads of d_K features; x is (B, L, d), scores are (B, H, L, L).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolute.errors import DataError
from evolute.zoo.config import BlockConfig

# what becomes of the scores where there is no softmax
SCORE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda scores: scores,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
}


class Attention(nn.Module):
    """concat_h(A_h x W_V^h) W_O, with A_h a map of x W_Q^h (x W_K^h)ᵀ/√d_K.

    >>> attention = Attention(BlockConfig(width=4, heads=2))
    >>> attention(torch.ones(1, 3, 4)).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        d, bias = config.width, config.bias
        self.config = config
        self.q = nn.Linear(d, d, bias=bias)
        self.k = nn.Linear(d, d, bias=bias)
        self.v = nn.Linear(d, d, bias=bias)
        self.o = nn.Linear(d, d, bias=bias) if config.output else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self._heads(tap(x)) for tap in (self.q, self.k, self.v))
        offset = self._offset(x, mask)
        heads = self._softmax(q, k, v, offset) if self.config.attention == "softmax" else self._mapped(q, k, v, offset)
        joined = heads.transpose(1, 2).flatten(2)  # (B, H, L, d_K) → (B, L, d)
        return joined if self.o is None else self.o(joined)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.heads, -1)).transpose(1, 2)  # (B, L, d) → (B, H, L, d_K)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, offset: Tensor | None) -> Tensor:
        alone = self.config.causal and offset is None  # is_causal and a mask exclude one another
        return F.scaled_dot_product_attention(q, k, v, attn_mask=offset, is_causal=alone)

    def _mapped(self, q: Tensor, k: Tensor, v: Tensor, offset: Tensor | None) -> Tensor:
        """A = f(scores), zero where masked, and not normalised: its rows need not sum to 1."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.config.head_width)
        offset = self._causal(q) if offset is None else offset
        hidden = torch.isneginf(offset)
        A = SCORE_MAPS[self.config.attention](scores + offset.masked_fill(hidden, 0.0))
        return A.masked_fill(hidden, 0.0) @ v

    # ---- what is added to the scores

    def _offset(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Mask, sink and causal order together, broadcasting to (B, H, L, L); None where causal order is all."""
        if mask is None and self.config.sink == 0.0:
            return None
        offset = self._causal(x)
        offset[:, 0] += self.config.sink
        return offset if mask is None else offset + _additive(mask, x)

    def _causal(self, x: Tensor) -> Tensor:
        """−∞ above the diagonal if tokens see the past only, else zeros."""
        L = x.shape[-2]
        square = x.new_full((L, L), -math.inf if self.config.causal else 0.0)
        return square.triu(1) if self.config.causal else square


def _additive(mask: Tensor, x: Tensor) -> Tensor:
    """A mask (L, L) that is added as it is; −∞ for the keys that a boolean mask (B, L) calls padding."""
    B, L, _ = x.shape
    if mask.dtype == torch.bool and mask.shape == (B, L):
        return torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -math.inf)[:, None, None, :]
    if mask.is_floating_point() and mask.shape == (L, L):
        return mask.to(x)
    raise DataError(
        f"expected a mask that is boolean of shape {(B, L)} (True: padding, not attended to), or floating-point of "
        f"shape {(L, L)} (added to the scores); got {mask.dtype} of shape {tuple(mask.shape)}."
    )
