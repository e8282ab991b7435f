"""What growth is measured on: four models whose inputs have the size σ, and the norms of their blocks, layer by layer.

Exact without a norm at depth 1, and in the linear MLP; else from products with random vectors, the same for each σ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from evolute.calculus import losses
from evolute.calculus.closed_form import ClosedForm, closed_form
from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import FunctionalHessian, GaussNewton
from evolute.studies.blocks import CLOSED, Norm, Norms, exact_norms, layers, probed_norms
from evolute.studies.study import Cell
from evolute.zoo import GPT, MLP, AttentionOnly, addition, cross_entropy
from evolute.zoo.config import Norm as Place
from evolute.zoo.data import Samples

LETTERS = ("Q", "K", "V", "O")
LENGTH = 17  # tokens of a sum that a model sees, and of the random sequences beside it
EPS = 1e-12  # of the norms: so little that a token of size 0.01 has variance


def block_norms_by_layer(cell: Cell) -> list[Norms]:
    """One table per layer, of the model of the cell at its depth and σ."""
    return MODELS[cell["model"]](cell)


# ---- digit addition, cross-entropy on the answer


def gpt(cell: Cell, norm: Place) -> tuple[GPT, Samples]:
    """In float64; embeddings are drawn with standard deviation σ, and there are no positions."""
    data = addition(train=cell["sequences"], test=1, seed=cell["seed"])
    shape = (data.vocabulary, data.length, cell["width"], 1, cell["depth"])
    model = GPT(*shape, norm=norm, activation="relu", eps=EPS, seed=cell["seed"]).double()
    with torch.no_grad():
        model.position.weight.zero_()
        model.embed.weight.copy_(normal(cell, *model.embed.weight.shape) * cell["sigma"])
    return model, data.train


def closed_gpt(model: GPT, samples: Samples) -> ClosedForm:
    """The Hessian of the only block, without a norm after it: its tokens are embeddings, its outputs are unembedded."""
    loss = losses.cross_entropy(model.unembed)
    return closed_form(model.layers[0], model.embed(samples.x).detach(), samples.y, loss)


def _gpt(cell: Cell, norm: Place) -> list[Norms]:
    model, samples = gpt(cell, norm)
    if cell["depth"] == 1 and norm == "none":  # H_o of the closed form would take a last norm for a part of the loss
        return [exact_norms(closed_gpt(model, samples), {letter: CLOSED[letter] for letter in LETTERS})]
    return _probed(Objective(model, [(samples.x, samples.y)], Loss(*cross_entropy)), model, cell)


# ---- random sequences and targets, mean squared error


def _linear(cell: Cell) -> list[Norms]:
    """Attention without softmax, residual, W_O and feed-forward."""
    model = AttentionOnly(cell["width"], 1, cell["depth"], attention="linear", seed=cell["seed"]).double()
    x, y = _random(cell, cell["sequences"], LENGTH, cell["width"])
    if cell["depth"] == 1:
        return [exact_norms(closed_form(model.layers[0], x, y), {letter: CLOSED[letter] for letter in "QKV"})]
    return _probed(Objective(model, [(x, y)], nn.MSELoss()), model, cell)


def _mlp(cell: Cell) -> list[Norms]:
    """H_ii = 2/N (aᵀa) ⊗ (Bᵀ B)ᵀ, with a the input of W_i, and B the product of all weights after it."""
    width = cell["width"]
    model = MLP([width] * (cell["depth"] + 1), "identity", bias=False, seed=cell["seed"]).double()
    x, _ = _random(cell, cell["sequences"] * LENGTH, width)
    weights = [weight.detach().mT for weight in model.parameters()]
    return [_kronecker(x, weights, place) for place in range(len(weights))]


def _kronecker(x: Tensor, weights: list[Tensor], place: int) -> Norms:
    before = torch.linalg.multi_dot([x, *weights[:place]]) if place else x
    after = torch.eye(x.shape[1], dtype=x.dtype)
    for weight in weights[place + 1 :]:
        after = after @ weight
    value = 2 / x.numel() * float((before.mT @ before).norm() * (after @ after.mT).norm())
    return {("W", part): Norm(known, 0.0) for part, known in (("H", value), ("H_o", value), ("H_f", 0.0))}


# ---- what they share


def _probed(objective: Objective, model: nn.Module, cell: Cell) -> list[Norms]:
    parts = GaussNewton(objective), FunctionalHessian(objective)
    found = [{letter: group for letter, group in each.items() if letter in LETTERS} for each in layers(model)]
    return [probed_norms(*parts, letters, cell["probes"], cell["seed"]) for letters in found]


def _random(cell: Cell, *shape: int) -> tuple[Tensor, Tensor]:
    return normal(cell, *shape) * cell["sigma"], normal(cell, *shape, more=1)


def normal(cell: Cell, *shape: int, more: int = 0) -> Tensor:
    """The same for each σ."""
    generator = torch.Generator().manual_seed(1000 * cell["seed"] + more)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


MODELS: Mapping[str, Callable[[Cell], list[Norms]]] = {
    "softmax": lambda cell: _gpt(cell, "none"),
    "linear": _linear,
    "pre_norm": lambda cell: _gpt(cell, "pre"),
    "mlp": _mlp,
}
