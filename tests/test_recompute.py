"""Batches computed anew for each product: by a program recorded once, by autograd where a program would be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evolute as ev
from evolute.engine import recompute


class Wise(nn.Module):
    """Two layers around a function of the data."""

    def __init__(self, middle: Any = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.middle = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


def batches(*sizes: int, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(scale * torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in sizes]


def agree(model: nn.Module, data: Any, loss: Any = None, kind: Any = ev.Hessian) -> ev.LinearOperator:
    """The recomputed operator, after comparing it with plain double backward on each column."""
    loss = loss or nn.MSELoss()
    op = kind(ev.Objective(model, data, loss, memory=0))
    truth = kind(ev.Objective(model, data, loss))
    V = torch.randn(op.shape[1], 3).double()
    for _ in range(2):
        assert torch.allclose(op @ V, truth @ V, rtol=1e-10, atol=1e-12)
    return op


def made_by_autograd(op: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many batches one product sends through autograd."""
    calls: list[int] = []
    products = op._products
    original = products.make
    monkeypatch.setattr(products, "make", lambda *args: calls.append(1) or original(*args))
    op @ torch.zeros(op.shape[1], dtype=op.dtype)
    return len(calls)


@pytest.mark.parametrize("kind", [ev.Hessian, ev.GaussNewton, ev.FunctionalHessian, ev.EmpiricalFisher])
def test_one_program_for_all_batches_of_one_shape(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op: Any = agree(Wise(), batches(5, 5, 5, 2), kind=kind)
    assert len(op._products.recipes.known) == 2
    assert made_by_autograd(op, monkeypatch) == 0
    assert not op.plan.notes


SAVED_UNDER_ANOTHER_NAME = {
    "softmax": lambda h: torch.softmax(h, -1),
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "sqrt": lambda h: (h * h + 1).sqrt(),
    "view of what is saved": lambda h: torch.softmax(h.view(-1, 2, 2).transpose(1, 2), -1).reshape(-1, 4),
    "written in place": lambda h: (h * h).add_(1.0).mul_(h).tanh_(),
    "layer_norm": lambda h: nn.functional.layer_norm(h, (4,)),
    "gelu": nn.functional.gelu,
    "cumsum": lambda h: h.exp().cumsum(-1),
    "chosen by number": lambda h: h.tanh()[torch.arange(5), h.argmax(1)][:, None] * h,
}


@pytest.mark.parametrize("name", SAVED_UNDER_ANOTHER_NAME)
def test_what_autograd_saved_is_found_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = agree(Wise(SAVED_UNDER_ANOTHER_NAME[name]), batches(5, 5, 5))
    assert made_by_autograd(op, monkeypatch) == 0


def _kinked(h: Tensor) -> Tensor:
    return h.exp() if h.sum() > 0 else h.cos()


def _listed(h: Tensor) -> Tensor:
    return h.tanh() * (1 + sum(h.detach().flatten().tolist()))


def _numpied(h: Tensor) -> Tensor:
    return h.tanh() * float(h.detach().numpy().std())


def _selected(h: Tensor) -> Tensor:
    return torch.where((h > 0).any(1, keepdim=True), h.tanh(), h) + h[h > 0].square().sum()


@pytest.mark.parametrize("middle", [_kinked, _listed, _numpied, _selected])
def test_what_depends_on_numbers_goes_through_autograd(middle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch, a number that leaves PyTorch, a shape: a program of one batch would be wrong for the next."""
    op: Any = agree(Wise(middle), batches(5, 5, 5, 5))
    assert made_by_autograd(op, monkeypatch) == 4
    assert "recomputed through autograd" in str(op.plan)


def test_a_number_that_comes_by_another_way_shows_at_the_second_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader changes what the model does: nothing that a recorder could see."""
    model = Wise(lambda h: h.tanh() * model.scale)

    class Loader:
        def __iter__(self) -> Any:
            for number, batch in enumerate(batches(5, 5, 5)):
                model.scale = 1.0 + number
                yield batch

    op: Any = agree(model, Loader())
    assert made_by_autograd(op, monkeypatch) == 3
    assert "the replay is off" in str(op.plan)


def test_zeros_and_ones_in_the_first_batch_are_not_simplified_away() -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        x, shift, factor = batch
        return model(x).square() * factor + model(x) * shift

    torch.manual_seed(2)
    plain = (torch.randn(5, 3).double(), torch.zeros(5, 2).double(), torch.ones(5, 2).double())
    other = tuple(torch.randn_like(each) for each in plain)
    agree(Wise(), [plain, other, other], ev.Loss(masked, lambda out, batch: (out.sum(), out.numel())))


def test_one_tensor_twice_is_another_signature_than_two_tensors() -> None:
    x, y = torch.randn(5, 2).double(), torch.randn(5, 2).double()
    same, differ = recompute.signature((x, x)), recompute.signature((x, y))
    assert same != differ
    assert recompute.signature((x, x.clone())) == differ
    assert recompute.signature((x[:2], x[2:4])) != recompute.signature((x[:2], y[:2]))
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
    agree(model, [(x, x), (x, y), (y, y), (y, x)])


@pytest.mark.parametrize("leaf", [object(), {"a": {1, 2}}])
def test_what_cannot_be_compared_has_no_signature(leaf: Any) -> None:
    assert recompute.signature((torch.ones(2), leaf)) is None
    assert recompute.signature(()) is None
    assert recompute.signature((torch.ones(2), "a")) != recompute.signature((torch.ones(2), "b"))


def test_dropout_with_a_seed_goes_through_autograd() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).double()
    data = batches(5, 5)
    kept, anew = (ev.Hessian(ev.Objective(model, data, nn.MSELoss(), dropout_seed=3, memory=m)) for m in (None, 0))
    v = torch.randn(kept.shape[1]).double()
    assert torch.allclose(kept @ v, anew @ v, rtol=1e-10, atol=1e-13)


def test_what_does_not_depend_on_the_data_is_not_kept_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory was denied; a large table made by the model would be kept by the program."""
    weights = torch.randn(400, 400).double()
    op: Any = agree(Wise(lambda h: (h.repeat(1, 100) @ weights.cos()).tanh()[:, :4]), batches(5, 5))
    assert made_by_autograd(op, monkeypatch) == 2
    assert "does not depend on the data" in str(op.plan)


def test_a_block_needs_only_its_own_constants() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    data = [(torch.randn(3, 5, 8).double(), torch.randn(3, 5, 8).double()) for _ in range(3)]
    anew = ev.Hessian(ev.Objective(layer, data, nn.MSELoss(), memory=0))
    whole = ev.to_dense(ev.Hessian(ev.Objective(layer, data, nn.MSELoss())).block("attn.q", "mlp.up"))
    assert torch.allclose(ev.to_dense(anew.block("attn.q", "mlp.up")), whole, rtol=1e-9, atol=1e-12)
