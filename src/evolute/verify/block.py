"""Theorems 4 and 5 against automatic differentiation of a block made of PyTorch's own parts."""

from collections.abc import Callable
from itertools import combinations_with_replacement

from torch import Tensor

from evolute.calculus.published import block
from evolute.calculus.published.block import Block
from evolute.verify import attention, oracle
from evolute.verify.layernorm import normalise
from evolute.verify.statement import Sampler, Statement, register

LABEL = {"Q": "Q", "K": "K", "V": "V", "1": "W1", "2": "W2"}


def sample(draw: Sampler) -> Block:
    """L from 2 to 3, d_V from 3 to 4, d_K from 1 to 3, f from 2 to 5."""
    L, d_V, d_K, f = draw.integer(2, 3), draw.integer(3, 4), draw.integer(1, 3), draw.integer(2, 5)
    return Block(
        attention.with_sizes(draw, L, d_V, d_K), draw.normal(d_V, f), draw.normal(f, d_V), draw.choice(1e-5, 0.1)
    )


def weights(b: Block) -> tuple[Tensor, ...]:
    return *attention.weights(b.attention), b.W1, b.W2


def forward(b: Block) -> Callable[..., Tensor]:
    """(W_Q, W_K, W_V, W1, W2) ↦ Z = LN(S), S = ReLU(Y W1) W2 + Y, Y = LN(X + F)."""
    F = attention.forward(b.attention)

    def Z(W_Q: Tensor, W_K: Tensor, W_V: Tensor, W1: Tensor, W2: Tensor) -> Tensor:
        Y = normalise(b.attention.X + F(W_Q, W_K, W_V), b.eps)
        return normalise((Y @ W1).relu() @ W2 + Y, b.eps)

    return Z


def _statement(i: str, j: str) -> Statement[Block]:
    """The Hessian of every output by w_i and w_j; one theorem for the feed-forward half, one for all."""
    theorem = "Theorem 4" if i in "12" and j in "12" else "Theorem 5"
    here = block.GROUPS.index(i), block.GROUPS.index(j)
    return Statement(
        f"{theorem} · ∂²Z({LABEL[i]},{LABEL[j]})",
        "(J_Z ⊗ I) ξ + (I ⊗ Bᵀ) H_Z B",
        sample,
        lambda b: block.hessian_block(b, i, j),
        lambda b: oracle.second(forward(b), weights(b), *here),
    )


register(*(_statement(i, j) for i, j in combinations_with_replacement(reversed(block.GROUPS), 2)))
