"""Scalar attention f = w_V A x under a sink: its spectrum by formula, and by the dense Hessian of the same model.

Tokens are normal, but for the first of each sequence, which is ±`first`; targets are those of another such model, with
noise, so that no weights fit them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

from evolute.calculus.scalar_attention import ScalarAttention, scalar_attention
from evolute.engine.objective import Objective
from evolute.engine.operators import Hessian
from evolute.linop.convert import to_dense
from evolute.studies.study import Cell, Row

NOISE = 0.5  # of the targets, beside an output of size one
SIZE = 0.5  # of the entries of w_Q and w_K: scores of size one
CLOSE_TO_MINIMUM = 1e-12  # of the gradient
SINGULAR = 1e-9  # of the largest |λ|: a bulk below is zero but for what is left of the gradient


@dataclass(frozen=True)
class Task:
    """Weights, tokens and targets."""

    q: Tensor
    k: Tensor
    v: float
    x: Tensor  # (sequences, tokens)
    y: Tensor

    def closed(self, sink: float) -> ScalarAttention:
        return scalar_attention(self.q, self.k, self.v, self.x, self.y, sink=sink)


def draw(seed: int, first: float, d_K: int, L: int, sequences: int) -> Task:
    """A random task with random weights: the same for the same seed, whatever the size of the first token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, noise = normal(sequences, L), NOISE * normal(sequences, L)
    q, k, teacher_q, teacher_k = (SIZE * normal(d_K) for _ in range(4))
    x[:, 0] = first * x[:, 0].sign()
    with torch.no_grad():
        y = ScalarModel(teacher_q, teacher_k, 1.0, 0.0)(x) + noise
    return Task(q, k, float(normal()), x, y)


def trained(task: Task, sink: float, iterations: int) -> Task:
    """At a minimum of the loss with that sink, by L-BFGS with the gradient of the closed form."""
    d = len(task.q)

    def with_(w: Tensor) -> Task:
        return replace(task, q=w[:d], k=w[d:-1], v=float(w[-1]))

    def loss(w: Any) -> tuple[float, Any]:
        point = with_(torch.from_numpy(w.copy())).closed(sink)
        return point.value, point.gradient.numpy()

    start = np.concatenate([task.q.numpy(), task.k.numpy(), [task.v]])
    options = {"maxiter": iterations, "gtol": CLOSE_TO_MINIMUM, "ftol": 0.0}
    return with_(torch.from_numpy(minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x))


# ---- the same model, as a module that knows nothing of the formula


class ScalarModel(nn.Module):
    """softmax(x w_Q (x w_K)ᵀ/√d_K + sink·e₁) x w_V with features of its own for query and key."""

    def __init__(self, q: Tensor, k: Tensor, v: float, sink: float) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(q.clone()), nn.Parameter(k.clone())
        self.v, self.sink = nn.Parameter(q.new_tensor([v])), sink

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x[..., None] * weight for weight in (self.q, self.k, self.v))  # (n, L, d_K), …, (n, L, 1)
        offset = x.new_zeros(x.shape[-1], x.shape[-1])
        offset[:, 0] = self.sink
        return F.scaled_dot_product_attention(q, k, v, attn_mask=offset)[..., 0]


def numerical(task: Task, sink: float) -> tuple[Tensor, Tensor]:
    """Gradient and dense Hessian by automatic differentiation, in the order w_Q, w_K, w_V."""
    objective = Objective(ScalarModel(task.q, task.k, task.v, sink), [(task.x, task.y)], nn.MSELoss())
    return objective.gradient(), to_dense(Hessian(objective))


# ---- rows


def measure(cell: Cell) -> list[Row]:
    """One task under each sink: random weights, weights trained without a sink ("imposed"), or with it ("trained")."""
    task = draw(cell["seed"], cell["first"], cell["d_K"], cell["L"], cell["sequences"])
    point, told = cell["point"], {name: cell[name] for name in ("kind", "point", "first", "seed")}
    if point == "imposed":
        task = trained(task, 0.0, cell["iterations"])
    rows = list[Row]()
    for sink in cell["sinks"]:
        here = trained(task, sink, cell["iterations"]) if point == "trained" else task
        rows.append({**told, "sink": sink, **measured(here, sink)})
    return rows


def measured(task: Task, sink: float) -> dict[str, float | None]:
    """The spectrum by formula, and how far that is from the numerical one, relative to its largest |λ|."""
    point, (gradient, H) = task.closed(sink), numerical(task, sink)
    numbers, spectrum = torch.linalg.eigvalsh(H), point.spectrum
    sizes = spectrum.outliers.abs().sort(descending=True).values.tolist()
    slope = float(gradient[: len(task.q)].norm() / task.k.norm())  # ‖∂ℓ/∂w_Q‖/‖w_K‖, which is |ℓ_s|
    return {
        "bulk": spectrum.bulk,
        "top": float(spectrum.outliers[-1]),
        "bottom": float(spectrum.outliers[0]),
        "middle": sizes[1],
        "condition": spectrum.condition_number if spectrum.bulk > SINGULAR * sizes[0] else None,
        "slope": slope,
        "loss": point.value,
        "attention": first_token(task, sink),
        "error": float((spectrum.eigenvalues - numbers).abs().max() / numbers.abs().max()),
    }


def first_token(task: Task, sink: float) -> float:
    """The mean share of attention of the first token."""
    scores = task.x[..., :, None] * task.x[..., None, :] * (task.q @ task.k) / len(task.q) ** 0.5
    scores[..., 0] += sink
    return float(scores.softmax(-1)[..., 0].mean())


def measure_norms(cell: Cell) -> list[Row]:
    """The condition number as ‖w_Q‖ = ‖w_K‖ grows, at one value of w_Q·w_K, and with w_Q·w_K growing along."""
    task = draw(cell["seed"], cell["first"], cell["d_K"], cell["L"], cell["sequences"])
    frame = torch.linalg.qr(torch.stack([task.q, task.k, task.x[0, : len(task.q)]]).T).Q
    rows = list[Row]()
    for size in cell["norms"]:
        for way, (q, k) in {"product": _same_product(frame, size), "direction": _same_direction(task, size)}.items():
            number = replace(task, q=q, k=k).closed(0.0).spectrum.condition_number
            rows.append({"kind": "norms", "way": way, "seed": cell["seed"], "size": size, "condition": _finite(number)})
    return rows


def _same_product(frame: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """‖w_Q‖ = ‖w_K‖ = size and w_Q·w_K = ½ for size² ≥ ½: what is added is orthogonal."""
    rest = (size**2 - 0.5) ** 0.5
    return 0.5**0.5 * frame[:, 0] + rest * frame[:, 1], 0.5**0.5 * frame[:, 0] + rest * frame[:, 2]


def _same_direction(task: Task, size: float) -> tuple[Tensor, Tensor]:
    return size * task.q / task.q.norm(), size * task.k / task.k.norm()


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
