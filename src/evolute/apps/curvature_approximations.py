"""What optimisers put in the place of a block of curvature: a diagonal, a Kronecker product, blocks of single rows.

The group of a linear map y = W x + b is taken row by row (`captured.by_rows`); x has a 1 more for the bias. With g_s
the gradient at y of token s of a sample, labels drawn from the model:

    KFAC, expand     Σ_s E[g_s g_sᵀ] ⊗ E[x_s x_sᵀ]: every token is a sample of its own
    KFAC, reduce     E[ĝ ĝᵀ] ⊗ E[x̂ x̂ᵀ], ĝ = Σ_s g_s, x̂ = mean_s x_s: tokens are put together first
    Shampoo          E[M Mᵀ]^½ ⊗ E[Mᵀ M]^½ of gradients M of mini-batches
    Adam             diag E[M²]

KFAC is the Gauss–Newton matrix where g does not depend on x: every layer of a deep linear network under squared error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from evolute.apps.captured import Columns, captured, with_one
from evolute.engine.objective import Objective

# ---- matrices that are cheap to invert


class Approximation(ABC):
    """A symmetric matrix A, known by its dense form and by (|A| + δ)⁻¹ g."""

    @abstractmethod
    def dense(self) -> Tensor: ...

    @abstractmethod
    def solve(self, g: Tensor, delta: float) -> Tensor:
        """(|A| + δ)⁻¹ g, with |A| = (A²)^½: a direction that goes down however A curves."""

    @property
    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """All of them, in any order."""


@dataclass(frozen=True, eq=False)
class Full(Approximation):
    """The matrix itself."""

    matrix: Tensor

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.linalg.eigh(self.matrix))

    @property
    def eigenvalues(self) -> Tensor:
        return self.pairs[0]

    def dense(self) -> Tensor:
        return self.matrix

    def solve(self, g: Tensor, delta: float) -> Tensor:
        values, V = self.pairs
        return V @ ((V.mT @ g) / (values.abs() + delta))


@dataclass(frozen=True, eq=False)
class Diagonal(Approximation):
    """diag(values)."""

    values: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        return torch.diag(self.values)

    def solve(self, g: Tensor, delta: float) -> Tensor:
        return g / (self.values.abs() + delta)


@dataclass(frozen=True, eq=False)
class Kronecker(Approximation):
    """B ⊗ A: B of the outputs, A of the inputs.

    >>> B, A, g = torch.diag(torch.tensor([1.0, 2.0])), torch.eye(3), torch.arange(6.0)
    >>> step = Kronecker(B, A).solve(g, 0.5)
    >>> torch.allclose(Kronecker(B, A).dense() @ step + 0.5 * step, g)
    True
    """

    outputs: Tensor
    inputs: Tensor

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (*torch.linalg.eigh(self.outputs), *torch.linalg.eigh(self.inputs))

    @property
    def eigenvalues(self) -> Tensor:
        b, _, a, _ = self.pairs
        return torch.outer(b, a).flatten()

    def dense(self) -> Tensor:
        return torch.kron(self.outputs, self.inputs)

    def solve(self, g: Tensor, delta: float) -> Tensor:
        b, U, a, V = self.pairs
        turned = U.mT @ g.view(len(b), len(a)) @ V
        return (U @ (turned / (torch.outer(b, a).abs() + delta)) @ V.mT).flatten()


@dataclass(frozen=True, eq=False)
class Blocks(Approximation):
    """One after the other along the diagonal, zero elsewhere."""

    parts: Sequence[Approximation]

    @property
    def eigenvalues(self) -> Tensor:
        return torch.cat([part.eigenvalues for part in self.parts])

    def dense(self) -> Tensor:
        return torch.block_diag(*(part.dense() for part in self.parts))

    def solve(self, g: Tensor, delta: float) -> Tensor:
        pieces = g.split([len(part.eigenvalues) for part in self.parts])
        return torch.cat([part.solve(piece, delta) for part, piece in zip(self.parts, pieces, strict=True)])


# ---- from the true block


def exact_diagonal(block: Tensor) -> Diagonal:
    """What is on the diagonal."""
    return Diagonal(block.diagonal().clone())


def row_blocks(block: Tensor, rows: int) -> Blocks:
    """The block of each row of W with itself: of all weights that lead to one neuron."""
    pieces = block.unflatten(0, (rows, -1)).unflatten(2, (rows, -1))  # (o, p, o, p)
    return Blocks([Full(pieces[o, :, o]) for o in range(rows)])


def nearest_kronecker(block: Tensor, rows: int) -> Kronecker:
    """The Kronecker product that is nearest in ‖·‖_F: the first singular pair of the block, rearranged.

    >>> B, A = torch.randn(2, 2).double(), torch.randn(3, 3).double()
    >>> product = torch.kron(B @ B.T, A @ A.T)
    >>> torch.allclose(nearest_kronecker(product, 2).dense(), product)
    True
    """
    p = len(block) // rows
    arranged = block.view(rows, p, rows, p).transpose(1, 2).reshape(rows * rows, p * p)
    left, right = _first_pair(arranged)
    B, A = left.view(rows, rows), right.view(p, p)
    sign = -1.0 if float(B.trace()) < 0 else 1.0  # a pair is known up to a common sign
    return Kronecker(sign * (B + B.mT) / 2, sign * (A + A.mT) / 2)


def _first_pair(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """u√σ and v√σ, from the smaller of the two Gram matrices."""
    tall = matrix.shape[0] > matrix.shape[1]
    M = matrix.mT if tall else matrix
    u = torch.linalg.eigh(M @ M.mT)[1][:, -1]
    v = M.mT @ u
    size = float(v.norm()) ** 0.5 or 1.0
    pair = u * size, v / size
    return (pair[1], pair[0]) if tall else pair


# ---- from gradients at the model's outputs


def kfac(objective: Objective, linears: Mapping[str, nn.Linear], columns: Columns) -> dict[str, Kronecker]:
    """Σ_s E[g_s g_sᵀ] ⊗ E[x xᵀ] for each linear map: every token a sample of its own ("expand")."""
    return _factors(objective, linears, columns, lambda x: x, lambda g: g)


def kfac_reduce(objective: Objective, linears: Mapping[str, nn.Linear], columns: Columns) -> dict[str, Kronecker]:
    """E[ĝ ĝᵀ] ⊗ E[x̂ x̂ᵀ], x̂ = mean_s x_s and ĝ = Σ_s g_s: the tokens of a sample as one ("reduce")."""
    return _factors(objective, linears, columns, lambda x: x.mean(1, keepdim=True), lambda g: g.sum(1, keepdim=True))


Merge = Callable[[Tensor], Tensor]


def _factors(
    objective: Objective, linears: Mapping[str, nn.Linear], columns: Columns, of_inputs: Merge, of_outputs: Merge
) -> dict[str, Kronecker]:
    """Columns with Σ_c s sᵀ = ∂²ℓ/∂F² stand for gradients of labels that the model draws."""
    A, count, G, terms = dict[str, Tensor](), dict[str, int](), dict[str, Tensor](), 0.0
    for batch in captured(objective, linears):
        terms += batch.terms
        for name, linear in linears.items():
            x = of_inputs(with_one(batch.inputs[name], linear)).flatten(0, 1)
            A[name], count[name] = A.get(name, 0) + x.mT @ x, count.get(name, 0) + len(x)
        for column in columns(batch.logits, batch.labels):
            for name, g in batch.pull_to_outputs(column).items():
                g = of_outputs(g).flatten(0, 1)
                G[name] = G.get(name, 0) + g.mT @ g
    return {name: Kronecker(G[name] / terms, A[name] / count[name]) for name in linears}


# ---- from gradients of mini-batches


def second_moment(gradients: Tensor) -> Diagonal:
    """E[M²] on the diagonal: Adam's v, without its memory; gradients (m, o, p) of mini-batches."""
    return Diagonal(gradients.square().mean(0).flatten())


def shampoo(gradients: Tensor) -> Kronecker:
    """E[M Mᵀ]^½ ⊗ E[Mᵀ M]^½; of a single M of rank one it is its outer product."""
    left = (gradients @ gradients.mT).mean(0)
    right = (gradients.mT @ gradients).mean(0)
    return Kronecker(_root(left), _root(right))


def _root(M: Tensor) -> Tensor:
    values, V = torch.linalg.eigh(M)
    return V @ (values.clamp(min=0).sqrt()[:, None] * V.mT)


def square_root(approximation: Kronecker | Diagonal) -> Kronecker | Diagonal:
    """A^½, which is what Adam and Shampoo divide by."""
    if isinstance(approximation, Diagonal):
        return Diagonal(approximation.values.sqrt())
    return Kronecker(_root(approximation.outputs), _root(approximation.inputs))
