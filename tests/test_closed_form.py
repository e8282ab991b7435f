"""ev.closed_form: the Hessian of a whole block, against autodiff, finite differences and the engine."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import evolute as ev
import oracles
from evolute.calculus.closed_block import ClosedBlock
from evolute.calculus.closed_form import ClosedForm
from evolute.calculus.losses import TokenLoss
from evolute.linop import exact
from evolute.zoo import Block, BlockConfig
from families import Family

D = torch.float64
TIGHT = 1e-12

Criterion = Callable[[Tensor, Tensor], Tensor]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def shaken(layer: nn.Module, seed: int = 0, scale: float = 0.3) -> Any:
    """In float64 and evaluation mode, every parameter away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.double().eval().parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=D))
    return layer


def encoder(seed: int = 0, **options: Any) -> nn.TransformerEncoderLayer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return shaken(nn.TransformerEncoderLayer(4, 2, 5, **{"batch_first": True, **options}), seed)


def block(seed: int = 0, **options: Any) -> Block:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return shaken(Block(BlockConfig(width=4, **{"heads": 2, "hidden": 5, **options})), seed)


def data(batch: int = 2, length: int = 3, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(batch, length, d, seed=seed + 1), normal(batch, length, d, seed=seed + 2)


def hessian(layer: nn.Module, run: Callable[..., Tensor]) -> Tensor:
    """∂²ℓ/∂w² over the trainable parameters, in reverse over reverse; `run` calls the layer that it is given."""
    trainable = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}

    def loss(w: Tensor) -> Tensor:
        pieces = w.split([p.numel() for p in trainable.values()])
        named = {name: each.view(p.shape) for (name, p), each in zip(trainable.items(), pieces, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):
            return run(lambda *a, **k: torch.func.functional_call(layer, named, a, k))

    flat = torch.cat([p.flatten() for p in trainable.values()])
    with torch.enable_grad():
        found = torch.autograd.functional.hessian(loss, flat, vectorize=True)
    assert isinstance(found, Tensor)
    return found


def agree(ours: Tensor, theirs: Tensor, tolerance: float = TIGHT, scale: float | None = None) -> None:
    assert ours.shape == theirs.shape
    size = float(theirs.norm()) if scale is None else scale
    assert float((ours - theirs).norm()) <= tolerance * size, f"{float((ours - theirs).norm()) / size:.1e}"


def check(op: ClosedForm, truth: Tensor) -> None:
    """Every way to ask for what H is."""
    size = float(truth.norm())
    V = normal(len(truth), 3, seed=5)
    dense, outer, functional = (ev.to_dense(each) for each in (op, op.outer, op.functional))
    agree(dense, truth)
    agree(op @ V, truth @ V)
    agree(op @ V[:, 0], truth @ V[:, 0])
    for part, matrix in ((op.outer, outer), (op.functional, functional)):
        agree(part @ V, matrix @ V, scale=size * float(V.norm()))
    agree(outer + functional, truth)
    agree(dense, dense.T)
    assert float(torch.linalg.eigvalsh(outer)[0]) >= -1e-12 * size, "H_o is positive semidefinite"
    agree(exact.diagonal(op), truth.diagonal(), scale=size)
    assert exact.trace(op) == pytest.approx(float(truth.trace()), rel=1e-10, abs=1e-11 * size)
    assert exact.frobenius(op) == pytest.approx(size, rel=1e-10)


def check_pairs(op: ClosedForm, truth: Tensor) -> None:
    """Each block between two groups, by products, adjoint products, entries and norm."""
    size = float(truth.norm())
    places = {name: op.space.resolve(name).take(torch.arange(len(truth))) for name in op.groups}
    for a, b in itertools.product(op.groups, op.groups):
        B, T = op.block(a, b), truth[places[a]][:, places[b]]
        assert isinstance(B, ClosedBlock)
        agree(B @ normal(B.shape[1], 2), T @ normal(B.shape[1], 2), scale=size)
        agree(B.T @ normal(B.shape[0], 2), T.T @ normal(B.shape[0], 2), scale=size)
        agree(ev.to_dense(B), T, scale=size)
        assert exact.frobenius(B) == pytest.approx(float(T.norm()), rel=1e-9, abs=1e-12 * size)


def mse(layer: nn.Module, x: Tensor, y: Tensor, **given: Any) -> Tensor:
    return hessian(layer, lambda call: F.mse_loss(call(x, **given), y))


# ---------------------------------------------------------------- nn.TransformerEncoderLayer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.GELU(approximate="tanh"), torch.tanh])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer(norm_first: bool, activation: Any, bias: bool) -> None:
    layer, (x, y) = encoder(norm_first=norm_first, activation=activation, bias=bias), data()
    check(ev.closed_form(layer, x, y), mse(layer, x, y))


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_every_pair_of_groups(norm_first: bool) -> None:
    layer, (x, y) = encoder(norm_first=norm_first, activation="gelu"), data()
    op = ev.closed_form(layer, x, y)
    assert set(op.groups) == {
        *(f"{name}{end}" for name in ("q", "k", "v", "o", "w1", "w2") for end in ("", ".bias")),
        *(f"norm{i}.{end}" for i in (1, 2) for end in ("weight", "bias")),
    }
    check_pairs(op, mse(layer, x, y))


def test_sequences_first_and_a_single_sequence() -> None:
    first, last, (x, y) = encoder(), encoder(batch_first=False), data()
    truth = mse(first, x, y)
    agree(ev.to_dense(ev.closed_form(last, x.transpose(0, 1), y.transpose(0, 1))), truth)
    for layer in (first, last):
        agree(ev.to_dense(ev.closed_form(layer, x[0], y[0])), mse(first, x[:1], y[:1]))


def test_padding_of_a_single_sequence() -> None:
    layer, (x, y), padding = encoder(), data(1), torch.tensor([False, False, True])
    truth = mse(layer, x, y, src_key_padding_mask=padding[None])
    agree(ev.to_dense(ev.closed_form(layer, x[0], y[0], padding=padding)), truth)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["causal", "causal, added", "scores", "padding", "both"])
def test_masks(kind: str, norm_first: bool) -> None:
    layer, (x, y) = encoder(norm_first=norm_first), data()
    hidden = torch.ones(3, 3).triu(1).bool()
    mask = {
        "causal": hidden,
        "causal, added": torch.zeros(3, 3, dtype=D).masked_fill(hidden, -math.inf),
        "scores": normal(3, 3),
        "padding": None,
        "both": hidden,
    }[kind]
    padding = torch.tensor([[0, 0, 0], [0, 1, 1]]).bool() if kind in ("padding", "both") else None
    truth = mse(layer, x, y, src_mask=mask, src_key_padding_mask=padding)
    check(ev.closed_form(layer, x, y, mask=mask, padding=padding), truth)


def test_many_tokens_for_few_features_and_few_for_many() -> None:
    """Frobenius norms by Gram matrices over tokens, and by entries."""
    for batch, length, d in ((1, 2, 4), (8, 5, 4)):
        layer, (x, y) = encoder(activation="gelu"), data(batch, length, d)
        truth = mse(layer, x, y)
        op = ev.closed_form(layer, x, y)
        check(op, truth)
        check_pairs(op, truth)


def test_other_epsilons_and_norms_without_an_affine_map() -> None:
    layer, (x, y) = encoder(layer_norm_eps=0.3), data()
    layer.norm1 = nn.LayerNorm(4, eps=0.0, elementwise_affine=False).double()
    layer.norm2 = nn.LayerNorm(4, eps=1.0, bias=False).double()
    op = ev.closed_form(layer, x, y)
    assert "norm1.weight" not in op.groups and "norm2.bias" not in op.groups
    check(op, mse(layer, x, y))


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norms_of_their_own_epsilon(affine: bool) -> None:
    layer, (x, y) = encoder(dropout=0.0), data()
    layer.norm1 = nn.RMSNorm(4, elementwise_affine=affine).double()  # pyright: ignore[reportAttributeAccessIssue]
    layer.norm2 = nn.RMSNorm(4, eps=0.1, elementwise_affine=affine).double()  # pyright: ignore[reportAttributeAccessIssue]
    layer.train()  # in evaluation mode PyTorch's fast path wants LayerNorm
    check(ev.closed_form(layer, x, y), mse(layer, x, y))


@pytest.mark.parametrize("activation", [functools.partial(F.silu, inplace=True), nn.Sequential(nn.ReLU(inplace=True))])
def test_activations_that_work_in_place_are_recognised(activation: Any) -> None:
    layer, (x, y) = encoder(activation=activation), data()
    agree(ev.to_dense(ev.closed_form(layer, x, y)), mse(layer, x, y))


def test_a_layer_of_an_encoder_with_saturated_attention() -> None:
    stack, (x, y) = nn.TransformerEncoder(encoder(activation="gelu"), 2, enable_nested_tensor=False), data(1, 5)
    layer = shaken(stack.layers[1], seed=3, scale=4.0)
    check(ev.closed_form(layer, x, y), mse(layer, x, y))


# ---------------------------------------------------------------- blocks of the zoo

CONFIGS: dict[str, dict[str, Any]] = {
    "post": {},
    "post, gated, biased": {"gated": True, "bias": True, "activation": "silu"},
    "pre, rms, causal": {"norm": "pre", "norm_kind": "rms", "causal": True, "activation": "gelu_tanh"},
    "pre, sink": {"norm": "pre", "sink": 1.3, "bias": True, "activation": "gelu"},
    "none, linear, biased": {"norm": "none", "attention": "linear", "bias": True},
    "sigmoid, biased, sink": {"attention": "sigmoid", "bias": True, "sink": -0.7, "norm": "pre", "gated": True},
    "relu, causal, one head": {"attention": "relu", "causal": True, "heads": 1, "residual": False},
    "attention alone": {"mlp": False, "output": False, "norm": "none", "residual": False},
    "attention and norm": {"mlp": False, "norm_kind": "rms", "bias": True, "attention": "linear"},
    "four heads": {"heads": 4, "output": False, "bias": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks(name: str) -> None:
    layer, (x, y) = block(**CONFIGS[name]), data()
    truth, op = mse(layer, x, y), ev.closed_form(layer, x, y)
    check(op, truth)
    check_pairs(op, truth)


options = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post", "none"]),
        "norm_kind": st.sampled_from(["layer", "rms"]),
        "attention": st.sampled_from(["softmax", "linear", "sigmoid", "relu"]),
        "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]),
        "heads": st.sampled_from([1, 2, 4]),
        "hidden": st.integers(1, 3),
        **{name: st.booleans() for name in ("gated", "residual", "mlp", "output", "bias", "causal")},
        "sink": st.sampled_from([0.0, 1.5]),
    }
)


@settings(max_examples=40)
@given(options, st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_the_grid_of_options(config: dict[str, Any], batch: int, length: int, seed: int) -> None:
    layer, (x, y) = block(seed, **config), data(batch, length, seed=seed)
    truth, op = mse(layer, x, y), ev.closed_form(layer, x, y)
    size = max(1e-6, float(truth.norm()))
    agree(ev.to_dense(op), truth, scale=size)
    agree(op @ normal(len(truth), 2), truth @ normal(len(truth), 2), scale=size)
    agree(ev.to_dense(op.outer) + ev.to_dense(op.functional), truth, scale=size)
    agree(exact.diagonal(op), truth.diagonal(), scale=size)
    assert exact.frobenius(op) == pytest.approx(float(truth.norm()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("attention", ["softmax", "linear", "sigmoid"])
def test_masks_of_blocks(attention: str) -> None:
    """Padding, and numbers that are added; PyTorch's sense in the closed form, the zoo's in its forward."""
    layer, (x, y) = block(attention=attention, bias=True, causal=True), data()
    padding = torch.tensor([[0, 0, 0], [0, 0, 1]]).bool()
    check(ev.closed_form(layer, x, y, padding=padding), mse(layer, x, y, mask=padding))
    added = normal(3, 3)
    added[2, 0] = -math.inf
    check(ev.closed_form(layer, x, y, mask=added), mse(layer, x, y, mask=added))


# ---------------------------------------------------------------- losses


def _quartic(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).pow(4).sum(-1)


def _losses() -> dict[str, tuple[TokenLoss | nn.Module, Criterion, Tensor]]:
    """Loss, the same in PyTorch, and targets."""
    U, bias, y = normal(4, 6, seed=3), normal(6, seed=4), normal(2, 3, 4, seed=2)
    labels = torch.tensor([[0, 5, -100], [2, -100, -100]])
    head = nn.Linear(4, 6, bias=False).double()
    formulas = ev.losses.token(
        _quartic, lambda z, y: 4 * (z - y) ** 3, lambda z, y: torch.diag_embed(12 * (z - y) ** 2)
    )

    def cross_entropy(U: Tensor, bias: Tensor | None) -> Criterion:
        return lambda z, y: F.cross_entropy((z @ U + (0 if bias is None else bias)).flatten(0, 1), y.flatten())

    return {
        "mse module": (nn.MSELoss(), F.mse_loss, y),
        "cross-entropy": (ev.losses.cross_entropy(U, bias), cross_entropy(U, bias), labels),
        "cross-entropy, module": (
            ev.losses.cross_entropy(head),
            cross_entropy(head.weight.detach().T, None),
            labels.clamp_min(0),
        ),
        "token": (formulas, lambda z, y: _quartic(z, y).mean(), y),
        "autodiff": (
            ev.losses.autodiff(lambda z, y: torch.log(torch.cosh(z - y)).prod()),
            lambda z, y: torch.log(torch.cosh(z - y)).prod(-1).mean(),
            y,
        ),
        "autodiff, one number per token": (
            ev.losses.autodiff(lambda z, y: (z.sum() - y).exp()),
            lambda z, y: (z.sum(-1) - y).exp().mean(),
            y[..., 0],
        ),
    }


@pytest.mark.parametrize("name", _losses())
@pytest.mark.parametrize("norm_first", [False, True])
def test_losses(name: str, norm_first: bool) -> None:
    loss, criterion, y = _losses()[name]
    layer, (x, _) = encoder(norm_first=norm_first, activation="gelu"), data()
    op = ev.closed_form(layer, x, y, loss)
    truth = hessian(layer, lambda call: criterion(call(x), y))
    if "autodiff" in name:  # not convex: H_o need not be positive
        agree(ev.to_dense(op), truth)
        agree(ev.to_dense(op.outer) + ev.to_dense(op.functional), truth)
    else:
        check(op, truth)
    assert op.value == pytest.approx(criterion(layer(x), y).item())


def test_cross_entropy_of_a_single_sequence_and_of_sequences_first() -> None:
    U, y = normal(4, 6, seed=3), torch.tensor([[0, 5, 1], [2, 3, -100]])
    (x, _), loss = data(), ev.losses.cross_entropy(U)
    whole = ev.to_dense(ev.closed_form(encoder(), x, y, loss))
    agree(ev.to_dense(ev.closed_form(encoder(batch_first=False), x.transpose(0, 1), y.T, loss)), whole)
    agree(
        ev.to_dense(ev.closed_form(encoder(), x[0], y[0], loss)),
        ev.to_dense(ev.closed_form(encoder(), x[:1], y[:1], loss)),
    )


def test_losses_that_close_over_what_is_trained() -> None:
    """Their derivatives carry no graph."""
    W, bias, labels = nn.Parameter(normal(4, 6)), nn.Parameter(normal(6)), torch.tensor([[0, 5, -100], [2, 3, 1]])
    layer, (x, y) = encoder(), data()
    cases: list[tuple[TokenLoss, Tensor, Criterion]] = [
        (
            ev.losses.cross_entropy(W, bias),
            labels,
            lambda z, y: F.cross_entropy((z @ W.detach() + bias.detach()).flatten(0, 1), y.flatten()),
        ),
        (
            ev.losses.autodiff(lambda z, y: (z @ W).cosh().sum()),
            y,
            lambda z, y: (z @ W.detach()).cosh().sum() / 6,
        ),
    ]
    for loss, target, criterion in cases:
        op, truth = (
            ev.closed_form(layer, x, target, loss),
            hessian(layer, lambda call, c=criterion, t=target: c(call(x), t)),
        )
        check(op, truth)
        assert not any(each.requires_grad for each in (ev.to_dense(op), op @ normal(len(truth)), op.gradient()))


# ---------------------------------------------------------------- against other oracles


@pytest.mark.parametrize("norm_first", [False, True])
def test_against_finite_differences_and_the_engine(norm_first: bool) -> None:
    layer, (x, y) = encoder(norm_first=norm_first, activation="gelu"), data()
    objective, op = ev.Objective(layer, [(x, y)], nn.MSELoss()), ev.closed_form(layer, x, y)
    assert op.space.shapes == objective.space.shapes
    u = normal(op.shape[0])
    assert oracles.relative(op @ u, oracles.difference(objective, u)) < 1e-6
    for ours, theirs in (
        (op, ev.Hessian(objective)),
        (op.outer, ev.GaussNewton(objective)),
        (op.functional, ev.FunctionalHessian(objective)),
    ):
        agree(ev.to_dense(ours), ev.to_dense(theirs), scale=exact.frobenius(op))
    agree(op.gradient(), objective.gradient())


def test_against_forward_over_reverse_with_attention_and_norm_written_out() -> None:
    layer, (x, y) = encoder(), data()
    agree(ev.to_dense(ev.closed_form(layer, x, y)), oracles.hessian(Family(layer, [(x, y)], nn.MSELoss())))


# ---------------------------------------------------------------- what must hold


@pytest.mark.parametrize("attention", ["softmax", "linear", "sigmoid", "relu"])
def test_the_functional_block_of_the_values_vanishes(attention: str) -> None:
    """H_f(V,V) = 0 and H_f(O,O) = 0: where no map that bends comes after it, attention is linear in V."""
    layer, (x, y) = block(attention=attention, norm="none", mlp=False, bias=True), data()
    F = ev.closed_form(layer, x, y).functional
    for group in ("v", "v.bias", "o", "o.bias"):
        assert not ev.to_dense(F.block(group, group)).any()
    assert ev.to_dense(F.block("v", "o")).any()
    assert ev.to_dense(F.block("q", "q")).any() == (attention in ("softmax", "sigmoid"))


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_permuting_tokens_with_their_targets_changes_nothing(norm: str) -> None:
    layer, (x, y), order = block(norm=norm, bias=True), data(2, 4), torch.tensor([2, 0, 3, 1])
    agree(ev.to_dense(ev.closed_form(layer, x[:, order], y[:, order])), ev.to_dense(ev.closed_form(layer, x, y)), 1e-11)


def test_scale_invariant_weights_lie_in_the_null_space() -> None:
    """Z = LN(c W_O), without a residual, ε or bias: along W_O nothing moves, so J W_O = 0, and H_o W_O = 0."""
    layer, (x, y) = block(norm="post", mlp=False, residual=False, eps=0.0), data()
    op = ev.closed_form(layer, x, y)
    along = op.space.flatten({name: p.detach() * (name == "attn.o.weight") for name, p in layer.named_parameters()})
    assert float((op.outer @ along).norm()) < 1e-12 * exact.frobenius(op) * float(along.norm())
    assert abs(float(along @ (op @ along))) < 1e-12 * exact.frobenius(op) * float(along @ along)


def test_repeated_tokens_and_dead_features() -> None:
    """Rows of A are flat, second moments vanish, and no variance is left between them."""
    layer, (x, y) = encoder(), data()
    x = x[:, :1].expand(-1, 3, -1).clone()
    truth, op = mse(layer, x, y), ev.closed_form(layer, x, y)
    agree(ev.to_dense(op), truth)
    assert exact.frobenius(op.block("q", "q")) < 1e-12 * float(truth.norm())
    with torch.no_grad():
        layer.linear1.bias.fill_(-100.0)
    agree(ev.to_dense(ev.closed_form(layer, x, y)), mse(layer, x, y))
    assert not ev.to_dense(ev.closed_form(layer, x, y).block("w1", "w1")).any()


def test_rows_of_zero_variance() -> None:
    """Fine with ε; without it there is no derivative."""
    layer, (x, y) = block(norm="pre", eps=0.1), data()
    x[0, 1] = 2.0
    check(ev.closed_form(layer, x, y), mse(layer, x, y))
    with pytest.raises(ev.NonFiniteError, match="token 1 has zero variance and ε is 0"):
        ev.to_dense(ev.closed_form(block(norm="pre", eps=0.0), x, y))


def test_a_relu_exactly_at_its_kink_is_told_once() -> None:
    """The almost-everywhere Hessian, with φ′(0) = 0 as autograd has it."""
    layer, (x, y) = encoder(), data()
    with torch.no_grad():
        layer.linear1.weight[1], layer.linear1.bias[1] = 0.0, 0.0
    with pytest.warns(ev.CurvatureWarning, match="6 entries lie exactly at the kink of a ReLU") as told:
        op = ev.closed_form(layer, x, y)
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", ev.CurvatureWarning)
        agree(ev.to_dense(op), mse(layer, x, y))
        ev.closed_form(encoder(), x, y)


def test_float32_is_computed_as_given() -> None:
    """To about 1e-5 of the same in float64."""
    layer, (x, y) = encoder(norm_first=True, activation="gelu"), data()
    truth = mse(layer, x, y)
    op = ev.closed_form(layer.float(), x.float(), y.float())
    V = normal(len(truth), 2).float()
    assert ev.to_dense(op).dtype == (op @ V).dtype == torch.float32
    agree(ev.to_dense(op).double(), truth, 1e-5)
    agree((op @ V).double(), truth @ V.double(), 1e-5)
    assert exact.frobenius(op) == pytest.approx(float(truth.norm()), rel=1e-5)


def test_a_target_of_another_precision_is_taken_in_that_of_the_layer() -> None:
    layer, (x, y) = encoder().float(), data()
    op = ev.closed_form(layer, x.float(), y)
    assert (op @ torch.ones(op.shape[0])).dtype == ev.to_dense(op).dtype == torch.float32


def test_nothing_of_the_layer_is_changed() -> None:
    layer, (x, y) = encoder(), data()
    layer.train()
    before = {name: each.clone() for name, each in layer.state_dict().items()}
    with pytest.warns(
        ev.CurvatureWarning, match=r"training mode with dropout 0.1; closed forms are those of layer.eval"
    ):
        op = ev.closed_form(layer, x.requires_grad_(), y)
    assert not ev.to_dense(op).requires_grad and x.grad is None
    assert layer.training and all(p.grad is None and p.requires_grad for p in layer.parameters())
    assert all(torch.equal(each, before[name]) for name, each in layer.state_dict().items())
    agree(ev.to_dense(op), mse(layer.eval(), x.detach(), y))


def test_an_operator_belongs_to_the_point_it_was_made_at() -> None:
    """Training goes on; products and entries, however late, are those of the weights and tokens of the call."""
    layer, (x, _), head = encoder(), data(), nn.Linear(4, 6).double()
    labels = torch.tensor([[0, 5, -100], [2, 3, 1]])
    truth = hessian(layer, lambda call: F.cross_entropy(head(call(x)).flatten(0, 1), labels.flatten()))
    op = ev.closed_form(layer, x, labels, ev.losses.cross_entropy(head))
    with torch.no_grad():
        for each in (x, labels, *layer.parameters(), *head.parameters()):
            each.mul_(2)
    check(op, truth)


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize("frozen", ["linear1", "self_attn", "norm1", "self_attn.in_proj_bias", "linear2.weight"])
def test_frozen_parameters_are_not_there(frozen: str) -> None:
    layer, (x, y) = encoder(activation="gelu"), data()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    op, truth = ev.closed_form(layer, x, y), mse(layer, x, y)
    assert op.space.names == tuple(name for name, p in layer.named_parameters() if p.requires_grad)
    check_pairs(op, truth)
    agree(ev.to_dense(op), truth)
    agree(op @ normal(len(truth)), truth @ normal(len(truth)))
    agree(exact.diagonal(op), truth.diagonal())


def test_parts_that_cut_through_a_weight() -> None:
    """Rows of a packed weight, columns of another: no Kronecker terms of their own, and right."""
    layer, (x, y) = encoder(), data()
    op, truth = ev.closed_form(layer, x, y), mse(layer, x, y)
    index = op.space.unflatten(torch.arange(len(truth)))
    cuts = [
        ev.Part("self_attn.in_proj_weight", 0, 1, 3),
        ev.Part("linear1.weight", 1, 0, 2),
        ev.Part("linear2.weight", 0, 1, 2),
        ev.Part("norm1.weight", 0, 1, 3),
    ]
    for a, b in itertools.product(cuts, [*cuts, ev.Part("self_attn.in_proj_weight"), ev.Part("linear1.bias")]):
        B = op.block(a, b)
        T = truth[a.of(index[a.name]).flatten()][:, b.of(index[b.name]).flatten()]
        agree(ev.to_dense(B), T, scale=float(truth.norm()))
        agree(B.T @ normal(B.shape[0]), T.T @ normal(B.shape[0]), scale=float(truth.norm()))


def test_one_head_of_a_packed_weight_is_a_block_of_its_own() -> None:
    layer, (x, y) = encoder(), data()
    op, truth = ev.closed_form(layer, x, y), mse(layer, x, y)
    head = ev.Part("self_attn.in_proj_weight", 0, 10, 12)  # the second head of v
    B, places = op.block(head, "k"), torch.arange(len(truth))[: 12 * 4].view(12, 4)
    assert isinstance(B, ClosedBlock)
    agree(ev.to_dense(B), truth[places[10:12].flatten()][:, places[4:8].flatten()])


def test_several_groups_in_any_order() -> None:
    layer, (x, y) = encoder(activation="gelu"), data()
    op, truth = ev.closed_form(layer, x, y), mse(layer, x, y)
    rows, cols = ["w2", "norm1.bias", "q", "k.bias"], ["norm2.weight", "v", "w2", "o.bias"]
    places = [op.space.resolve(names).take(torch.arange(len(truth))) for names in (rows, cols)]
    T = truth[places[0]][:, places[1]]
    B, R = op.block(rows, cols), op.restrict(rows)
    agree(ev.to_dense(B), T)
    agree(B @ normal(B.shape[1]), T @ normal(B.shape[1]))
    agree(B.T @ normal(B.shape[0]), T.T @ normal(B.shape[0]))
    assert exact.frobenius(B) == pytest.approx(float(T.norm()))
    agree(ev.to_dense(R), truth[places[0]][:, places[0]])
    agree(exact.diagonal(R), truth.diagonal()[places[0]])


def test_estimates_of_a_closed_form_are_exact_and_cost_no_product() -> None:
    op = ev.closed_form(encoder(activation="gelu"), *data())
    H = ev.to_dense(op)
    for part, matrix in ((op, H), (op.restrict(["w1", "v"]), ev.to_dense(op.restrict(["w1", "v"])))):
        trace, diagonal = ev.trace(part), ev.diagonal(part)
        assert trace.products == diagonal.products == 0 and not diagonal.standard_error.any()
        assert trace.estimate == pytest.approx(float(matrix.trace()), rel=1e-10)
        agree(diagonal.estimate, matrix.diagonal())


def test_a_block_off_the_diagonal_has_no_diagonal() -> None:
    op = ev.closed_form(encoder(), *data())
    with pytest.raises(ev.VectorError, match="whose structure gives its diagonal"):
        exact.diagonal(op.block("q", "k"))


# ---------------------------------------------------------------- what is refused


class _Other(nn.TransformerEncoderLayer):
    def __init__(self, **options: Any) -> None:
        super().__init__(4, 2, 5, batch_first=True)
        self.self_attn = nn.MultiheadAttention(4, 2, batch_first=True, **options)


class _Doubled(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return 2 * super()._ff_block(x)


class _Negated(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: nn.Linear(4, 4), r"closed forms cover nn.TransformerEncoderLayer .* got Linear. .*ev.Hessian"),
        (lambda: nn.TransformerDecoderLayer(4, 2), "got TransformerDecoderLayer"),
        (lambda: _Other(kdim=3, vdim=4), "the option kdim or vdim of nn.MultiheadAttention. .*ev.Hessian"),
        (lambda: _Other(add_bias_kv=True), "the option add_bias_kv"),
        (lambda: _Other(add_zero_attn=True), "the option add_zero_attn"),
        (lambda: encoder(activation=F.relu6), "closed forms cover the activations relu, gelu, .*relu6"),
        (lambda: _Doubled(4, 2, 5), "nn.TransformerEncoderLayer as it is; _Doubled has a _ff_block of its own"),
        (lambda: encoder(activation=F.softplus), "closed forms cover the activations relu, gelu, .*softplus"),
        (lambda: encoder().requires_grad_(False), "no parameter of the layer is trainable"),
    ],
)
def test_layers_that_have_no_closed_form(layer: Callable[[], nn.Module], message: str) -> None:
    x, y = data()
    with pytest.raises(ev.ModelError, match=message):
        ev.closed_form(layer().double(), x, y)


def test_parts_of_a_layer_that_have_no_closed_form() -> None:
    layer, (x, y) = encoder(), data()
    layer.norm2 = nn.GroupNorm(1, 4).double()  # pyright: ignore
    with pytest.raises(ev.ModelError, match=r"cover nn.LayerNorm and nn.RMSNorm; got GroupNorm"):
        ev.closed_form(layer, x, y)
    layer = encoder()
    layer.linear1 = nn.Sequential(layer.linear1)  # pyright: ignore
    with pytest.raises(ev.ModelError, match=r"expected nn.Linear, got Sequential \(an adapter"):
        ev.closed_form(layer, x, y)
    layer = encoder()
    layer.linear1 = _Negated(4, 5).double()
    with pytest.raises(ev.ModelError, match=r"nn.Linear as it is; _Negated has a forward of its own. .*ev.Hessian"):
        ev.closed_form(layer, x, y)
    layer = encoder()
    layer.norm1 = nn.LayerNorm([3, 4], elementwise_affine=False)
    with pytest.raises(ev.ModelError, match=r"norms over the 4 features of a token; got one over \(3, 4\)"):
        ev.closed_form(layer, x, y)
    layer = encoder()
    layer.activation = nn.PReLU(init=1.0).double()  # the identity, as it is
    with pytest.raises(ev.ModelError, match=r"trainable parameter activation.weight \(.*a frozen one is a constant"):
        ev.closed_form(layer, x, y)
    layer.activation.requires_grad_(False)
    agree(ev.to_dense(ev.closed_form(layer, x, y)), mse(layer, x, y))
    layer = encoder()
    nn.utils.parametrizations.weight_norm(layer.linear1)
    with pytest.raises(ev.ModelError, match=r"trainable parameter linear1.parametrizations.weight.*ev.Hessian"):
        ev.closed_form(layer, x, y)
    layer = encoder()
    layer.linear1.float()
    with pytest.raises(ev.ModelError, match="one floating-point dtype"):
        ev.closed_form(layer, x, y)


def test_tied_weights_have_no_closed_form_unless_they_are_constants() -> None:
    layer, (x, y) = encoder(), data()
    layer.norm2 = layer.norm1
    with pytest.raises(ev.ModelError, match=r"norm1.weight and norm2.weight are one parameter; .*tied .*ev.Hessian"):
        ev.closed_form(layer, x, y)
    layer.norm1.requires_grad_(False)
    agree(ev.to_dense(ev.closed_form(layer, x, y)), mse(layer, x, y))


def test_dropout_of_the_attention_alone_is_told() -> None:
    layer = encoder(dropout=0.0).train()
    layer.self_attn.dropout = 0.25
    with pytest.warns(ev.CurvatureWarning, match=r"training mode with dropout 0.25"):
        ev.closed_form(layer, *data())


def test_unembeddings_that_are_none() -> None:
    with pytest.raises(ev.VectorError, match=r"expected a bias \(6,\), got \(3,\)"):
        ev.losses.cross_entropy(torch.ones(4, 6), torch.ones(3))
    for wrong, got in ((torch.ones(4), r"shape \(4,\)"), ([[1.0]], "list")):
        with pytest.raises(ev.VectorError, match=f"expected an unembedding .* or an nn.Linear; got {got}"):
            ev.losses.cross_entropy(wrong)  # pyright: ignore[reportArgumentType]


X, Y = torch.zeros(2, 3, 4, dtype=D), torch.zeros(2, 3, 4, dtype=D)
LABELS = torch.zeros(2, 3, dtype=torch.int64)
CE = ev.losses.cross_entropy(torch.ones(4, 6, dtype=D))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": X[..., :3]}, ev.VectorError, r"expected tokens \(B, L, 4\) or \(L, 4\).*got \(2, 3, 3\)"),
        ({"x": X[0, 0], "target": Y[0, 0]}, ev.VectorError, r"expected tokens .*got \(4,\)"),
        ({"x": X[:0], "target": Y[:0]}, ev.VectorError, r"none of them empty; got \(0, 3, 4\)"),
        ({"x": X[:, :0], "target": Y[:, :0]}, ev.VectorError, r"none of them empty; got \(2, 0, 4\)"),
        ({"x": X.float()}, ev.VectorError, "the layer is torch.float64 on cpu, the tokens are torch.float32"),
        ({"x": X.long()}, ev.VectorError, "the tokens are torch.int64"),
        ({"x": X + torch.nan}, ev.NonFiniteError, "the tokens x are not finite"),
        ({"target": Y[..., :3]}, ev.VectorError, r"mse expects a target of .* \(2, 3, 4\); got \(2, 3, 3\)"),
        ({"target": Y[0]}, ev.VectorError, r"mse expects a target .*got \(3, 4\)"),
        ({"target": Y[:0]}, ev.VectorError, r"mse expects a target .*got \(0, 3, 4\)"),
        ({"target": None}, ev.VectorError, "target: expected a tensor, got NoneType"),
        ({"x": X[0], "target": [0.0]}, ev.VectorError, "target: expected a tensor, got list"),
        ({"target": Y + torch.inf}, ev.NonFiniteError, "the loss is inf, or its gradient is not finite"),
        ({"loss": "mae"}, ev.LossError, r"expected 'mse', ev.losses.cross_entropy\(unembedding\).*got 'mae'"),
        ({"loss": CE}, ev.VectorError, r"cross-entropy expects integer targets \(2, 3\); got torch.float64"),
        ({"loss": CE, "target": LABELS[:, :2]}, ev.VectorError, r"integer targets \(2, 3\); got .*\(2, 2\)"),
        ({"loss": CE, "target": LABELS + 6}, ev.VectorError, r"targets must be in 0…5, or -100 .*got 6…6"),
        ({"loss": CE, "target": LABELS - 1}, ev.VectorError, r"targets must be in 0…5.*got -1…-1"),
        ({"loss": CE, "target": LABELS - 100}, ev.LossError, "every target is -100, which is ignored"),
        (
            {"loss": ev.losses.cross_entropy(torch.ones(3, 6)), "target": LABELS},
            ev.VectorError,
            "the unembedding takes 3 features; the layer gives 4",
        ),
        (
            {"loss": ev.losses.autodiff(lambda z, y: z.sum()), "target": Y[:1]},
            ev.VectorError,
            r"expected targets that start with \(2, 3\); got \(1, 3, 4\)",
        ),
        (
            {"loss": ev.losses.token(lambda z, y: z, lambda z, y: z, lambda z, y: z)},
            ev.LossError,
            r"value, gradient, curvature must be \(6,\), \(6, 4\), \(6, 4, 4\); got",
        ),
        ({"mask": torch.zeros(2, 3)}, ev.VectorError, r"expected a mask \(3, 3\).*got torch.float32 \(2, 3\)"),
        ({"mask": torch.zeros(3, 3).long()}, ev.VectorError, r"expected a mask \(3, 3\) of bool.*got torch.int64"),
        ({"mask": torch.full((3, 3), torch.nan)}, ev.NonFiniteError, "the mask has entries nan"),
        (
            {"mask": torch.ones(3, 3).bool()},
            ev.NonFiniteError,
            "query 0 may look at no key at all: its attention is 0/0",
        ),
        (
            {"mask": torch.full((3, 3), -torch.inf).triu(0)},
            ev.NonFiniteError,
            "query 0 may look at no key at all",
        ),
        ({"mask": [[0.0]]}, ev.VectorError, "mask: expected a tensor, got list"),
        ({"padding": torch.zeros(3).bool()}, ev.VectorError, r"expected padding \(2, 3\) of bool.*\(1, 3\)"),
        ({"padding": torch.ones(2, 3).bool()}, ev.NonFiniteError, "may look at no key at all"),
        ({"padding": torch.ones(2, 3)}, ev.VectorError, r"expected padding \(2, 3\) of bool, got torch.float32"),
        ({"padding": torch.zeros(3, 3).bool()}, ev.VectorError, r"expected padding \(2, 3\) of bool.*\(3, 3\)"),
    ],
)
def test_every_refusal_says_what_came(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ev.closed_form(encoder(), **{"x": X, "target": Y, **given})


def test_an_unknown_group_names_its_neighbours() -> None:
    with pytest.raises(ev.UnknownGroupError, match="w1"):
        ev.closed_form(encoder(), *data()).block("w11", "q")


def test_a_dense_matrix_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ev.closed_form(encoder(), *data())
    monkeypatch.setattr("evolute.linop.memory.available", lambda *_: 1000)
    with pytest.raises(ev.TooLargeError, match=r"Take a smaller block .*or its diagonal or norms"):
        ev.to_dense(op)
