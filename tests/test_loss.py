"""Σ sum / Σ terms over any split is the loss of torch.nn on the whole, and the terms add up to the sum."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from evolute.engine.loss import Loss, as_loss
from evolute.errors import DataError, LossError

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # nn.KLDivLoss, on purpose
ROWS, CLASSES = 7, 4
Case = tuple[nn.Module, Any, Tensor]


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _classes(*shape: int, ignored: int | None = None) -> Tensor:
    y = torch.randint(CLASSES, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        y.view(-1)[::3] = ignored  # an unequal number in each piece of a split
    return y


def _cases(reduction: str) -> dict[str, Case]:
    logits, sequence, real = _normal(ROWS, CLASSES), _normal(ROWS, CLASSES, 3), _normal(ROWS, 2)
    other, unit, weight = _normal(ROWS, 2, seed=2), _normal(ROWS, 2, seed=3).sigmoid(), _normal(CLASSES, seed=4).exp()
    probabilities, r = _normal(ROWS, CLASSES, seed=5).softmax(1), {"reduction": reduction}
    return {
        "cross-entropy": (nn.CrossEntropyLoss(**r), logits, _classes(ROWS)),
        "cross-entropy, ignored": (nn.CrossEntropyLoss(**r), logits, _classes(ROWS, ignored=-100)),
        "cross-entropy, own index": (nn.CrossEntropyLoss(ignore_index=2, **r), logits, _classes(ROWS)),
        "cross-entropy, weights": (nn.CrossEntropyLoss(weight, **r), logits, _classes(ROWS, ignored=-100)),
        "cross-entropy, smoothed": (
            nn.CrossEntropyLoss(weight, label_smoothing=0.1, **r),
            logits,
            _classes(ROWS, ignored=-100),
        ),
        "cross-entropy, sequence": (nn.CrossEntropyLoss(weight, **r), sequence, _classes(ROWS, 3, ignored=-100)),
        "cross-entropy, probabilities": (nn.CrossEntropyLoss(weight, label_smoothing=0.2, **r), logits, probabilities),
        "cross-entropy, probabilities, sequence": (nn.CrossEntropyLoss(**r), sequence, sequence.softmax(1)),
        "nll": (nn.NLLLoss(weight, **r), logits.log_softmax(1), _classes(ROWS, ignored=-100)),
        "mse": (nn.MSELoss(**r), real, other),
        "l1": (nn.L1Loss(**r), real, other),
        "smooth l1": (nn.SmoothL1Loss(beta=0.5, **r), real, other),
        "huber": (nn.HuberLoss(delta=0.7, **r), real, other),
        "soft margin": (nn.SoftMarginLoss(**r), real, other.sign()),
        "bce": (nn.BCELoss(weight[:2], **r), real.sigmoid(), unit),
        "bce with logits": (nn.BCEWithLogitsLoss(weight[:2], pos_weight=weight[2:], **r), real, unit),
        "poisson": (nn.PoissonNLLLoss(full=True, **r), real, unit),
        "kl": (nn.KLDivLoss(**r), logits.log_softmax(1), probabilities),
        "kl, log target": (nn.KLDivLoss(log_target=True, **r), logits.log_softmax(1), probabilities.log()),
        "gaussian": (nn.GaussianNLLLoss(full=True, **r), (real, unit + 0.1), other),
    }


NAMES = list(_cases("mean"))


def _whole(loss: nn.Module, output: Any, y: Tensor) -> Tensor:
    return loss(output[0], y, output[1]) if isinstance(output, tuple) else loss(output, y)


def _pieces(output: Any, y: Tensor, sizes: list[int]) -> list[tuple[Any, Tensor]]:
    outputs = (
        zip(*(part.split(sizes) for part in output), strict=True) if isinstance(output, tuple) else output.split(sizes)
    )
    return list(zip(outputs, y.split(sizes), strict=True))


def _objective(loss: Loss, output: Any, y: Tensor, sizes: list[int]) -> Tensor:
    pairs = [loss.criterion(piece, (None, target)) for piece, target in _pieces(output, y, sizes)]
    total = torch.stack([total for total, _ in pairs]).sum()
    return total / sum(count for _, count in pairs) if loss.mean else total


@pytest.mark.parametrize("name", NAMES)
@given(cuts=st.sets(st.integers(1, ROWS - 1)))
@settings(max_examples=8, deadline=None)
def test_any_split_is_the_mean_over_the_whole(name: str, cuts: set[int]) -> None:
    nn_loss, output, y = _cases("mean")[name]
    edges = [0, *sorted(cuts), ROWS]
    sizes = [b - a for a, b in pairwise(edges)]
    torch.testing.assert_close(
        _objective(as_loss(nn_loss), output, y, sizes), _whole(nn_loss, output, y), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_any_split_is_the_sum_over_the_whole(name: str) -> None:
    nn_loss, output, y = _cases("sum")[name]
    loss = as_loss(nn_loss)
    assert not loss.mean
    torch.testing.assert_close(_objective(loss, output, y, [3, 4]), _whole(nn_loss, output, y), rtol=1e-13, atol=0)


def test_batchmean_counts_rows() -> None:
    output, y = _normal(ROWS, CLASSES).log_softmax(1), _normal(ROWS, CLASSES, seed=1).softmax(1)
    nn_loss = nn.KLDivLoss(reduction="batchmean")
    torch.testing.assert_close(_objective(as_loss(nn_loss), output, y, [1, 6]), nn_loss(output, y), rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_terms_add_up_to_the_sum(name: str) -> None:
    nn_loss, output, y = _cases("mean")[name]
    loss = as_loss(nn_loss)
    assert loss.terms is not None
    total, _ = loss.criterion(output, [None, y])
    pieces = loss.terms(output, [None, y])
    assert total.shape == () and pieces.dim() == 1
    torch.testing.assert_close(pieces.sum(), total, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gaussian"])
def test_sums_have_two_derivatives(name: str) -> None:
    nn_loss, output, y = _cases("mean")[name]
    criterion: Callable[[Tensor], Tensor] = lambda z: as_loss(nn_loss).criterion(z, (None, y))[0]  # noqa: E731
    z = output.clone().requires_grad_()
    assert gradcheck(criterion, z, fast_mode=True)
    assert gradgradcheck(criterion, z, fast_mode=True)


def test_the_users_loss_is_not_touched() -> None:
    nn_loss = nn.CrossEntropyLoss(torch.ones(CLASSES, dtype=torch.float64), label_smoothing=0.1)
    before = dict(nn_loss.__dict__)
    as_loss(nn_loss).criterion(_normal(ROWS, CLASSES), (None, _classes(ROWS)))
    assert nn_loss.reduction == "mean" and before == dict(nn_loss.__dict__)


def test_a_batch_without_any_term_counts_nothing() -> None:
    total, count = as_loss(nn.CrossEntropyLoss()).criterion(_normal(2, CLASSES), (None, torch.tensor([-100, -100])))
    assert float(total) == 0.0 and int(count) == 0


def test_inputs_are_one_argument_or_keywords() -> None:
    class Sum(nn.Module):
        def forward(self, a: Any, b: Tensor | None = None) -> Any:
            return a if b is None else a + b

    loss, x = as_loss(nn.MSELoss()), _normal(2)
    assert loss.forward(Sum(), (x, x)) is x
    assert loss.forward(Sum(), [(x, x), x]) == (x, x)
    torch.testing.assert_close(loss.forward(Sum(), ({"a": x, "b": x}, x)), 2 * x)


def test_a_loss_passes_through_and_a_plain_subclass_is_its_base() -> None:
    class Renamed(nn.MSELoss):
        pass

    loss = as_loss(Renamed())
    assert as_loss(loss) is loss


class _Weighted(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (nn.MSELoss(reduction="none"), "nn.MSELoss: expected reduction 'mean' or 'sum', got 'none'"),
        (nn.CTCLoss(), "got CTCLoss, whose sum and number of terms are not known"),
        (nn.functional.mse_loss, "got function, whose sum and number of terms are not known"),
        (nn.MSELoss, "got the class MSELoss"),
        (_Weighted(), "got _Weighted"),
    ],
)
def test_an_unknown_loss_is_answered_with_the_recipe(bad: Any, message: str) -> None:
    with pytest.raises(LossError, match="criterion=lambda output, batch: ") as error:
        as_loss(bad)
    assert message in str(error.value)


@pytest.mark.bad_input
def test_a_loss_is_made_of_functions() -> None:
    with pytest.raises(LossError, match="criterion must be a function, got Tensor"):
        Loss(lambda model, batch: model(batch), torch.zeros(()))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [torch.zeros(2), (1, 2, 3), {"x": 1}, None])
def test_a_batch_that_is_no_pair_is_named(batch: Any) -> None:
    with pytest.raises(DataError, match=r"expected a batch \(x, y\).*got (Tensor|tuple of 3|dict|NoneType)"):
        as_loss(nn.MSELoss()).forward(nn.Identity(), batch)


def test_an_output_that_would_be_broadcast_is_refused() -> None:
    with pytest.raises(LossError, match=r"output \(3, 1\) and target \(3,\) differ in shape"):
        as_loss(nn.MSELoss()).criterion(torch.zeros(3, 1), (None, torch.zeros(3)))


def test_an_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(LossError, match=r"nn\.MSELoss expects tensors, got tuple"):
        as_loss(nn.MSELoss()).criterion((torch.zeros(1), None), (None, torch.zeros(1)))
