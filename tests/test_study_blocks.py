"""Norms of the blocks of a layer: exact, probed, and those of the dense Hessian."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute import zoo
from evolute.errors import StudyError
from evolute.studies.blocks import exact_norms, layers, probed_norms

LETTERS = ("Q", "K", "V", "O", "W1")


@pytest.fixture(scope="module")
def model() -> zoo.GPT:
    return zoo.GPT(12, 17, 4, norm="none", activation="gelu", seed=0).double()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    samples = zoo.addition(train=3, test=1).train
    return samples.x, samples.y


@pytest.fixture(scope="module")
def dense(model: zoo.GPT, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """H by torch.func alone, G from the Jacobian of the logits, cut into blocks of names of parameters."""
    names, values = zip(*model.named_parameters(), strict=True)
    sizes = [value.numel() for value in values]
    x, y = batch
    kept = y.flatten() != -100

    def logits(flat: Tensor) -> Tensor:
        weights = {n: f.view_as(v) for n, v, f in zip(names, values, flat.split(sizes), strict=True)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.func.functional_call(model, weights, (x,)).flatten(0, 1)[kept]

    flat = torch.cat([value.detach().flatten() for value in values])
    H = torch.func.hessian(lambda w: nn.functional.cross_entropy(logits(w), y.flatten()[kept]))(flat)
    J, p = torch.func.jacfwd(logits)(flat), logits(flat).softmax(-1)
    bend = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    G = torch.einsum("tvi,tvw,twj->ij", J, bend, J) / kept.sum()
    return {"H": H, "H_o": G, "H_f": H - G, "sizes": torch.tensor(sizes), "names": torch.zeros(0)}


def truth(dense: dict[str, Tensor], model: nn.Module, part: str, a: str, b: str) -> float:
    names = [name.removesuffix(".weight") for name, _ in model.named_parameters()]
    cuts = [0, *dense["sizes"].cumsum(0).tolist()]
    i, j = names.index(a), names.index(b)
    return float(dense[part][cuts[i] : cuts[i + 1], cuts[j] : cuts[j + 1]].norm())


def test_letters_name_the_weights_of_each_layer() -> None:
    model = zoo.GPT(12, 17, 8, layers=2, gated=True, seed=0)
    assert [*layers(model)[1]] == ["Q", "K", "V", "O", "W1", "Wg", "W2", "N1", "N2"]
    assert layers(model)[1]["V"] == "layers.1.attn.v"
    assert layers(zoo.AttentionOnly(4, layers=2, seed=0))[0] == {x: f"layers.0.attn.{x.lower()}" for x in "QKV"}
    assert layers(zoo.MLP([4, 3, 2], seed=0)) == [{"W": "layers.0"}, {"W": "layers.1"}]
    with pytest.raises(StudyError, match="Linear has none that are known"):
        layers(nn.Linear(2, 2))


def test_exact_norms_are_those_of_the_dense_blocks(
    model: zoo.GPT, batch: tuple[Tensor, Tensor], dense: dict[str, Tensor]
) -> None:
    x, y = batch
    tokens = (model.embed(x) + model.position.weight).detach()
    H = ev.closed_form(model.layers[0], tokens, y, loss=ev.losses.cross_entropy(model.unembed))
    names = layers(model)[0]
    found = exact_norms(H, {"Q": "q", "K": "k", "V": "v", "O": "o", "W1": "w1"})
    for block, part in found:
        a, *b = block.split(",")
        assert found[block, part].value == pytest.approx(
            truth(dense, model, part, names[a], names[b[0] if b else a]), rel=1e-9, abs=1e-14
        )
    assert len(found) == 15 * 3


def test_probed_norms_are_those_of_the_dense_blocks_within_their_errors(
    model: zoo.GPT, batch: tuple[Tensor, Tensor], dense: dict[str, Tensor]
) -> None:
    """400 probes: 4 standard errors are some percent; a block taken for its neighbour is off by far more."""
    objective, names = ev.Objective(model, [batch], ev.Loss(*zoo.cross_entropy)), layers(model)[0]
    parts = ev.GaussNewton(objective), ev.FunctionalHessian(objective)
    found = probed_norms(*parts, {x: names[x] for x in LETTERS}, probes=400, seed=1)
    for block, part in found:
        a, *b = block.split(",")
        norm, expected = found[block, part], truth(dense, model, part, names[a], names[b[0] if b else a])
        assert abs(norm.value - expected) <= 4 * norm.error + 1e-14
        assert norm.error <= 0.1 * expected + 1e-14
    one = probed_norms(*parts, {"Q": names["Q"]}, probes=1, seed=1)
    assert math.isinf(one["Q", "H"].error)
