"""The quadratic model of a loss around the present weights: what it predicts, and how far that is from the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evolute.apps import directional
from evolute.apps.quadratic_descent import Descent, walked
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.errors import ModelError, NonFiniteError, VectorError
from evolute.krylov.lanczos import Lanczos
from evolute.krylov.results import Quantity, Result
from evolute.krylov.storage import saveable
from evolute.krylov.work import Work
from evolute.linop.space import Space

Steps = Mapping[str, Tensor | Mapping[str, Tensor]]
ROUNDINGS = 16  # of the loss, in the difference of two of them


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Line:
    """L along one step d: `slope` g·d, `curvature` dᵀHd, `third` ∇³L[d, d, d], and `measured`, L(w + d) − L(w) itself.

    `measured` is within `rounding`, and infinite where the loss at w + d is not finite.
    """

    length: float
    slope: float
    curvature: float
    third: float
    measured: float
    rounding: float

    def change(self, t: float = 1.0, order: int = 2) -> float:
        """What t times the step does to the loss, t g·d + t²/2 dᵀHd + t³/6 ∇³L[d,d,d], as far as `order`."""
        if order not in (1, 2, 3):
            raise VectorError(f"order: expected 1, 2 or 3, got {order!r}.")
        terms = (t * self.slope, t**2 / 2 * self.curvature, t**3 / 6 * self.third)
        return sum(terms[:order])

    def remainder(self, order: int = 2) -> float:
        """What the model of this order misses at w + d."""
        return self.measured - self.change(1.0, order)

    def reach(self, share: float = 0.1) -> float:
        """The multiple of the step up to which the third-order term is at most this share of the second-order one."""
        return 3 * share * abs(self.curvature / self.third) if self.third else math.inf


@saveable
@dataclass(frozen=True, eq=False, kw_only=True)
class Taylor(Result):
    """L(w + d) ≈ L + g·d + ½ dᵀHd: `loss` L, `gradient` ‖g‖, `curvature` gᵀHg/‖g‖², the steps in `lines`.

    `descent` is the spectrum of H as g sees it, from which every trajectory of gradient descent follows. It knows of
    the eigenvectors that have a part of g in them, and of no others.
    """

    loss: float
    gradient: float
    curvature: float
    descent: Descent
    lines: Mapping[str, Line]

    def change(self, rate: float, steps: int = 1) -> Quantity:
        """L_t − L after so many steps of gradient descent, if the model holds."""
        value, error = self.descent.change(*_checked(rate, steps))
        return Quantity(estimate=value, standard_error=0.0, samples=0, solver_error=error)

    def trajectory(self, rate: float, steps: int) -> Tensor:
        """L_0 … L_t, if the model holds."""
        rate, steps = _checked(rate, steps)
        return torch.tensor(
            [self.loss + self.descent.change(rate, t)[0] for t in range(steps + 1)], dtype=torch.float64
        )

    def gradient_norm(self, rate: float, steps: int) -> float:
        """‖g_t‖, if the model holds."""
        return math.sqrt(self.descent.square(*_checked(rate, steps)))

    @property
    def best_rate(self) -> float:
        """‖g‖²/gᵀHg, with which one step takes the loss down most; infinite where the gradient sees no curvature."""
        return 1 / self.curvature if self.curvature > 0 else math.inf

    @property
    def largest_rate(self) -> float:
        """2/θ_max, above which gradient descent leaves the model; infinite where g sees no positive curvature."""
        top = float(self.descent.nodes[-1]) if len(self.descent.nodes) else 0.0
        return 2 / top if top > 0 else math.inf

    def __str__(self) -> str:
        head = f"loss {self.loss:.6g}, ‖g‖ {self.gradient:.4g}, gᵀHg/‖g‖² {self.curvature:.4g}"
        rates = f"rates: best for one step {self.best_rate:.4g}, largest that is stable {self.largest_rate:.4g}"
        return "\n".join(
            [head, rates, *(_told(name, line) for name, line in self.lines.items()), f"[{self._footer()}]"]
        )


def _told(name: str, line: Line) -> str:
    orders = " → ".join(f"{line.change(1.0, order):.4g}" for order in (1, 2, 3))
    return f"{name:<18}ΔL to first, second, third order {orders}; measured {line.measured:.4g}"


def taylor(
    objective: Objective,
    steps: Steps | None = None,
    *,
    descents: Iterable[tuple[float, int]] = (),
    products: int = 40,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> Taylor:
    """ΔL_t(η) = −gᵀ φ(H) g for every rate η and number of steps t, from one Lanczos run of `products` steps from g.

    >>> import evolute as ev
    >>> model, x = torch.nn.Linear(2, 1, bias=False).double(), torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.0)
    >>> found = ev.taylor(ev.Objective(model, [(x, torch.zeros(2, 1).double())], torch.nn.MSELoss()))
    >>> [round(each, 3) for each in found.trajectory(0.25, 3).tolist()]  # H = diag(1, 4), w = (0.75^t, 0)
    [2.5, 0.281, 0.158, 0.089]
    >>> round(found.best_rate, 4), round(found.largest_rate, 4)
    (0.2615, 0.5)

    Args:
        objective: Model, data and loss, at the model's present weights.
        steps: Changes of the weights by name, flat or name → tensor: the loss along each is told to third order, and
            measured at its end. "gradient" is always there: −η g with the best rate η.
        descents: Rates and numbers of steps of gradient descent; what the model has them walk is one more step each,
            called "50 × 0.1".
        products: Steps of Lanczos; the loss of the model is exact for as many steps of descent.
        dtype: Of the vectors: float32 or float64, whatever the model computes in.
        progress: A line on a terminal, once the work has lasted some seconds.

    The third derivative is exact, by automatic differentiation.
    """
    if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"expected an ev.Objective(model, batches, loss), got {type(objective).__name__}.")
    if not isinstance(products, int) or products < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"products: expected how many steps of Lanczos, at least 1, got {products!r}.")
    walks = [_pair(each) for each in descents]
    given = _named(objective.space, steps)
    work = Work(Hessian(objective), "taylor", total=products, dtype=dtype, progress=progress)
    loss, g = objective.value(), objective.gradient()
    lanczos, complete = _run(work, g, products)
    square = float(g.double().square().sum())
    descent = Descent.of(lanczos.projected[: lanczos.m, : lanczos.m], square, complete)
    curvature = float((descent.nodes * descent.weights).sum() / square) if square else 0.0
    every = {"gradient": -g / curvature if curvature > 0 else -g, **given}
    every |= {f"{t} × {rate:g}": _walk(lanczos, square, rate, t).to(g) for rate, t in walks}
    return Taylor(
        products=work.products,
        status="interrupted" if work.stopped else "exact" if complete else "converged",
        method=f"Lanczos from the gradient, {lanczos.m} steps",
        provenance=work.provenance(random=False),
        loss=loss,
        gradient=math.sqrt(square),
        curvature=curvature,
        descent=descent,
        lines={name: line(objective, step, loss) for name, step in every.items()},
    )


def line(objective: Objective, step: Tensor, loss: float) -> Line:
    """One step d, where the loss is now `loss`."""
    slope, curvature, third = directional.derivatives(objective, step)
    return Line(
        length=float(torch.linalg.vector_norm(step, dtype=torch.float64)),
        slope=slope,
        curvature=curvature,
        third=third,
        measured=directional.loss_at(objective, step) - loss,
        rounding=ROUNDINGS * torch.finfo(step.dtype).eps * abs(loss),
    )


def _run(work: Work, g: Tensor, products: int) -> tuple[Lanczos, bool]:
    """From g until the space that it spans is exhausted, or the products are."""
    lanczos = Lanczos(work, min(products, work.n) + 1)
    with work.running():
        lanczos.add(g.to(work.like)[None])
        while not (lanczos.exhausted or lanczos.m >= products or work.stopped):
            lanczos.step()
    return lanczos, lanczos.exhausted


def _walk(lanczos: Lanczos, square: float, rate: float, steps: int) -> Tensor:
    """−ψ(H) g in the basis."""
    ritz = lanczos.ritz()
    if lanczos.m == 0:
        return torch.zeros(lanczos.work.n)
    f = ritz.coordinates @ (walked(ritz.values, rate, steps) * ritz.coordinates[0])
    return -math.sqrt(square) * lanczos.vectors(f[:, None])[0]


def _checked(rate: float, steps: int) -> tuple[float, int]:
    if not isinstance(rate, int | float) or not (rate > 0 and math.isfinite(rate)):  # pyright: ignore
        raise VectorError(f"rate: expected a positive number, got {rate!r}.")
    if not isinstance(steps, int) or steps < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"steps: expected how many, at least 0, got {steps!r}.")
    return float(rate), steps


def _pair(descent: tuple[float, int]) -> tuple[float, int]:
    if not isinstance(descent, tuple | list) or len(descent) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"descents: expected pairs of rate and number of steps, [(0.1, 50)], got {descent!r}.")
    return _checked(*descent)


def _named(space: Space, steps: Steps | None) -> dict[str, Tensor]:
    if steps is not None and not isinstance(steps, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"steps: expected name → step, {{'update': step}}, got {type(steps).__name__}.")
    if steps and "gradient" in steps:
        raise VectorError("steps: 'gradient' is the name of a step that is always there; call yours something else.")
    return {name: _flat(space, name, step) for name, step in (steps or {}).items()}


def _flat(space: Space, name: str, step: Tensor | Mapping[str, Tensor]) -> Tensor:
    """(P,) of the objective's kind."""
    flat = space.flatten(step) if isinstance(step, Mapping) else step
    if not isinstance(flat, Tensor) or tuple(flat.shape) != (space.size,):  # pyright: ignore
        got = tuple(flat.shape) if isinstance(flat, Tensor) else type(flat).__name__  # pyright: ignore
        raise VectorError(f"step {name!r}: expected a tensor ({space.size},) or name → tensor, got {got}.")
    if not bool(torch.isfinite(flat).all()):
        raise NonFiniteError(f"step {name!r} has entries that are not finite.")
    return flat.detach().to(space.device, space.dtype)
