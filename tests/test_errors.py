"""What cannot be done is refused: one exception of the documented hierarchy, which says what came and what to do."""

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.data import DataLoader, TensorDataset

import evolute as ev

D = torch.float64
SIZE = 13  # of the parameters of `_model`


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def _data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(_normal(n, 2, draw), _normal(n, 1, draw)) for n in sizes or (3, 2)]


def _normal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, dtype=D, generator=draw)


def _objective(batches: Any = None, model: nn.Module | None = None, **options: Any) -> ev.Objective:
    return ev.Objective(
        _model() if model is None else model, _data() if batches is None else batches, nn.MSELoss(), **options
    )


def _ones(op: ev.LinearOperator) -> Tensor:
    return torch.ones(op.shape[1], dtype=op.dtype)


CALLS: dict[str, Callable[[ev.Objective], Any]] = {
    "value": lambda objective: objective.value(),
    "gradient": lambda objective: objective.gradient(),
    "product": lambda objective: ev.Hessian(objective) @ torch.ones(objective.space.size, dtype=D),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Callable[[ev.Objective], Any]:
    return CALLS[request.param]


@pytest.fixture(params=[None, 0], ids=["kept", "recomputed"])
def memory(request: pytest.FixtureRequest) -> int | None:
    return request.param


# ---------------------------------------------------------------- vectors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(SIZE + 1, dtype=D), r"\(13,\) or a matrix \(13, k\), got shape \(14,\)"),
        (torch.ones(1, SIZE, dtype=D), r"got shape \(1, 13\)"),
        (torch.ones(SIZE, 1, 1, dtype=D), r"got shape \(13, 1, 1\)"),
        (torch.ones(SIZE), r"expected torch.float64, got torch.float32; convert with v.to\(torch.float64\)"),
        (torch.ones(SIZE, dtype=torch.int64), "got torch.int64"),
        (torch.ones(SIZE, dtype=D, device="meta"), r"on cpu, got meta; move it with v.to\(H.device\)"),
        (np.ones(SIZE), "got ndarray; wrap NumPy arrays in torch.from_numpy"),
    ],
)
def test_a_vector_of_another_kind(wrong: Any, message: str) -> None:
    op = ev.Hessian(_objective())
    with pytest.raises(ev.VectorError, match=message):
        _ = op @ wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(3, 2, dtype=D, device="meta"), r"'0.weight': expected a tensor on cpu, got meta"),
        (torch.ones(3, 2, dtype=torch.int64), r"'0.weight': expected torch.float64, got torch.int64"),
        (torch.ones(3, 2, dtype=torch.complex128), r"'0.weight': expected torch.float64, got torch.complex128"),
        (torch.ones(2, 3, dtype=D), r"'0.weight': expected shape \(3, 2\), got \(2, 3\)"),
    ],
)
def test_a_piece_of_another_kind_among_names(wrong: Tensor, message: str) -> None:
    op = ev.Hessian(_objective())
    with pytest.raises(ev.VectorError, match=message):
        _ = op @ (op.space.unflatten(_ones(op)) | {"0.weight": wrong})


def test_complex_vectors_of_scipy() -> None:
    """NumPy would drop their imaginary part."""
    op = ev.Hessian(_objective()).to_scipy()
    with pytest.raises(ev.VectorError, match=r"real numbers, got complex128; multiply v.real and v.imag apart"):
        _ = op @ np.full(SIZE, 1j)


def test_a_vector_that_is_not_finite_has_a_product_that_is_not(memory: int | None) -> None:
    """No batch is blamed for what came in."""
    op = ev.Hessian(_objective(memory=memory))
    assert (op @ torch.full((SIZE,), torch.nan, dtype=D)).isnan().any()
    assert (op @ _ones(op)).isfinite().all()


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("0.weigth", "no group or parameter '0.weigth'; near matches: '0.weight'"),
        ([], "at least one"),
        (3, "names of groups or parameters, or ev.Part, got int"),
        (["0", None], "got NoneType"),
        ([torch.ones(2)], "got Tensor"),
        (ev.Part("0.weight", 2, 0, 1), "no dimension 2 in '0.weight'"),
    ],
)
def test_a_group_that_does_not_exist(wrong: Any, message: str) -> None:
    objective = _objective()
    with pytest.raises(ev.UnknownGroupError, match=message):
        ev.Hessian(objective).block("0", wrong)
    with pytest.raises(ev.UnknownGroupError, match=message):
        _objective(params=wrong)


def test_groups_of_what_is_no_model() -> None:
    with pytest.raises(ev.ModelError, match=r"expected a torch.nn.Module, got Objective"):
        ev.groups(_objective())  # pyright: ignore


# ---------------------------------------------------------------- matrices and products of others


@pytest.mark.parametrize("wrong", ["M", None, np.ones((2, 2), dtype=object)])
def test_what_is_no_matrix(wrong: Any) -> None:
    with pytest.raises(ev.VectorError, match=r"square floating-point matrix, a tensor or an array, got (str|None|nda)"):
        ev.from_dense(wrong)


def test_matrices_without_entries_and_sparse_ones() -> None:
    assert ev.to_dense(ev.from_dense(torch.ones(0, 0))).shape == (0, 0)
    assert torch.equal(ev.to_dense(ev.from_dense(torch.eye(2).to_sparse())), torch.eye(2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda v: v.numpy(), "a tensor of real numbers, got ndarray"),
        (lambda v: None, "got NoneType"),
        (lambda v: v * 1j, "got torch.complex64"),
    ],
)
def test_a_product_that_returns_something_else(function: Any, message: str) -> None:
    with pytest.raises(ev.VectorError, match=message):
        _ = ev.from_matvec(function, 3) @ torch.ones(3)


@pytest.mark.parametrize("size", [-3, "3", 2.5])
def test_a_size_that_is_none(size: Any) -> None:
    with pytest.raises(ev.VectorError, match=f"expected the number of entries of v, got {size!r}"):
        ev.from_matvec(lambda v: v, size)


def test_scipy_operators_are_on_the_space_that_is_given() -> None:
    objective, M = _objective(), np.diag(np.arange(float(SIZE)))
    op = ev.from_matvec(aslinearoperator(M), space=objective.space)
    assert op.space is objective.space
    assert torch.equal(ev.to_dense(op.restrict("2")), torch.diag(torch.arange(9.0, 13.0, dtype=D)))
    with pytest.raises(ev.VectorError, match=r"13.* 11|11.* 13"):
        ev.from_matvec(aslinearoperator(M), space=ev.Space({"v": (11,)}))
    with pytest.raises(ev.VectorError, match=r"11.* 13|13.* 11"):
        ev.from_matvec(aslinearoperator(M), 11)
    with pytest.raises(ev.VectorError, match="real numbers, got complex64"):
        ev.from_matvec(aslinearoperator(M.astype(np.complex64)))


# ---------------------------------------------------------------- models


def test_a_model_without_anything_to_differentiate() -> None:
    with pytest.raises(ev.ModelError, match=r"ReLU has no trainable parameter: it has none"):
        _objective(model=nn.ReLU())
    with pytest.raises(ev.ModelError, match=r"all are frozen \(requires_grad=False\); pass params=…"):
        _objective(model=_model().requires_grad_(False))
    with pytest.raises(ev.ModelError, match=r"expected a torch.nn.Module, got str"):
        _objective(model="model")  # pyright: ignore
    with pytest.raises(ev.ModelError, match=r"ev.Objective\(model, batches, loss\), got Sequential"):
        ev.Hessian(_model())  # pyright: ignore


def test_integer_parameters_are_left_alone_unless_chosen() -> None:
    model = _model()
    model[0].steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    assert _objective(model=model).space.size == SIZE
    with pytest.raises(ev.ModelError, match=r"'0.steps' has dtype torch.int64: only floating-point"):
        _objective(model=model, params="0.steps")


def _stepped(model: nn.Sequential) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1.5)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "step": _stepped,
    "data": lambda model: model.get_parameter("0.weight").data.mul_(1.5),
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(3, 2, dtype=D))),
    "cast": lambda model: model.float(),
    "moved": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_operator_belongs_to_one_point(change: str, memory: int | None) -> None:
    model = _model()
    op = ev.Hessian(_objective(model=model, memory=memory))
    _ = op @ _ones(op)
    CHANGES[change](model)
    with pytest.raises(ev.ModelError, match=r"changed since this operator was made.*Make a new one"):
        _ = op @ _ones(op)


@pytest.mark.parametrize("change", ["replaced", "cast", "moved"])
def test_an_objective_belongs_to_its_parameters(change: str, call: Callable[[ev.Objective], Any]) -> None:
    """Other numbers in the same parameters are another point; other parameters are another objective."""
    model = _model()
    objective = _objective(model=model)
    CHANGES[change](model)
    with pytest.raises(ev.ModelError, match=r"'0.weight' has been replaced, moved or cast"):
        call(objective)


def test_an_objective_is_at_the_present_point() -> None:
    model = _model()
    objective = _objective(model=model)
    before = objective.gradient()
    _stepped(model)
    assert torch.equal(objective.gradient(), _objective(model=model).gradient())
    assert not torch.equal(objective.gradient(), before)


class _Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)  # (b, 1, l, 16) each
        return flex_attention(q, k, v).squeeze(1)  # pyright: ignore


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "derivative", [lambda objective: objective.gradient(), lambda objective: ev.Hessian(objective).plan]
)
def test_flex_attention_is_refused_with_what_to_use(derivative: Callable[[ev.Objective], Any]) -> None:
    batches = [(torch.randn(2, 4, 16), torch.randn(2, 4, 16))]
    with pytest.raises(ev.ModelError, match=r"flex_attention.*attn_implementation='sdpa'"):
        derivative(_objective(batches, _Flexible()))


# ---------------------------------------------------------------- data


class _Once:
    """Iterable by its type, once by its nature."""

    def __init__(self) -> None:
        self.rest = iter(_data())

    def __iter__(self) -> Iterator[Any]:
        return self.rest


class _Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn(x.shape, dtype=D), y


def _dataset() -> TensorDataset:
    return TensorDataset(*_data(8)[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "at least one batch, got an empty iterable"),
        (None, "an iterable of batches, got NoneType"),
        ((each for each in _data()), r"one-shot generator; pass list\(batches\)"),
        (iter(_data()), "one-shot list_iterator"),
        (_data()[0], r"one pair \(x, y\); for a single batch pass \[\(x, y\)\]"),
        (torch.ones(3), r"a single batch goes in a list"),
        ([torch.ones(3, 2)], r"a batch \(x, y\), a tuple or list of two; got Tensor"),
        ([{"x": torch.ones(2)}], r"For dict batches of Hugging Face models use Objective.from_hf"),
    ],
)
def test_batches_that_are_none(wrong: Any, message: str) -> None:
    with pytest.raises(ev.DataError, match=message):
        ev.Objective(_model(), wrong, nn.MSELoss()).value()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(_dataset(), 3, shuffle=True), "batch 0 .*: shuffling or random augmentation.*list"),
        (lambda: DataLoader(_dataset(), 1, shuffle=True), "came as batch .* in the first pass: the order changes"),
        (lambda: DataLoader(_Augmented(*_dataset().tensors), 3), "batch 0 is not what it was in the first pass"),
        (_Once, "this pass had no batch, the first had 2: the source ran dry"),
    ],
)
def test_data_that_changes_between_passes_is_named(loader: Callable[[], Any], message: str) -> None:
    op = ev.Hessian(_objective(loader(), memory=0))
    with pytest.raises(ev.DataChangedError, match=message):
        _products(op)


def _products(op: ev.LinearOperator) -> None:
    for seed in range(5):  # products put the generators back: the user's own draws move them on
        torch.manual_seed(seed)
        _ = op @ _ones(op)


def test_data_that_is_changed_in_place_is_named() -> None:
    batches = _data()
    op = ev.Hessian(_objective(batches, memory=0))
    _ = op @ _ones(op)
    batches[1][0].add_(1)
    with pytest.raises(ev.DataChangedError, match="batch 1 is not what it was"):
        _ = op @ _ones(op)


def test_a_loader_that_stays_the_same_is_welcome() -> None:
    op = ev.Hessian(_objective(DataLoader(_dataset(), 3), memory=0))
    assert torch.equal(op @ _ones(op), op @ _ones(op))


def test_no_term_at_all() -> None:
    batch = torch.ones(2, 2, dtype=D), torch.tensor([-100, -100])
    with pytest.raises(ev.DataError, match=r"no term at all: every label is masked \(-100\)"):
        ev.Objective(_model(), [batch], nn.CrossEntropyLoss()).value()


# ---------------------------------------------------------------- numbers that are none


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_the_batch_and_the_term_that_are_not_finite(number: float, call: Callable[[ev.Objective], Any]) -> None:
    batches = _data(3, 4)
    batches[1][0][2, 1] = number
    batches[1][1][3, 0] = number
    with pytest.raises(ev.NonFiniteError, match=r"the loss of batch 1 is (nan|inf): term [23] first, [12] in all"):
        call(_objective(batches))


class _Root(nn.Module):
    """|w x|ᵖ at w = 0: for p = 1/2 without a gradient, for p = 3/2 without a second derivative."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.zeros(2, dtype=D)), power

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs().pow(self.power).sum(-1, keepdim=True)


def test_a_gradient_and_a_second_derivative_that_are_not_finite(memory: int | None) -> None:
    for power, what in ((0.5, "the gradient of batch 0 with respect to 'weight'"), (1.5, "the second derivative of")):
        with pytest.raises(ev.NonFiniteError, match=what):
            CALLS["product"](_objective(model=_Root(power), memory=memory))


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (lambda o, b: o.sum(), r"expected \(sum of loss, number of terms\), got Tensor"),
        (lambda o, b: None, "got NoneType"),
        (lambda o, b: (o, len(o)), r"must be a scalar floating-point tensor, got \(3, 1\), torch.float64"),
        (lambda o, b: (o.sum().long(), 1), r"got \(\), torch.int64"),
        (lambda o, b: (o.sum().item(), 1), "got float"),
        (lambda o, b: (o.sum(), "many"), "the number of terms must be a number, got 'many'"),
        (lambda o, b: (o.sum(), None), "must be a number, got None"),
        (lambda o, b: (o.sum(), torch.ones(3)), r"must be a number, got \(3,\)"),
        (lambda o, b: (o.sum(), -1), "must be finite and not negative, got -1.0"),
        (lambda o, b: (o.sum(), float("nan")), "must be finite and not negative, got nan"),
    ],
)
def test_a_criterion_that_is_no_sum_and_count(criterion: Any, message: str) -> None:
    loss = ev.Loss(lambda model, batch: model(batch[0]), criterion)
    with pytest.raises(ev.LossError, match=message) as caught:
        ev.Objective(_model(), _data(), loss).gradient()
    assert "ev.Loss(" in str(caught.value), "the recipe belongs to the message"


def test_a_loss_that_does_not_depend_on_the_parameters() -> None:
    loss = ev.Loss(lambda model, batch: model(batch[0]).detach(), lambda output, batch: (output.sum(), len(output)))
    with pytest.raises(ev.LossError, match=r"batch 0 does not depend on any chosen parameter.*detach"):
        ev.Objective(_model(), _data(), loss).gradient()


def test_the_empirical_fisher_asks_for_each_term() -> None:
    loss = ev.Loss(lambda model, batch: model(batch[0]), lambda output, batch: (output.sum(), len(output)))
    with pytest.raises(ev.LossError, match=r"needs the loss of each term: pass ev.Loss\(forward, criterion, terms\)"):
        _ = ev.EmpiricalFisher(ev.Objective(_model(), _data(), loss)).plan


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("wrong", ["1GB", -5, float("nan")])
def test_a_budget_that_is_no_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(ev.EvoluteError, match="memory: expected a number of bytes"):
        _objective(memory=wrong)


# ---------------------------------------------------------------- compiled modules, unwrapped


class _Counted(nn.Linear):
    """A layer that says whether its Python source was run."""

    runs = 0

    def forward(self, input: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(input).tanh()

    @classmethod
    def fresh(cls) -> Self:
        torch.manual_seed(0)
        return cls(2, 1, dtype=D)


def test_a_compiled_module_runs_as_written(memory: int | None) -> None:
    plain, inside = _Counted.fresh(), _Counted.fresh()
    expected = ev.to_dense(ev.Hessian(_objective(model=plain)))
    compiled: Any = torch.compile(inside, backend="eager")
    for model in (compiled, nn.Sequential(compiled)):
        before = _Counted.runs
        assert torch.equal(ev.to_dense(ev.Hessian(_objective(model=model, memory=memory))), expected)
        assert _Counted.runs > before


# ---------------------------------------------------------------- a second derivative that PyTorch leaves out


class _Once(torch.autograd.Function):
    """sin, whose backward pass is right once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Once.apply(x)


@pytest.mark.parametrize("operator", [ev.Hessian, ev.GaussNewton, ev.FunctionalHessian])
def test_once_differentiable_functions_are_refused(operator: Any, memory: int | None) -> None:
    """`torch.autograd.grad` finds zeros behind them, without a word."""
    model = nn.Sequential(nn.Linear(2, 3), _Sine(), nn.Linear(3, 1)).double()
    op = operator(_objective(model=model, memory=memory))
    with pytest.raises(ev.ModelError, match="once_differentiable"):
        op @ _ones(op)
