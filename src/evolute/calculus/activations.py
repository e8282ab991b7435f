"""Activations with their first and second derivative, elementwise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evolute.calculus.local import LocalMap
from evolute.errors import CurvatureWarning, ModelError

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """φ, φ′ and φ″. `kinked`: φ′ jumps at zero, so that φ″ is the second derivative almost everywhere only.

    `steepest` is sup |φ′|, or infinity.
    """

    name: str
    value: Elementwise
    slope: Elementwise
    bend: Elementwise
    steepest: float
    kinked: bool = False


def _normal(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def _below(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _silu_bend(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


_C, _A = math.sqrt(2 / math.pi), 0.044715


def _tanh_gelu_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tanh u, u′ and u″ of u = √(2/π) (x + 0.044715 x³)."""
    return torch.tanh(_C * (x + _A * x**3)), _C * (1 + 3 * _A * x.square()), 6 * _C * _A * x


def _tanh_gelu_slope(x: Tensor) -> Tensor:
    t, du, _ = _tanh_gelu_parts(x)
    return (1 + t + x * (1 - t.square()) * du) / 2


def _tanh_gelu_bend(x: Tensor) -> Tensor:
    t, du, ddu = _tanh_gelu_parts(x)
    return (1 - t.square()) * (du + x * (ddu / 2 - t * du.square()))


def _sigmoid_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _sigmoid_bend(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (1 - 2 * s)


def _step(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


ACTIVATIONS = {
    each.name: each
    for each in (
        Activation("relu", torch.relu, _step, torch.zeros_like, 1.0, kinked=True),
        Activation(
            "gelu",
            torch.nn.functional.gelu,
            lambda x: _below(x) + x * _normal(x),
            lambda x: _normal(x) * (2 - x.square()),
            1.13,
        ),
        Activation(
            "gelu_tanh",
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            _tanh_gelu_slope,
            _tanh_gelu_bend,
            1.13,
        ),
        Activation("silu", torch.nn.functional.silu, _silu_slope, _silu_bend, 1.1),
        Activation(
            "tanh",
            torch.tanh,
            lambda x: 1 - torch.tanh(x).square(),
            lambda x: -2 * torch.tanh(x) * (1 - torch.tanh(x).square()),
            1.0,
        ),
        Activation("sigmoid", torch.sigmoid, _sigmoid_slope, _sigmoid_bend, 0.25),
        Activation("identity", lambda x: x, torch.ones_like, torch.zeros_like, 1.0),
    )
}


@dataclass(eq=False)
class Pointwise(LocalMap):
    """y = φ(x) at a point: J = diag(φ′), curvature diag(φ″ ⊙ g)."""

    value: Tensor
    slope: Tensor
    second: Tensor

    @cached_property
    def straight(self) -> bool:
        """φ″ is zero at every entry."""
        return not bool(self.second.any())

    @property
    def inputs(self) -> int:
        return self.value.shape[-1]

    def push(self, tangent: Tensor) -> Tensor:
        return self.slope * tangent

    def pull(self, g: Tensor) -> Tensor:
        return self.slope * g

    def bend(self, g: Tensor, tangent: Tensor) -> Tensor:
        return self.second * g * tangent


def activation(x: Tensor, name: str = "relu") -> Pointwise:
    """φ(x) with its Jacobian diag(φ′(x)) and curvature diag(φ″(x) ⊙ g).

    Args:
        x: tokens, (n, p).
        name: relu, gelu, gelu_tanh, silu, tanh, sigmoid or identity.

    >>> x = torch.tensor([[-1.0, 0.5]])
    >>> activation(x, "relu").jacobian
    tensor([[[0., 0.],
             [0., 1.]]])
    """
    phi = named(name)
    return Pointwise(phi.value(x), phi.slope(x), phi.bend(x))


def at_kink(name: str, x: Tensor, kept: Tensor | None = None) -> int:
    """How many entries lie exactly where φ′ jumps; of those that are kept, if not all are."""
    if not named(name).kinked:
        return 0
    zero = x == 0
    return int((zero if kept is None else zero & kept).sum())


def say_kinks(count: int, stacklevel: int = 3) -> None:
    """Once per call of the user's, if there is anything to say."""
    if count:
        warnings.warn(
            f"{count} entries lie exactly at the kink of a ReLU, where it has no second derivative: this is the "
            "almost-everywhere Hessian, with φ′(0) = 0 and φ″(0) = 0.",
            CurvatureWarning,
            stacklevel=stacklevel,
        )


def named(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ModelError(f"expected an activation out of {', '.join(ACTIVATIONS)}; got {name!r}.")
    return ACTIVATIONS[name]
