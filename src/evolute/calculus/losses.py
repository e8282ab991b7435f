"""Token losses: ℓ = Σ_t ℓ_t(z_t)/N, each with its gradient g_t and its curvature G_t = ∂²ℓ_t/∂z_t².

    MSE             g = 2 (z − y)/N           G = 2/N I                           N = n d
    cross-entropy   g = U (p − y)/N           G = U (diag p − p pᵀ) Uᵀ/N          N = tokens that count, U (d, V)

Any other: `token(value, gradient, curvature)` with your own formulas, or `autodiff(value)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evolute.errors import LossError, NonFiniteError, VectorError

IGNORED = -100


@dataclass(frozen=True, eq=False)
class LossPoint:
    """A loss at its tokens: `value`, `gradient` (n, d), and `curve`, which is ż ↦ G ż per token, (k, n, d)."""

    value: Tensor
    gradient: Tensor
    curve: Callable[[Tensor], Tensor]

    @property
    def detached(self) -> LossPoint:
        """Without a graph, where the loss closes over parameters that are trained."""
        curve = self.curve
        return LossPoint(self.value.detach(), self.gradient.detach(), lambda tangent: curve(tangent).detach())

    @property
    def curvature(self) -> Tensor:
        """G, (n, d, d)."""
        n, d = self.gradient.shape
        basis = torch.eye(d, dtype=self.gradient.dtype, device=self.gradient.device)
        return self.curve(basis[:, None].expand(d, n, d)).permute(1, 2, 0)


class TokenLoss(ABC):
    """A loss that is a sum over tokens."""

    @abstractmethod
    def at(self, z: Tensor, target: Tensor) -> LossPoint:
        """The loss at z (n, d)."""

    @abstractmethod
    def flat_target(self, target: Tensor, shape: torch.Size) -> Tensor:
        """The target of outputs of shape (B, L, d), one row per token; refused when it does not fit."""


@dataclass(frozen=True)
class MSE(TokenLoss):
    """mean (z − y)² over all entries."""

    def at(self, z: Tensor, target: Tensor) -> LossPoint:
        gap, factor = z - target.to(z), 2 / z.numel()
        return LossPoint(gap.square().mean(), gap * factor, lambda tangent: tangent * factor)

    def flat_target(self, target: Tensor, shape: torch.Size) -> Tensor:
        if target.shape != shape:
            raise VectorError(
                f"mse expects a target of the shape of the output, {tuple(shape)}; got {tuple(target.shape)}."
            )
        return target.reshape(-1, shape[-1])


@dataclass(frozen=True, eq=False)
class CrossEntropy(TokenLoss):
    """−log softmax(z U + b)[y], averaged over the tokens whose target is not ignored."""

    unembedding: Tensor  # (d, V)
    bias: Tensor | None = None
    ignore_index: int = IGNORED

    def at(self, z: Tensor, target: Tensor) -> LossPoint:
        U = self.unembedding.to(z, copy=True)  # `curve` keeps it, whatever becomes of the module
        logits = z @ U if self.bias is None else z @ U + self.bias.to(z)
        counted, p = target != self.ignore_index, torch.softmax(logits, -1)
        share = counted.to(z)[:, None] / counted.sum()
        label = nn.functional.one_hot(target.masked_fill(~counted, 0), U.shape[1])
        gap = (p - label.to(z)) * share
        value = nn.functional.cross_entropy(logits, target, ignore_index=self.ignore_index)

        def curve(tangent: Tensor) -> Tensor:
            moved = p * (tangent @ U)
            return ((moved - p * moved.sum(-1, keepdim=True)) * share) @ U.mT

        return LossPoint(value, gap @ U.mT, curve)

    def flat_target(self, target: Tensor, shape: torch.Size) -> Tensor:
        self._check(target, shape)
        return target.reshape(-1).long()

    def _check(self, target: Tensor, shape: torch.Size) -> None:
        d, vocabulary = self.unembedding.shape
        if d != shape[-1]:
            raise VectorError(f"the unembedding takes {d} features; the layer gives {shape[-1]}.")
        if target.shape != shape[:-1] or target.dtype.is_floating_point:
            raise VectorError(
                f"cross-entropy expects integer targets {tuple(shape[:-1])}; got {target.dtype} {tuple(target.shape)}."
            )
        counted = target[target != self.ignore_index]
        if not counted.numel():
            raise LossError(f"every target is {self.ignore_index}, which is ignored: no token counts.")
        if counted.min() < 0 or counted.max() >= vocabulary:
            raise VectorError(
                f"targets must be in 0…{vocabulary - 1}, or {self.ignore_index} where none counts; "
                f"got {int(counted.min())}…{int(counted.max())}."
            )


Formula = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Token(TokenLoss):
    """mean_t ℓ(z_t, y_t), by formulas for all tokens at once: (n, d), targets → (n,), (n, d), (n, d, d)."""

    value: Formula
    gradient: Formula
    curvature: Formula

    def at(self, z: Tensor, target: Tensor) -> LossPoint:
        n, d = z.shape
        parts = self.value(z, target), self.gradient(z, target), self.curvature(z, target)
        for part, shape in zip(parts, ((n,), (n, d), (n, d, d)), strict=True):
            if part.shape != shape:
                raise LossError(
                    f"value, gradient, curvature must be ({n},), ({n}, {d}), ({n}, {d}, {d}); "
                    f"got {', '.join(str(tuple(each.shape)) for each in parts)}."
                )
        value, gradient, curvature = parts
        return LossPoint(
            value.mean(), gradient / n, lambda tangent: torch.einsum("tab,ktb->kta", curvature / n, tangent)
        )

    def flat_target(self, target: Tensor, shape: torch.Size) -> Tensor:
        if target.shape[:2] != shape[:2]:
            raise VectorError(f"expected targets that start with {tuple(shape[:2])}; got {tuple(target.shape)}.")
        return target.flatten(0, 1)


def mse() -> TokenLoss:
    """Mean (z − y)² over all entries, as `nn.MSELoss()`.

    >>> mse().at(torch.ones(1, 2), torch.zeros(1, 2)).curvature
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    return MSE()


def cross_entropy(
    unembedding: Tensor | nn.Linear, bias: Tensor | None = None, *, ignore_index: int = IGNORED
) -> TokenLoss:
    """Cross-entropy of the logits z U + b, as `nn.CrossEntropyLoss()` of an unembedding of the block's output.

    Args:
        unembedding: an nn.Linear(d, V), or a matrix (d, V).
        bias: (V,), where the unembedding is a matrix.
        ignore_index: targets that do not count.

    >>> point = cross_entropy(torch.eye(2)).at(torch.zeros(1, 2), torch.tensor([0]))
    >>> point.gradient
    tensor([[-0.5000,  0.5000]])
    """
    if isinstance(unembedding, nn.Linear):
        own = None if unembedding.bias is None else unembedding.bias.detach()  # pyright: ignore[reportUnnecessaryComparison]
        return CrossEntropy(unembedding.weight.detach().mT, own if bias is None else bias, ignore_index)
    if not isinstance(unembedding, Tensor) or unembedding.ndim != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = f"shape {tuple(unembedding.shape)}" if isinstance(unembedding, Tensor) else type(unembedding).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise VectorError(f"expected an unembedding (d, V) or an nn.Linear; got {got}.")
    if bias is not None and bias.shape != unembedding.shape[1:]:
        raise VectorError(f"expected a bias {tuple(unembedding.shape[1:])}, got {tuple(bias.shape)}.")
    return CrossEntropy(unembedding.detach(), bias, ignore_index)


def token(value: Formula, gradient: Formula, curvature: Formula) -> TokenLoss:
    """mean_t ℓ(z_t, y_t) for any ℓ whose derivatives you have.

    Args:
        value: (z (n, d), targets) → ℓ, (n,).
        gradient: the same → ∂ℓ/∂z, (n, d).
        curvature: the same → ∂²ℓ/∂z², (n, d, d).

    >>> quartic = token(lambda z, y: z.pow(4).sum(-1), lambda z, y: 4 * z**3, lambda z, y: torch.diag_embed(12 * z**2))
    >>> quartic.at(torch.ones(1, 1), torch.zeros(1, 1)).curvature
    tensor([[[12.]]])
    """
    return Token(value, gradient, curvature)


def autodiff(value: Formula) -> TokenLoss:
    """mean_t ℓ(z_t, y_t), ℓ: (d,), target → scalar, differentiated twice by torch.func.

    >>> autodiff(lambda z, y: (z - y).pow(4).sum()).at(torch.ones(1, 1), torch.zeros(1, 1)).curvature
    tensor([[[12.]]])
    """
    from torch.func import grad, hessian, vmap

    def each(function: Callable[..., Tensor]) -> Formula:
        return lambda z, y: vmap(function)(z, y)

    return Token(each(value), each(grad(value)), each(hessian(value)))


def resolve(loss: str | TokenLoss | nn.Module) -> TokenLoss:
    """`"mse"`, nn.MSELoss(), or a TokenLoss."""
    if isinstance(loss, TokenLoss):
        return loss
    if loss == "mse" or (isinstance(loss, nn.MSELoss) and loss.reduction == "mean"):
        return MSE()
    raise LossError(
        "expected 'mse', ev.losses.cross_entropy(unembedding), ev.losses.token(…) or ev.losses.autodiff(…); "
        f"got {loss!r}."
    )


def check_finite(point: LossPoint) -> None:
    if not (torch.isfinite(point.value) and torch.isfinite(point.gradient).all()):
        raise NonFiniteError(f"the loss is {float(point.value)}, or its gradient is not finite: no curvature there.")
