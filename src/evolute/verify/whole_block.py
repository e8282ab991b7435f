"""The closed form of a whole block against automatic differentiation of the block itself, for random options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from evolute.calculus import losses
from evolute.calculus.closed_form import ClosedForm, closed_form
from evolute.calculus.losses import TokenLoss
from evolute.linop.convert import to_dense
from evolute.linop.exact import diagonal, frobenius
from evolute.verify import oracle
from evolute.verify.statement import Sampler, Statement, excess, register
from evolute.zoo.block import Block
from evolute.zoo.config import BlockConfig

WIDTH, HIDDEN = 4, 3
Criterion = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """A layer at tokens x (B, L, d), and a loss in two ways."""

    layer: nn.Module
    x: Tensor
    target: Tensor
    loss: TokenLoss
    criterion: Criterion

    @property
    def closed(self) -> ClosedForm:
        return closed_form(self.layer, self.x, self.target, self.loss)

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.layer.parameters()]

    def forward(self, x: Tensor, *weights: Tensor) -> Tensor:
        names = (name for name, _ in self.layer.named_parameters())
        with sdpa_kernel(SDPBackend.MATH):
            return functional_call(self.layer, dict(zip(names, weights, strict=True)), (x,))

    def output(self, *weights: Tensor) -> Tensor:
        return self.forward(self.x, *weights)


def sample_block(draw: Sampler) -> Problem:
    """A block of the zoo, with every option at random."""
    options: dict[str, Any] = {
        "norm": draw.choice("pre", "post", "none"),
        "norm_kind": draw.choice("layer", "rms"),
        "attention": draw.choice("softmax", "softmax", "linear", "sigmoid"),
        "activation": draw.choice("relu", "gelu", "gelu_tanh", "silu"),
        "heads": draw.choice(1, 2, 4),
        "sink": draw.choice(0.0, 1.0),
        **{name: draw.choice(True, False) for name in ("gated", "mlp", "output", "residual", "bias", "causal")},
    }
    return _problem(draw, lambda: Block(BlockConfig(WIDTH, hidden=HIDDEN, **options)))


def sample_encoder(draw: Sampler) -> Problem:
    """nn.TransformerEncoderLayer, the norm before or after."""
    first, activation = draw.choice(True, False), draw.choice("relu", "gelu")
    return _problem(
        draw,
        lambda: nn.TransformerEncoderLayer(
            WIDTH, 2, HIDDEN, activation=activation, norm_first=first, batch_first=True, dtype=torch.float64
        ),
    )


def _problem(draw: Sampler, make: Callable[[], nn.Module]) -> Problem:
    with torch.random.fork_rng(devices=[]):  # its initial values are drawn from the user's generator
        layer = make().double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw.normal(*parameter.shape) / 2 + (parameter.ndim == 1))
    x = draw.normal(draw.integer(1, 2), draw.integer(2, 3), WIDTH)
    return Problem(layer, x, *_loss(draw, x))


def _loss(draw: Sampler, x: Tensor) -> tuple[Tensor, TokenLoss, Criterion]:
    """MSE, or cross-entropy through an unembedding."""
    if draw.choice(True, False):
        y = draw.normal(*x.shape)
        return y, losses.mse(), lambda z: F.mse_loss(z.reshape(x.shape), y)
    U, labels = draw.normal(WIDTH, 5), torch.tensor([draw.integer(0, 4) for _ in range(x.shape[0] * x.shape[1])])
    return (
        labels.view(x.shape[:2]),
        losses.cross_entropy(U),
        lambda z: F.cross_entropy(z.reshape(-1, WIDTH) @ U, labels),
    )


# ---- by automatic differentiation


def hessian(p: Problem) -> Tensor:
    return oracle.hessian(lambda *w: p.criterion(p.output(*w)), p.weights)


def outer(p: Problem) -> Tensor:
    """Jᵀ (∂²ℓ/∂z²) J."""
    J = torch.cat([oracle.jacobian(p.output, p.weights, i) for i in range(len(p.weights))], 1)
    G = oracle.hessian(p.criterion, [p.output(*p.weights)])
    return J.mT @ G @ J


def functional(p: Problem) -> Tensor:
    """∂² Σ_k (∂ℓ/∂z_k) z_k, with ∂ℓ/∂z held fixed."""
    z = p.output(*p.weights)
    g = oracle.jacobian(p.criterion, [z], 0).view(z.shape)
    return oracle.hessian(lambda *w: (g * p.output(*w)).sum(), p.weights)


def by_input(p: Problem) -> Tensor:
    return oracle.hessian(lambda x: p.criterion(p.forward(x, *p.weights)), [p.x])


# ---- in closed form


def pairs(p: Problem) -> Tensor:
    """The matrix put together from the block of every pair of groups."""
    op = p.closed
    out, entries = torch.zeros(op.shape, dtype=op.dtype), torch.arange(op.shape[0])
    places = {name: op.space.resolve(name).take(entries) for name in op.groups}
    for a, b in product(op.groups, op.groups):
        out[places[a][:, None], places[b]] = to_dense(op.block(a, b))
    return out


def products(p: Problem) -> Tensor:
    op = p.closed
    return op @ torch.eye(op.shape[0], dtype=op.dtype)


def summary(p: Problem) -> Tensor:
    """Diagonal and Frobenius norm, without the matrix."""
    return torch.cat([diagonal(p.closed), torch.tensor([frobenius(p.closed)], dtype=torch.float64)])


def _summary(p: Problem) -> Tensor:
    H = hessian(p)
    return torch.cat([H.diagonal(), H.norm()[None]])


def all_bounds(p: Problem) -> Tensor:
    """Of every pair of groups, and of the whole."""
    found = p.closed.bounds(norms=False)
    return torch.cat([found.bound.values_.flatten(), torch.tensor([found.whole], dtype=torch.float64)])


def _norms(p: Problem) -> Tensor:
    """The spectral norms that are bounded, less what is rounding in H."""
    H, entries = hessian(p), torch.arange(p.closed.shape[0])
    places = [p.closed.space.resolve(name).take(entries) for name in p.closed.groups]
    blocks = [H[a][:, b] for a, b in product(places, places)]
    found = torch.stack([torch.linalg.matrix_norm(each, 2) for each in [*blocks, H]])
    return (found - 1e-12 * found[-1]).clamp_min(0)


def _block(
    name: str, says: str, closed: Callable[[Problem], Tensor], truth: Callable[[Problem], Tensor]
) -> Statement[Problem]:
    return Statement(f"Block · {name}", says, sample_block, closed, truth)


register(
    _block("H", "Σ_t straight and crossed Kronecker terms", lambda p: to_dense(p.closed), hessian),
    _block("H(a,b)", "every pair of groups of parameters, block by block", pairs, hessian),
    _block("H_o", "Jᵀ G J", lambda p: to_dense(p.closed.outer), outer),
    _block("H_f", "Σ_k g_k ∂²z_k", lambda p: to_dense(p.closed.functional), functional),
    _block("H v", "tangents forwards, cotangents backwards", products, hessian),
    _block("diag H, ‖H‖_F", "from the terms, without the matrix", summary, _summary),
    Statement("Block · ‖H(a,b)‖", "≤ its bound, every pair and the whole", sample_block, all_bounds, _norms, excess),
    _block("∂²/∂x²", "the Hessian in the tokens", lambda p: to_dense(p.closed.input), by_input),
    Statement("Encoder layer · H", "nn.TransformerEncoderLayer", sample_encoder, lambda p: to_dense(p.closed), hessian),
    Statement("Encoder layer · H(a,b)", "every pair of groups", sample_encoder, pairs, hessian),
)
