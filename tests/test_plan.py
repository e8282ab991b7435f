"""What is asked before it is spent: the estimate against what was really used, and what happens at each limit."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import evolute as ev
from evolute.engine import plan
from evolute.engine.products import Products, _widths


def objective(**options):
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    batches = [(torch.randn(n, 6, 16).double(), torch.randn(n, 6, 16).double()) for n in (4, 4, 4)]
    return ev.Objective(model, batches, nn.MSELoss(), **options)


def test_everything_is_kept_when_it_fits():
    H = ev.Hessian(objective())
    assert H.plan.kept == H.plan.batches == 3
    assert "3 of 3 batches kept" in str(H.plan)


def test_nothing_is_kept_without_a_budget():
    H = ev.Hessian(objective(memory=0))
    assert (H.plan.kept, H.plan.kept_bytes) == (0, 0)
    assert "3 recomputed for each product" in str(H.plan)


def test_part_is_kept_when_part_fits():
    whole = ev.Hessian(objective()).plan.kept_bytes
    some = ev.Hessian(objective(memory=int(0.7 * whole)))
    assert 0 < some.plan.kept < 3
    assert some.plan.kept_bytes <= 0.7 * whole


def test_kept_recomputed_and_mixed_give_the_same_product():
    torch.manual_seed(0)
    reference = objective()
    v = torch.randn(reference.space.size, dtype=torch.float64)
    whole = ev.Hessian(reference)
    expected = whole @ v
    for memory in (0, int(0.7 * whole.plan.kept_bytes)):
        reference.memory = memory
        product = ev.Hessian(reference) @ v
        assert torch.allclose(product, expected, rtol=1e-10, atol=1e-12 * expected.norm())


def test_estimate_counts_what_a_gradient_saves():
    """A linear map saves its input (the weights are there anyway); the square saves its argument."""
    model = nn.Linear(8, 8, bias=False)
    x = torch.randn(5, 8)
    batches = [(x, torch.zeros(5, 8))]
    loss = ev.Loss(lambda m, b: m(b[0]), lambda out, b: (out.square().sum(), out.numel()))
    obj = ev.Objective(model, batches, loss)
    with obj.running():
        assert plan.saved_bytes(obj, 0, batches[0]) == pytest.approx(x.nbytes + 5 * 8 * 4, abs=8)  # and a scalar


def test_a_batch_that_cannot_fit_is_refused_before_it_is_built(monkeypatch):
    obj = objective()
    monkeypatch.setattr(plan, "available", lambda device: 1000)
    with pytest.raises(ev.TooLargeError, match="Cut it into"):
        ev.Hessian(obj) @ torch.zeros(obj.space.size, dtype=torch.float64)


def test_what_cannot_be_recorded_is_recomputed(monkeypatch):
    """Enough memory for a graph but not for a recording: the same answer, nothing kept."""
    obj = objective()
    v = torch.randn(obj.space.size, dtype=torch.float64)
    expected = ev.Hessian(obj) @ v
    with obj.running():
        saved = plan.saved_bytes(obj, 0, next(iter(obj.batches.source)))
    between = int(saved * (plan.RECORDING + plan.RECOMPUTING) / 2)
    monkeypatch.setattr(plan, "available", lambda device: between)
    H = ev.Hessian(obj)
    assert torch.allclose(H @ v, expected, rtol=1e-10, atol=1e-12 * expected.norm())
    assert H.plan.kept == 0


MEASURE = """
import threading, time, psutil, torch, evolute as ev
from evolute.engine.plan import saved_bytes
torch.set_num_threads(1)
model = torch.nn.TransformerEncoder(
    torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True),
    3,
    enable_nested_tensor=False,
)
def of(n):
    return ev.Objective(model, [(torch.randn(n, 64, 128), torch.randn(n, 64, 128))], torch.nn.MSELoss(), memory=MEMORY)
small = of(1)
ev.Hessian(small) @ torch.randn(small.space.size)  # allocator pools and code, paid once
obj, process = of(32), psutil.Process()
with obj.running():
    saved = saved_bytes(obj, 0, obj.batches.source[0])
peak, base, done = [0], process.memory_info().rss, threading.Event()
def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], process.memory_info().rss - base)
thread = threading.Thread(target=watch); thread.start()
ev.Hessian(obj) @ torch.randn(obj.space.size)
done.set(); thread.join()
print(peak[0] / saved)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "promised"), [("None", plan.RECORDING), ("0", plan.RECOMPUTING)])
def test_estimate_covers_the_peak(memory, promised):
    """The bytes that the estimate promises are not exceeded, and are not idle by more than a factor of three."""
    code = MEASURE.replace("MEMORY", memory)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert promised / 3 < float(out) <= promised


@pytest.mark.parametrize(
    ("total", "block", "expected"),
    [(16, 32, [16]), (33, 32, [32, 1]), (7, 32, [4, 2, 1]), (19, 8, [8, 8, 2, 1]), (3, 1, [1, 1, 1]), (0, 32, [])],
)
def test_any_number_of_vectors_goes_in_the_widest_blocks_that_fit(total, block, expected):
    assert list(_widths(total, block)) == expected


@pytest.mark.parametrize("vectors", [2, 7, 16, 19, 33])
def test_several_vectors_are_multiplied_together_and_right(vectors, monkeypatch):
    """Fewer than the block, and numbers that it does not divide: no more programs run than blocks are needed."""
    H, runs = ev.Hessian(objective()), []
    V = torch.randn(H.shape[1], vectors, dtype=torch.float64)
    expected = torch.stack([H @ column for column in V.T], 1)
    assert H._products.block == 32
    one = Products._several
    monkeypatch.setattr(Products, "_several", lambda *args: runs.append(len(args[-1][0])) or one(*args))
    assert torch.allclose(H @ V, expected, rtol=1e-10, atol=1e-12 * expected.norm())
    assert sum(runs) == 3 * (vectors - vectors % 2)
