"""Recurrences of the zoo against their closed forms, the past alone, and derivatives of second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute import zoo
from evolute.errors import DataError, ModelError
from evolute.zoo.linear_recurrence import LinearRecurrence, fading_mean
from evolute.zoo.selective_scan import STEPS, SelectiveScan, selective_scan

D = torch.float64
MIXERS = (lambda: SelectiveScan(4, states=3), lambda: LinearRecurrence(4))
MODELS = (zoo.StateSpace, zoo.LinearRecurrent)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D)


def scan_arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return drawn(2, 5, 3), drawn(2, 5, 3).exp(), -drawn(3, 2).exp(), drawn(2, 5, 2), drawn(2, 5, 2)


def mean_arguments() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return drawn(2, 5, 3), drawn(2, 5, 3), drawn(3).exp(), drawn(3)


def scan_as_a_sum(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y_t = Σ_{s ≤ t} C_t · exp(A (T_t − T_s)) Δ_s u_s B_s, T the cumulative sum of Δ."""
    T = delta.cumsum(1)
    fading = torch.exp(A * (T[:, :, None] - T[:, None])[..., None])  # (B, t, s, d, N)
    past = torch.ones(u.shape[1], u.shape[1], dtype=D).tril()
    return torch.einsum("ts,btsdn,btn,bsd,bsn->btd", past, fading.clamp(max=1e9), C, delta * u, B)


def mean_as_softmax(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Attention of every feature by itself, with scores that fall with the distance."""
    L = k.shape[1]
    t, s = torch.arange(L)[:, None], torch.arange(L)
    scores = k[:, None] - (t - 1 - s)[..., None] * decay  # (B, t, s, d)
    scores = torch.where((s == t)[..., None], (k + bonus)[:, None], scores)
    scores = scores.masked_fill((s > t)[..., None], -torch.inf)
    return (scores.softmax(2) * v[:, None]).sum(2)


def test_the_scan_is_its_closed_form() -> None:
    found = scan_arguments()
    assert torch.allclose(selective_scan(*found), scan_as_a_sum(*found), rtol=1e-12, atol=1e-13)


def test_the_fading_mean_is_a_softmax_of_distances() -> None:
    found = mean_arguments()
    assert torch.allclose(fading_mean(*found), mean_as_softmax(*found), rtol=1e-12, atol=1e-13)


def test_large_keys_do_not_overflow() -> None:
    k, v, decay, bonus = mean_arguments()
    assert torch.allclose(fading_mean(k + 2000, v, decay, bonus), fading_mean(k, v, decay, bonus), rtol=1e-9)


@pytest.mark.parametrize(
    ("function", "oracle", "arguments"),
    [(selective_scan, scan_as_a_sum, scan_arguments), (fading_mean, mean_as_softmax, mean_arguments)],
)
def test_second_derivatives_are_those_of_the_closed_form(
    function: Callable[..., Tensor], oracle: Callable[..., Tensor], arguments: Callable[[], tuple[Tensor, ...]]
) -> None:
    """A maximum that is taken out and not put back, or a constant that is none, would differ here."""
    found = tuple(each[:1, :3] if each.dim() == 3 else each for each in arguments())
    where = tuple(range(len(found)))

    def hessian(f: Callable[..., Tensor]) -> list[Tensor]:
        rows: Any = torch.func.hessian(lambda *x: f(*x).pow(2).sum(), argnums=where)(*found)
        return [block for row in rows for block in row]

    for ours, theirs in zip(hessian(function), hessian(oracle), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make", MIXERS)
def test_mixers_can_be_differentiated_twice(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    mixer, x = make().to(D), drawn(1, 3, 4).requires_grad_()
    names, weights = zip(*mixer.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(mixer, dict(zip(names, weights, strict=True)), x).square().sum()

    assert torch.autograd.gradcheck(run, (x, *weights))
    assert torch.autograd.gradgradcheck(run, (x, *weights))


@pytest.mark.parametrize("make", MIXERS)
def test_a_token_changes_itself_and_what_comes_after(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    mixer, x = make().to(D), drawn(2, 6, 4)
    changed = x.clone()
    changed[:, 3] += drawn(2, 4)
    difference = (mixer(changed) - mixer(x)).abs().amax((0, 2))
    assert (difference[:3] == 0).all() and (difference[3:] > 1e-9).all()


def test_the_first_steps_of_a_scan_are_small() -> None:
    steps = nn.functional.softplus(SelectiveScan(64).step.bias)
    assert steps.min() >= 0.99 * STEPS[0] and steps.max() <= 1.01 * STEPS[1]


@pytest.mark.parametrize("kind", MODELS)
def test_the_hessian_of_the_engine_is_that_of_torch(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(5, width=4, hidden=4, seed=0).to(D)
    batch = (torch.randint(5, (2, 4)), torch.randint(5, (2, 4)))
    H = ev.Hessian(ev.Objective(model, [batch], ev.Loss(*zoo.cross_entropy)))
    names, weights = zip(*model.named_parameters(), strict=True)

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([w.numel() for w in weights])
        moved = {n: p.view_as(w) for n, p, w in zip(names, pieces, weights, strict=True)}
        logits = torch.func.functional_call(model, moved, batch[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    # reverse mode twice: PyTorch's forward mode through a fused LayerNorm is wrong
    oracle: Any = torch.autograd.functional.hessian(loss, torch.cat([w.detach().flatten() for w in weights]))
    assert torch.allclose(ev.to_dense(H), oracle, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", MODELS)
def test_models_learn_what_only_the_past_can_tell(kind: Any) -> None:
    """The token to predict is the one before: a model without a memory stays at log 4."""
    torch.manual_seed(0)
    x = torch.randint(4, (64, 8))
    y = torch.cat([torch.full((64, 1), -100), x[:, :-1]], 1)
    model = kind(4, width=16, seed=0)
    result = zoo.train(model, [(x, y)], steps=120, lr=1e-2, progress=False)
    assert result.losses[0] > 1.2 and result.loss < 0.7


@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_decides_the_weights_and_nothing_else(kind: Any) -> None:
    before = torch.random.get_rng_state()
    one, same, other = kind(5, 4, seed=0), kind(5, 4, seed=0), kind(5, 4, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.unembed.weight, same.unembed.weight)
    assert not torch.equal(one.unembed.weight, other.unembed.weight)


@pytest.mark.parametrize("kind", MODELS)
def test_what_cannot_be_made_or_read_says_why(kind: Any) -> None:
    with pytest.raises(ModelError, match="a block without attention has no option 'sink'; it takes hidden, norm_kind"):
        kind(5, 4, sink=1.0)
    with pytest.raises(ModelError, match="no option 'hiden': did you mean 'hidden'"):
        kind(5, 4, hiden=3)
    with pytest.raises(ModelError, match="layers must be a positive whole number, got 0"):
        kind(5, 4, 0)
    with pytest.raises(DataError, match=r"expected tokens \(B, L\) with L ≥ 1, got shape \(3,\)"):
        kind(5, 4, seed=0)(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ModelError, match="states must be a positive whole number, got 0"):
        zoo.StateSpace(5, 4, states=0)
