"""Small models made of blocks: a multilayer perceptron, attention alone, GPT, ViT.

Shapes: B samples, L tokens, d features, V symbols of a vocabulary; images are (B, channels, height, width).
Every model takes a `seed` for its first weights; without one they come from the global generator, as in torch.nn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from evolute.errors import DataError, ModelError
from evolute.zoo.activations import ACTIVATIONS
from evolute.zoo.block import Block, make_norm
from evolute.zoo.config import BlockConfig, BlockOptions, block_config, check_choice, check_count
from evolute.zoo.seeding import drawn_from


class MLP(nn.Module):
    """φ(… φ(x W_1 + b_1) …) W_n + b_n over vectors; what has more axes, such as images, is flattened first.

    >>> import torch
    >>> MLP([64, 16, 10], seed=0)(torch.ones(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self, sizes: Sequence[int], activation: str = "gelu", *, bias: bool = True, seed: int | None = None
    ) -> None:
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        if len(sizes) < 2:
            raise ModelError(f"sizes are those of the input, of hidden layers and of the output; got {list(sizes)}.")
        for size in sizes:
            check_count("each of sizes", size)
        self.activation = ACTIVATIONS[activation]
        with drawn_from(seed):
            self.layers = nn.ModuleList(nn.Linear(rows, columns, bias=bias) for rows, columns in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class AttentionOnly(nn.Module):
    """x ↦ A(x) x W_V, layer after layer, on real vectors (B, L, d): the self-attention that theory speaks of.

    No feed-forward, no normalisation, no residual, no W_O, unless options ask for them.

    >>> import torch
    >>> model = AttentionOnly(width=4, layers=2, attention="linear", seed=0)
    >>> model(torch.ones(2, 5, 4)).shape, len(list(model.parameters()))
    (torch.Size([2, 5, 4]), 6)
    """

    def __init__(
        self, width: int, heads: int = 1, layers: int = 1, *, seed: int | None = None, **options: Unpack[BlockOptions]
    ) -> None:
        super().__init__()
        plain: BlockOptions = {"mlp": False, "norm": "none", "residual": False, "output": False}
        self.config = block_config(width, heads, plain, options)
        with drawn_from(seed):
            self.layers = _blocks(self.config, layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


class GPT(nn.Module):
    """Tokens (B, L) ↦ logits (B, L, V) of the next token: embed + position, causal blocks, norm, unembed.

    Pre-norm with GELU unless options say otherwise; the last norm is there for pre-norm only. `tied` makes the
    unembedding the embedding itself.

    >>> import torch
    >>> model = GPT(vocabulary=12, length=17, width=16, heads=2, layers=2, seed=0)
    >>> model(torch.zeros(3, 17, dtype=torch.long)).shape
    torch.Size([3, 17, 12])
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        heads: int = 1,
        layers: int = 1,
        *,
        tied: bool = False,
        seed: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        for name, value in {"vocabulary": vocabulary, "length": length}.items():
            check_count(name, value)
        self.config = block_config(width, heads, {"norm": "pre", "activation": "gelu", "causal": True}, options)
        self.length = length
        with drawn_from(seed):
            self.embed = _embedding(vocabulary, width)
            self.position = _embedding(length, width)
            self.layers = _blocks(self.config, layers)
            self.norm = _last_norm(self.config)
            self.unembed = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > self.length:
            raise DataError(f"expected tokens (B, L) with L ≤ {self.length}, got shape {tuple(tokens.shape)}.")
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return self.unembed(x if self.norm is None else self.norm(x))


class ViT(nn.Module):
    """Images (B, C, H, W) ↦ logits (B, classes): patches embedded, blocks, mean over the patches, head.

    Pre-norm with GELU unless options say otherwise. `size` is the side of square images, or (height, width).

    >>> import torch
    >>> model = ViT(size=8, patch=4, channels=1, classes=10, width=16, heads=2, layers=1, seed=0)
    >>> model(torch.ones(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        patch: int,
        channels: int,
        classes: int,
        width: int,
        heads: int = 1,
        layers: int = 1,
        *,
        seed: int | None = None,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        self.shape = (channels, *(size if isinstance(size, tuple) else (size, size)))
        self.patch = patch
        tokens = _patches(self.shape, patch)
        check_count("classes", classes)
        self.config = block_config(width, heads, {"norm": "pre", "activation": "gelu"}, options)
        with drawn_from(seed):
            self.embed = nn.Linear(channels * patch * patch, width)
            self.position = _embedding(tokens, width)
            self.layers = _blocks(self.config, layers)
            self.norm = _last_norm(self.config)
            self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.shape:
            shape = f"(B, {', '.join(map(str, self.shape))})"
            raise DataError(f"expected images {shape}, got {tuple(images.shape)}.")
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)  # (B, L, C·patch²)
        x = self.embed(patches) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        return self.head((x if self.norm is None else self.norm(x)).mean(1))


# ---------------------------------------------------------------- the parts that they share


def _blocks(config: BlockConfig, layers: int) -> nn.ModuleList:
    check_count("layers", layers)
    return nn.ModuleList(Block(config) for _ in range(layers))


def _embedding(symbols: int, width: int) -> nn.Embedding:
    """Rows of length about 1, so that a tied unembedding begins with small logits."""
    table = nn.Embedding(symbols, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return table


def _last_norm(config: BlockConfig) -> nn.Module | None:
    return make_norm(config) if config.norm == "pre" else None


def _patches(shape: tuple[int, int, int], patch: int) -> int:
    """How many patches an image has."""
    channels, height, width = shape
    for name, value in {"channels": channels, "size": height, "patch": patch, "the width of size": width}.items():
        check_count(name, value)
    if height % patch or width % patch:
        raise ModelError(f"size must be a multiple of patch, got {(height, width)} and {patch}.")
    return (height // patch) * (width // patch)
