"""The curvature operators: H = G + F, and the empirical Fisher E."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from evolute.engine import linear_maps
from evolute.engine.narrow import Window
from evolute.engine.objective import Objective
from evolute.engine.plan import Plan
from evolute.engine.products import MakeMap, Products
from evolute.errors import ModelError
from evolute.linop.algebra import Block
from evolute.linop.operator import LinearOperator, SymmetricOperator
from evolute.linop.space import Select, Selection, Space


class CurvatureOperator(SymmetricOperator):
    """A symmetric operator on the parameters of an objective, at the point where it was made.

    The first product reads the data and records; later ones replay what fits the memory budget (see `plan`).
    """

    make: ClassVar[MakeMap]

    def __init__(self, objective: Objective) -> None:
        if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"expected an ev.Objective(model, batches, loss), got {type(objective).__name__}.")
        self.objective = objective
        self._products = Products(objective, type(self).make)

    @property
    def space(self) -> Space:
        return self.objective.space

    @property
    def preferred_block(self) -> int:
        return self._products.block

    @property
    def plan(self) -> Plan:
        """What is kept and what is recomputed; decided (and the data read) now, if no product has been taken yet."""
        with torch.inference_mode(False):
            return self._products.prepared()

    def apply_rows(self, rows: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return self._products(rows, self.space, self.space)

    def block(self, rows: Select, cols: Select) -> LinearOperator:
        return CurvatureBlock.of(self, self.space.resolve(rows), self.space.resolve(cols))

    def apply_block(self, vectors: Tensor, rows: Selection, cols: Selection) -> Tensor:
        """Reads and writes the parameters of the block only, and skips the work that they do not need."""
        source, target = cols.smallest(), rows.smallest()
        window = Window(self._places(source), self._places(target))
        with torch.inference_mode(False):
            return target.take(self._products(source.put(vectors), source.parent, target.parent, window))

    def _places(self, selection: Selection) -> tuple[int, ...]:
        order = {name: place for place, name in enumerate(self.space.shapes)}
        return tuple(order[name] for name in selection.parent.shapes)


@dataclass(frozen=True, eq=False, repr=False)
class CurvatureBlock(Block):
    """A block of a curvature operator, at the cost of the part of the model that it touches."""

    def apply_rows(self, rows: Tensor) -> Tensor:
        assert isinstance(self.op, CurvatureOperator)
        return self.op.apply_block(rows, self.rows, self.cols)

    def adjoint(self) -> LinearOperator:
        return self if self.rows.parts == self.cols.parts else CurvatureBlock(self.op, self.cols, self.rows)


class Hessian(CurvatureOperator):
    """H = ∇²L, the matrix of second derivatives of the objective.

    >>> import torch, evolute as ev
    >>> objective = ev.Objective(
    ...     torch.nn.Linear(2, 1, bias=False), [(torch.eye(2), torch.zeros(2, 1))], torch.nn.MSELoss()
    ... )
    >>> ev.Hessian(objective) @ torch.tensor([1.0, 2.0])
    tensor([1., 2.])
    """

    make = staticmethod(linear_maps.hessian)


class GaussNewton(CurvatureOperator):
    """G = Jᵀ (∂²ℓ/∂F²) J, the outer-product Hessian H_o: what H would be were the model linear in its parameters."""

    make = staticmethod(linear_maps.gauss_newton)


class FunctionalHessian(CurvatureOperator):
    """F = H − G = Σ_k (∂ℓ/∂F_k) ∂²F_k, the functional Hessian H_f: the curvature of the model itself."""

    make = staticmethod(linear_maps.functional_hessian)


class EmpiricalFisher(CurvatureOperator):
    """E = (1/N) Σ_t ∇ℓ_t ∇ℓ_tᵀ over the N terms of the loss (tokens, entries): no second derivative at all."""

    make = staticmethod(linear_maps.empirical_fisher)
