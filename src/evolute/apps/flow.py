"""Curvature through depth: of the loss in what runs between the blocks, and in the parameters of each block.

With x_l the residual stream after block l, ∂²L/∂x_l² = J_lᵀ (∂²ℓ/∂F²) J_l + Σ_k ∂ℓ/∂F_k ∂²_l F_k = H_o + H_f, where J_l
is the Jacobian of all that follows. A block in between adds its own Jacobian on both sides, and its own curvature.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evolute.apps.activation_taps import Taps, tapped
from evolute.apps.block_lists import Blocks, blocks_of
from evolute.engine.hf import hf_loss
from evolute.engine.linear_maps import LinearMap, functional_hessian, gauss_newton
from evolute.engine.loss import Loss
from evolute.engine.objective import Evaluated, Objective
from evolute.engine.operators import Hessian
from evolute.errors import ModelError, VectorError
from evolute.krylov.provenance import provenance
from evolute.krylov.randomness import sphere, stream
from evolute.krylov.results import Quantity, Result
from evolute.krylov.storage import saveable

PARTS = ("H", "H_o", "H_f")


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Curvature:
    """Of H, H_o and H_f by name: trace and Frobenius norm; ‖gradient‖ in the same `size` coordinates.

    Of activations all are per term of the loss, so that they do not depend on how much data there is: tr A/N, ‖A‖_F/√N
    and ‖g‖/√N for the sum of the N losses.
    """

    size: int
    trace: Mapping[str, Quantity]
    norm: Mapping[str, Quantity]
    gradient: float


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class BlockFlow:
    """One block: curvature in its parameters (None if it has none that are trained) and in the stream x_l after it.

    - `inverse_variance`: name of each LayerNorm or RMSNorm in the block → mean of 1/σ² over its rows.
    - `residual_share`: how much of what comes out is what went in, mean cos² over rows; None where shapes differ.
    - `activation`: root mean square of the entries of x_l.
    """

    name: str
    parameters: Curvature | None
    activations: Curvature
    inverse_variance: Mapping[str, float]
    residual_share: float | None
    activation: float


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Flow(Result):
    """The blocks in order. Errors are those of the probes; the data are taken as they are."""

    terms: float
    blocks: tuple[BlockFlow, ...]

    def __str__(self) -> str:
        width = max(5, *(len(block.name) for block in self.blocks))
        head = f"{'block':<{width}}{'tr H in x':>24}{'tr H_o in x':>24}{'tr H in w':>24}{'1/σ²':>10}{'residual':>10}"
        return "\n".join([head, *(_told(block, width) for block in self.blocks), f"[{self._footer()}]"])


def _told(block: BlockFlow, width: int) -> str:
    here, there = block.activations.trace, block.parameters
    norms, share = block.inverse_variance.values(), block.residual_share
    columns = [str(here["H"]), str(here["H_o"]), str(there.trace["H"]) if there else "–"]
    variance = f"{max(norms):.3g}" if norms else "–"
    return f"{block.name:<{width}}{''.join(f'{each:>24}' for each in columns)}{variance:>10}" + (
        f"{share:>10.3f}" if share is not None else f"{'–':>10}"
    )


def flow(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | nn.Module | None = None,
    *,
    blocks: Blocks | None = None,
    probes: int = 16,
    generator: torch.Generator | None = None,
) -> Flow:
    """∂²L/∂x_l² and ∂²L/∂w_l² of each block l: traces and norms, H_o and H_f apart, from `probes` random vectors each.

    >>> import evolute as ev
    >>> data = ev.zoo.addition(seed=0).train.first(4)
    >>> model = ev.zoo.GPT(12, data.x.shape[1], 8, 2, layers=2, seed=0)
    >>> found = ev.flow(model, [(data.x, data.y)], ev.Loss(*ev.zoo.cross_entropy))
    >>> [block.name for block in found.blocks], found.blocks[1].activations.norm["H_f"].estimate > 0
    (['layers.0', 'layers.1'], True)

    Args:
        model: Any model with blocks one after the other; each hands on one tensor, or a tuple that begins with it.
        batches: As in `ev.Objective`.
        loss: As in `ev.Objective`; None is the model's own, of a Hugging Face model.
        blocks: The name of their list, such as "transformer.h", or the modules; found where there is one such list.
        probes: Random vectors for each trace and norm; errors shrink with their square root. With as many as there are
            coordinates, the numbers are exact.
        generator: Where the vectors come from; seed 0 without one.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(probes, int) or probes < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"probes: expected how many, at least 2, got {probes!r}.")
    found = blocks_of(model, blocks)
    objective = Objective(model, batches, hf_loss(model) if loss is None else loss)
    return _Run(objective, found, probes, stream(generator)).result()


class _Run:
    """Sums over the batches, block by block."""

    def __init__(
        self, objective: Objective, blocks: Mapping[str, nn.Module], probes: int, generator: torch.Generator
    ) -> None:
        self.objective, self.blocks, self.probes, self.generator = objective, blocks, probes, generator
        self.sums = {name: _Sums(probes) for name in blocks}
        self.rows = {name: _Rows() for name in blocks}
        self.terms, self.products = 0.0, 0

    def result(self) -> Flow:
        with self.objective.running():
            for index, batch in self.objective.batches:
                self._batch(index, batch)
            made = [self._block(name) for name in self.blocks]
        return Flow(
            products=self.products,
            status="exact" if all(each.activations.trace["H"].exact for each in made) else "sampled",
            method=f"random vectors, {self.probes} for each block",
            provenance=provenance(Hessian(self.objective), self.objective.space.dtype, self.generator.initial_seed()),
            terms=self.terms,
            blocks=tuple(made),
        )

    # ---- activations

    def _batch(self, index: int, batch: Any) -> None:
        taps = Taps()
        with tapped(self.blocks, taps):
            each = self.objective.evaluate_one(index, batch)
        self.terms += each.terms
        for name in self.blocks:
            if name not in taps.deltas:
                raise ModelError(f"'{name}' does not run when the loss is computed; name other blocks.")
            self._activations(name, taps, each)
            self.rows[name].add(name, taps)

    def _activations(self, name: str, taps: Taps, each: Evaluated) -> None:
        """The loss of this batch as a function of δ_l alone."""
        delta = taps.deltas[name]
        maps = _maps(self.objective, each, {name: delta})
        rows = self.sums[name].drawn(delta.numel(), delta, self.generator)
        outer, functional = (_images(A, rows, [delta]) for A in maps)
        self.sums[name].add(rows, outer, functional, float(_flat(maps[0].gradient, [delta]).double().square().sum()))
        self.products += 2 * len(rows)

    # ---- parameters

    def _block(self, name: str) -> BlockFlow:
        rows, N = self.rows[name], self.objective.normaliser(self.terms)
        return BlockFlow(
            name=name,
            parameters=self._parameters(name, N),
            activations=self.sums[name].curvature(N, per_term=True),
            inverse_variance={at: total / count for at, (total, count) in rows.variances.items()},
            residual_share=rows.share[0] / rows.share[1] if rows.share[1] else None,
            activation=math.sqrt(rows.square[0] / rows.square[1]),
        )

    def _parameters(self, name: str, terms: float) -> Curvature | None:
        """Directly, batch by batch: a recorded program for each block would cost more than it saves."""
        inside = {id(parameter) for parameter in self.blocks[name].parameters()}
        mine = {key: parameter for key, parameter in self.objective.parameters.items() if id(parameter) in inside}
        if not mine:
            return None
        leaves, sums = list(mine.values()), _Sums(self.probes)
        rows = sums.drawn(sum(leaf.numel() for leaf in leaves), leaves[0], self.generator)
        outer, functional = torch.zeros_like(rows), torch.zeros_like(rows)
        gradient = torch.zeros_like(rows[0])
        for each in self.objective.evaluate():
            maps = _maps(self.objective, each, mine)
            for total, A in zip((outer, functional), maps, strict=True):
                total += _images(A, rows, leaves) / terms
            gradient += _flat(maps[0].gradient, leaves) / terms
        self.products += 2 * len(rows)
        sums.add(rows, outer, functional, float(gradient.double().square().sum()))
        return sums.curvature(1.0, per_term=False)


def _maps(objective: Objective, each: Evaluated, leaves: Mapping[str, Tensor]) -> tuple[LinearMap, LinearMap]:
    """H_o and H_f of one batch, of the loss as a function of these alone."""
    alone = copy.copy(objective)
    alone.parameters = dict(leaves)  # pyright: ignore[reportAttributeAccessIssue]  leaves in place of parameters
    return gauss_newton(alone, each), functional_hessian(alone, each)


def _images(A: LinearMap, rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """A v of each row v."""
    sizes = [leaf.numel() for leaf in leaves]
    split = [[piece.view_as(leaf) for piece, leaf in zip(v.split(sizes), leaves, strict=True)] for v in rows]
    return torch.stack([_flat(A(*pieces), leaves) for pieces in split])


def _flat(pieces: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Tensor:
    """None stands for zero."""
    pairs = zip(pieces, leaves, strict=True)
    return torch.cat([torch.zeros_like(x).reshape(-1) if p is None else p.detach().reshape(-1) for p, x in pairs])


class _Rows:
    """Means over rows: (sum, count)."""

    def __init__(self) -> None:
        self.variances = dict[str, tuple[float, int]]()
        self.share, self.square = (0.0, 0), (0.0, 0)

    def add(self, name: str, taps: Taps) -> None:
        self.share = _more(self.share, taps.shares[name])
        self.square = _more(self.square, taps.streams[name].square())
        for at, rows in taps.variances.items():
            if at == name or at.startswith(f"{name}."):
                self.variances[at] = _more(self.variances.get(at, (0.0, 0)), rows)


def _more(mean: tuple[float, int], rows: Tensor) -> tuple[float, int]:
    return mean[0] + float(rows.double().sum()), mean[1] + rows.numel()


class _Sums:
    """vᵀAv, ‖Av‖² and Var vᵀAv of H, H_o, H_f for each probe v, added up over batches, which do not see one another.

    Of a uniform direction v of length √n, Var vᵀAv = 2 E‖Av − v vᵀAv/n‖²: unlike the scatter of a few samples, it does
    not come out small where all of them miss the one eigenvector that matters.
    """

    def __init__(self, probes: int) -> None:
        self.probes, self.size, self.random = probes, 0, False
        self.forms, self.squares, self.variances = torch.zeros(3, len(PARTS), probes, dtype=torch.float64)
        self.gradient = 0.0

    def drawn(self, n: int, like: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform directions; or, where these are no fewer, all coordinates one by one."""
        if n <= self.probes:
            return torch.eye(n, dtype=like.dtype, device=like.device)
        return sphere(self.probes, n, generator, like.detach())

    def add(self, rows: Tensor, outer: Tensor, functional: Tensor, gradient: float) -> None:
        """(k, n) probes and their images."""
        n, whole = rows.shape[1], rows.shape[1] <= self.probes
        for place, image in enumerate((outer.double() + functional.double(), outer.double(), functional.double())):
            forms, squares = (rows.double() * image).sum(1).cpu(), image.square().sum(1).cpu()
            self.forms[place] += forms.sum() if whole else forms
            self.squares[place] += squares.sum() if whole else squares
            self.variances[place] += 0.0 if whole else 2 * (squares - forms.square() / n)
        self.size, self.random, self.gradient = self.size + n, self.random or not whole, self.gradient + gradient

    def curvature(self, terms: float, *, per_term: bool) -> Curvature:
        root = math.sqrt(terms) if per_term else 1.0
        traces = [self._trace(place, terms) for place in range(len(PARTS))]
        norms = [self._norm(row / root**2) for row in self.squares]
        return Curvature(
            size=self.size,
            trace=dict(zip(PARTS, traces, strict=True)),
            norm=dict(zip(PARTS, norms, strict=True)),
            gradient=math.sqrt(self.gradient) / root,
        )

    @property
    def samples(self) -> int:
        return self.probes if self.random else 0

    def _trace(self, place: int, terms: float) -> Quantity:
        error = math.sqrt(max(float(self.variances[place].mean()), 0.0) / self.probes) / terms
        value = float(self.forms[place].mean()) / terms
        return Quantity(estimate=value, standard_error=error, samples=self.samples, solver_error=0.0)

    def _norm(self, squares: Tensor) -> Quantity:
        """√mean."""
        value = math.sqrt(float(squares.mean()))
        error = float(squares.std()) / math.sqrt(self.probes) / (2 * value) if self.random and value else 0.0
        return Quantity(estimate=value, standard_error=error, samples=self.samples, solver_error=0.0, positive=True)
