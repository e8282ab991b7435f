"""A Transformer block that reads like its equations; closed forms find its weights by the names they have here."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from evolute.zoo.activations import ACTIVATIONS
from evolute.zoo.attention import Attention
from evolute.zoo.config import BlockConfig

__all__ = ["Attention", "Block", "BlockConfig", "FeedForward", "make_norm"]


class FeedForward(nn.Module):
    """φ(y W_1) W_2, or (φ(y W_gate) ⊙ y W_1) W_2 where it is gated.

    >>> import torch
    >>> FeedForward(BlockConfig(width=4, gated=True))(torch.ones(1, 3, 4)).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        d, h, bias = config.width, config.hidden_width, config.bias
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(d, h, bias=bias)
        self.gate = nn.Linear(d, h, bias=bias) if config.gated else None
        self.down = nn.Linear(h, d, bias=bias)

    def forward(self, y: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(y)))
        return self.down(self.activation(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """y = norm1(x + attn(x)), z = norm2(y + mlp(y)); pre-norm: y = x + attn(norm1(x)), z = y + mlp(norm2(y)).

    Weights are at `.attn.q`, `.k`, `.v`, `.o`, `.mlp.up`, `.gate`, `.down`, `.norm1`, `.norm2`; what the config leaves
    out is None. A boolean mask (B, L) is True at padding; a floating-point mask (L, L) is added to the scores.

    >>> import torch
    >>> block = Block(BlockConfig(width=8, heads=2, norm="pre", causal=True))
    >>> block(torch.ones(2, 5, 8)).shape, block.attn.q
    (torch.Size([2, 5, 8]), Linear(in_features=8, out_features=8, bias=False))
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.attn = Attention(config)
        self.mlp = FeedForward(config) if config.mlp else None
        self.norm1 = _norm(config)
        self.norm2 = _norm(config) if config.mlp else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self._sublayer(x, lambda x: self.attn(x, mask), self.norm1)
        return y if self.mlp is None else self._sublayer(y, self.mlp, self.norm2)

    def _sublayer(self, x: Tensor, f: Callable[[Tensor], Tensor], norm: nn.Module | None) -> Tensor:
        before, after = (norm, None) if self.config.norm == "pre" else (None, norm)
        out = f(x if before is None else before(x))
        out = x + out if self.config.residual else out
        return out if after is None else after(out)


def make_norm(config: BlockConfig) -> nn.LayerNorm | nn.RMSNorm:
    """The normalisation that the config names, whether or not its blocks have one."""
    kind = nn.LayerNorm if config.norm_kind == "layer" else nn.RMSNorm
    return kind(config.width, eps=config.eps)


def _norm(config: BlockConfig) -> nn.LayerNorm | nn.RMSNorm | None:
    return None if config.norm == "none" else make_norm(config)
