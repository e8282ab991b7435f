"""Nothing of the user's is changed: by any public call, after an error or Ctrl-C, inside no_grad and inference_mode."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evolute as ev
import oracles
from families import FAMILIES

KINDS = (ev.Hessian, ev.GaussNewton, ev.FunctionalHessian, ev.EmpiricalFisher)
HOOKS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_forward_hooks_with_kwargs",
]


def _bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return (
        id(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist(),
    )


def _of_parameter(p: nn.Parameter) -> Any:
    hooks = p._backward_hooks
    return _bits(p), _bits(p.grad), p.requires_grad, p.data_ptr(), id(hooks), list(hooks or []), p.grad_fn


def _of_module(module: nn.Module) -> Any:
    hooks = [(id(getattr(module, name)), list(getattr(module, name))) for name in HOOKS]
    buffers = {name: _bits(buffer) for name, buffer in module._buffers.items()}
    return (
        type(module),
        module.training,
        hooks,
        buffers,
        id(module._buffers),
        sorted(vars(module)),
        list(module._parameters),
    )


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a computation could leave behind, as plain values."""
    python, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    return {
        "parameters": {name: _of_parameter(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "modules": {name: _of_module(module) for name, module in model.named_modules()},
        "python": hash(python),
        "numpy": (state[0], state[1].tolist(), *state[2:]),  # pyright: ignore
        "torch": torch.get_rng_state().tolist(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "dtype": torch.get_default_dtype(),
        "attention": id(F.scaled_dot_product_attention),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "hooks on saved tensors": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }


class Awkward(nn.Module):
    """What is easily disturbed: dropout, running statistics, buffers that a forward writes, hooks, mixed flags."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.statistics = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.steps, self.last = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = x.detach().mean()
        x = self.lift(x)
        x = self.attention(x, x, x, need_weights=False)[0].mean(1)
        return self.out(F.dropout(self.statistics(x), 0.5, self.training)).tanh() * self.frozen


class Watched:
    """Batches that draw from every global generator on the way, and may fail in the second one."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure, self.armed = failure, failure is not None
        draw = torch.Generator().manual_seed(0)
        self.batches = [(_random(n, 4, 3, draw), _random(n, 2, draw)) for n in (3, 2)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index, batch in enumerate(self.batches):
            random.random()
            np.random.rand()  # noqa: NPY002
            torch.rand(())
            if index == 1 and self.armed and self.failure is not None:
                raise self.failure
            yield batch


def _random(*shape: Any) -> Tensor:
    return torch.randn(*shape[:-1], dtype=torch.float64, generator=shape[-1])


def _model() -> nn.Module:
    """In training, but for one frozen child; some gradients are there; hooks everywhere."""
    model = Awkward().double().train()
    model.statistics.eval()
    model.out.weight.grad = torch.ones_like(model.out.weight)
    model.lift.weight.register_hook(lambda gradient: 3 * gradient)
    model.lift.register_forward_hook(lambda *_: None)
    model.out.register_forward_pre_hook(lambda *_: None)
    model.out.register_full_backward_hook(lambda *_: None)
    return model


Call = Callable[[ev.Objective], Any]


def _product(kind: Any, vectors: int) -> Call:
    def call(objective: ev.Objective) -> Any:
        v = torch.ones(objective.space.size, vectors, dtype=torch.float64)
        return kind(objective) @ (v if vectors > 1 else v[:, 0])

    return call


def _twice(objective: ev.Objective) -> Tensor:
    op = ev.Hessian(objective)
    v = torch.ones(op.shape[1], dtype=op.dtype)
    _ = op @ v, op.plan, op.preferred_block
    return op @ v


CALLS: dict[str, Call] = {
    "value": lambda objective: objective.value(),
    "gradient": lambda objective: objective.gradient(),
    **{kind.__name__: _product(kind, 1) for kind in KINDS},
    "many vectors": _product(ev.Hessian, 34),
    "twice": _twice,
    "block": lambda objective: ev.Hessian(objective).block("out.weight", "lift") @ torch.ones(16, dtype=torch.float64),
    "to_dense": lambda objective: ev.to_dense(ev.Hessian(objective).restrict("out.bias")),
    "scipy": lambda objective: ev.Hessian(objective).to_scipy() @ np.ones(objective.space.size),
    "groups": lambda objective: ev.groups(objective.model),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"memory": 0},
    "dropout": {"dropout_seed": 3},
    "chosen": {"params": ["lift", "out", "frozen"]},
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


def _same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for what in before:
        assert after[what] == before[what], what


def test_the_snapshot_sees_each_kind_of_change() -> None:
    """No test of this file could fail, were the snapshot blind."""
    changes: list[Callable[[Awkward], Any]] = [
        lambda m: m.out.weight.data.view(-1)[0].mul_(-1.0),
        lambda m: m.out.weight.grad.zero_(),  # pyright: ignore
        lambda m: setattr(m.out.weight, "grad", m.out.weight.grad.clone()),  # pyright: ignore
        lambda m: setattr(m.lift.weight, "grad", torch.zeros_like(m.lift.weight)),
        lambda m: m.statistics.train(),
        lambda m: m.frozen.requires_grad_(),
        lambda m: m.out.register_forward_hook(lambda *_: None),
        lambda m: m.out.weight.register_hook(lambda g: g),
        lambda m: m.steps.add_(1),
        lambda m: setattr(m, "last", m.last.clone()),
        lambda m: m.statistics.running_mean.add_(1),  # pyright: ignore
        lambda m: random.random(),
        lambda m: np.random.rand(),  # noqa: NPY002
        lambda m: torch.rand(()),
    ]
    for number, change in enumerate(changes):
        model: Any = _model()
        before = snapshot(model)
        _same(before, snapshot(model))
        change(model)
        assert snapshot(model) != before, number


def test_after_a_call(call: Call, options: dict[str, Any]) -> None:
    model = _model()
    before = snapshot(model)
    call(ev.Objective(model, Watched(), nn.MSELoss(), **options))
    _same(before, snapshot(model))


@pytest.mark.parametrize(
    ("failure", "options"),
    [(KeyboardInterrupt(), {}), (OSError("disk"), {"memory": 0}), (OSError("disk"), {"dropout_seed": 3})],
    ids=["Ctrl-C", "error, recomputed", "error, dropout"],
)
def test_after_a_loader_that_fails_and_again_when_it_recovers(
    call: Call, options: dict[str, Any], failure: BaseException
) -> None:
    """The same objective works afterwards: nothing half-done is left in it."""
    model, batches = _model(), Watched(failure)
    objective = ev.Objective(model, batches, nn.MSELoss(), **options)
    before, needs_data = snapshot(model), call is not CALLS["groups"]
    if needs_data:
        with pytest.raises(type(failure)):
            call(objective)
    _same(before, snapshot(model))
    batches.armed = False
    expected = call(ev.Objective(model, Watched(), nn.MSELoss(), **options))
    assert _equal(call(objective), expected)
    _same(before, snapshot(model))


def _equal(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else bool(np.all(ours == theirs))


def test_an_operator_survives_an_interrupted_product() -> None:
    """Ctrl-C during the first product, then the product: the same bits as without."""
    model, batches = _model(), Watched(KeyboardInterrupt())
    op = ev.Hessian(ev.Objective(model, batches, nn.MSELoss()))
    v = torch.ones(op.shape[1], dtype=op.dtype)
    with pytest.raises(KeyboardInterrupt):
        _ = op @ v
    batches.armed = False
    assert torch.equal(op @ v, ev.Hessian(ev.Objective(model, Watched(), nn.MSELoss())) @ v)


@pytest.mark.parametrize("where", ["forward", "criterion", "terms", "backward"])
@pytest.mark.parametrize("memory", [None, 0])
def test_after_an_error_of_the_user_in_batch_two(where: str, memory: int | None) -> None:
    model = _model()
    loss = _failing_in_batch_two(where)
    before = snapshot(model)
    objective = ev.Objective(model, Watched(), loss, memory=memory)
    with pytest.raises(RuntimeError, match="the user's own"):
        _ = ev.EmpiricalFisher(objective) @ torch.ones(objective.space.size, dtype=torch.float64)
    _same(before, snapshot(model))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("the user's own")


def _failing_in_batch_two(where: str) -> ev.Loss:
    def step(name: str, value: Tensor, batch: Any) -> Tensor:
        if len(batch[0]) == 2 and name == where:
            raise RuntimeError("the user's own")
        return value

    def forward(model: nn.Module, batch: Any) -> Tensor:
        out = step("forward", model(batch[0]), batch)
        return _Fails.apply(out) if where == "backward" and len(batch[0]) == 2 else out  # pyright: ignore

    def terms(output: Tensor, batch: Any) -> Tensor:
        return step("terms", (output - batch[1]).square().reshape(-1), batch)

    def criterion(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return step("criterion", (output - batch[1]).square().sum(), batch), output.numel()

    return ev.Loss(forward, criterion, terms)


def test_a_hook_of_the_user_fires_in_their_own_backward_only(options: dict[str, Any]) -> None:
    model: Any = _model()
    seen: list[Tensor] = []
    model.out.weight.register_hook(seen.append)
    _twice(ev.Objective(model, Watched(), nn.MSELoss(), **options))
    assert not seen
    model.eval()(Watched().batches[0][0]).sum().backward()
    assert len(seen) == 1 and model.lift.weight.grad is not None


@pytest.mark.parametrize(
    ("mode", "options"),
    [(torch.no_grad, {}), (torch.inference_mode, {}), (torch.inference_mode, {"memory": 0})],
    ids=["no_grad", "inference", "inference, recomputed"],
)
def test_inside_no_grad_and_inference_mode(call: Call, options: dict[str, Any], mode: Callable[[], Any]) -> None:
    """Answers do not depend on the mode of the caller, also where the data is made in it."""
    model = _model()
    expected = call(ev.Objective(model, Watched(), nn.MSELoss(), **options))
    before = snapshot(model)
    with mode():
        inside = snapshot(model)
        ours = call(ev.Objective(model, Watched(), nn.MSELoss(), **options))
        _same(inside, snapshot(model))
        assert _equal(ours, expected)
    _same(before, snapshot(model))


def test_an_operator_used_in_and_out_of_inference_mode() -> None:
    model = _model()
    op = ev.Hessian(ev.Objective(model, Watched(), nn.MSELoss()))
    with torch.inference_mode():
        v = torch.ones(op.shape[1], 34, dtype=op.dtype)
        inside = op @ v, op @ v[:, 0]
    assert torch.equal(op @ v, inside[0]) and torch.equal(op @ v[:, 0], inside[1])
    fresh = ev.Hessian(ev.Objective(model, Watched(), nn.MSELoss())) @ v.clone()
    assert torch.equal(fresh, inside[0])


def test_another_default_dtype_is_left_alone() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = _model()
        before = snapshot(model)
        ours = _twice(ev.Objective(model, Watched(), nn.MSELoss()))
        _same(before, snapshot(model))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(ours, _twice(ev.Objective(model, Watched(), nn.MSELoss())))


class _Lowest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.lowest = nn.Linear(3, 2), nn.Buffer(torch.full((), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        self.lowest.copy_(torch.fmin(self.lowest, x.detach().min()).clamp(0, 0))
        return self.out(x.mean(1))


def test_a_buffer_that_is_not_a_number_yet() -> None:
    """NaN is unequal to itself, and not the same as the zero that a forward puts there."""
    model = _Lowest().double()
    before = snapshot(model)
    ev.Objective(model, Watched(), nn.MSELoss()).gradient()
    _same(before, snapshot(model))


# ---------------------------------------------------------------- training mode, dropout, running statistics


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_training_gives_the_answer_of_evaluation(kind: Any) -> None:
    """Dropout of 0.5 and batch statistics would change it by tens of percent."""
    model = _model()
    train = kind(ev.Objective(model.train(), Watched(), nn.MSELoss()))
    matrix = train @ torch.eye(train.shape[1], dtype=torch.float64)
    evaluated = kind(ev.Objective(model.eval(), Watched(), nn.MSELoss()))
    assert torch.equal(matrix, evaluated @ torch.eye(train.shape[1], dtype=torch.float64))
    masked = kind(ev.Objective(model.train(), Watched(), nn.MSELoss(), dropout_seed=1))
    assert oracles.relative(masked @ matrix[:, 0], matrix @ matrix[:, 0]) > 1e-2, "dropout makes no difference here"


@pytest.mark.parametrize("memory", [None, 0])
def test_a_dropout_seed_fixes_the_masks(memory: int | None) -> None:
    """Whatever the global generator does, kept or recomputed, one vector or many; another seed, other masks."""
    model = _model()

    def objective(seed: int) -> ev.Objective:
        return ev.Objective(model, Watched(), nn.MSELoss(), dropout_seed=seed, memory=memory)

    fixed = objective(7)
    op, V = ev.Hessian(fixed), torch.ones(fixed.space.size, 3, dtype=torch.float64)
    first, value, gradient = op @ V, fixed.value(), fixed.gradient()
    torch.rand(17)
    assert torch.equal(op @ V, first) and torch.equal(ev.Hessian(objective(7)) @ V, first)
    assert fixed.value() == value and torch.equal(fixed.gradient(), gradient)
    assert oracles.relative(op @ V[:, 0], first[:, 0]) < 1e-12
    assert oracles.relative(ev.Hessian(objective(8)) @ V, first) > 1e-2
    other = ev.Hessian(
        ev.Objective(model, Watched(), nn.MSELoss(), dropout_seed=7, memory=0 if memory is None else None)
    )
    assert oracles.relative(other @ V, first) < 1e-10


def test_with_dropout_fixed_the_hessian_is_the_derivative_of_the_gradient() -> None:
    objective = ev.Objective(_model(), Watched(), nn.MSELoss(), dropout_seed=7)
    u = torch.randn(objective.space.size, dtype=torch.float64)
    assert oracles.relative(ev.Hessian(objective) @ u, oracles.difference(objective, u)) < 1e-6


def test_dropout_inside_fused_attention_is_fixed_too() -> None:
    """nn.MultiheadAttention draws its mask inside scaled_dot_product_attention."""
    model = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).double().train()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    loss = ev.Loss(lambda m, b: m(b, b, b, need_weights=False)[0], lambda o, b: (o.square().sum(), o.numel()))
    objective = ev.Objective(model, [x], loss, dropout_seed=1)
    op, u = ev.Hessian(objective), torch.randn(objective.space.size, dtype=torch.float64)
    masked, plain = op @ u, ev.Hessian(ev.Objective(model, [x], loss)) @ u
    assert oracles.relative(masked, oracles.difference(objective, u)) < 1e-6
    assert oracles.relative(plain, masked) > 1e-2


def test_bound_methods_and_globals_of_a_hugging_face_model() -> None:
    family = FAMILIES["llama"]()
    before = snapshot(family.model)
    objective = ev.Objective(family.model, family.batches, family.loss)
    for kind in KINDS:
        _ = kind(objective) @ torch.ones(objective.space.size, dtype=torch.float64)
    _same(before, snapshot(family.model))
    assert family.model.config._attn_implementation == "sdpa"  # pyright: ignore
