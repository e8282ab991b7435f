"""Language models without attention: the blocks of a pre-norm Transformer, with a recurrence where attention was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from torch import Tensor, nn

from evolute.errors import DataError, ModelError
from evolute.zoo.block import FeedForward, make_norm
from evolute.zoo.config import BlockConfig, BlockOptions, block_config, check_count
from evolute.zoo.linear_recurrence import LinearRecurrence
from evolute.zoo.seeding import drawn_from
from evolute.zoo.selective_scan import SelectiveScan

KEPT = ("hidden", "norm_kind", "eps", "activation", "gated", "bias")  # options that a block without attention has


class RecurrentBlock(nn.Module):
    """y = x + mixer(norm1(x)), z = y + mlp(norm2(y)); of the config, what is about attention plays no part.

    >>> import torch
    >>> RecurrentBlock(SelectiveScan(8), BlockConfig(width=8))(torch.ones(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, mixer: nn.Module, config: BlockConfig) -> None:
        super().__init__()
        self.mixer = mixer
        self.mlp = FeedForward(config)
        self.norm1, self.norm2 = make_norm(config), make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mixer(self.norm1(x))
        return y + self.mlp(self.norm2(y))


class _Recurrent(nn.Module):
    """Tokens (B, L) ↦ logits (B, L, V): embed, blocks, norm, unembed; the order of tokens is known by recurrence."""

    def __init__(
        self,
        mixer: Callable[[], nn.Module],
        vocabulary: int,
        width: int,
        layers: int,
        seed: int | None,
        options: BlockOptions,
    ) -> None:
        super().__init__()
        check_count("vocabulary", vocabulary)
        check_count("layers", layers)
        self.config = block_config(width, 1, {"norm": "pre", "activation": "gelu", "causal": True}, _kept(options))
        with drawn_from(seed):
            self.embed = nn.Embedding(vocabulary, width)
            nn.init.normal_(self.embed.weight, std=width**-0.5)
            self.layers = nn.ModuleList(RecurrentBlock(mixer(), self.config) for _ in range(layers))
            self.norm = make_norm(self.config)
            self.unembed = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2 or not tokens.shape[1]:
            raise DataError(f"expected tokens (B, L) with L ≥ 1, got shape {tuple(tokens.shape)}.")
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x))


class StateSpace(_Recurrent):
    """Tokens (B, L) ↦ logits (B, L, V) by selective scans, as in Mamba; any length, no positions.

    Options are those of a block without attention: `hidden`, `norm_kind`, `eps`, `activation`, `gated`, `bias`.

    >>> import torch
    >>> model = StateSpace(vocabulary=12, width=16, layers=2, states=4, seed=0)
    >>> model(torch.zeros(3, 17, dtype=torch.long)).shape
    torch.Size([3, 17, 12])
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int = 1,
        *,
        states: int = 8,
        seed: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__(lambda: SelectiveScan(width, states), vocabulary, width, layers, seed, options)


class LinearRecurrent(_Recurrent):
    """Tokens (B, L) ↦ logits (B, L, V) by fading means, as in RWKV; any length, no positions.

    Options are those of a block without attention: `hidden`, `norm_kind`, `eps`, `activation`, `gated`, `bias`.

    >>> import torch
    >>> model = LinearRecurrent(vocabulary=12, width=16, layers=2, seed=0)
    >>> model(torch.zeros(3, 17, dtype=torch.long)).shape
    torch.Size([3, 17, 12])
    """

    def __init__(
        self, vocabulary: int, width: int, layers: int = 1, *, seed: int | None = None, **options: Unpack[BlockOptions]
    ) -> None:
        super().__init__(lambda: LinearRecurrence(width), vocabulary, width, layers, seed, options)


def _kept(options: BlockOptions) -> BlockOptions:
    for name in options:
        if name not in KEPT and name in BlockOptions.__annotations__:
            raise ModelError(f"a block without attention has no option {name!r}; it takes {', '.join(KEPT)}.")
    return options
