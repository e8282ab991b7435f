"""On every device that this machine has: the same operators as in float64 on the CPU, and no waiting for the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evolute as ev

DEVICES = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())[:1])]
KINDS = [ev.Hessian, ev.GaussNewton, ev.FunctionalHessian, ev.EmpiricalFisher]


class Tagger(nn.Module):
    """Tokens (B, L) → classes (B·L, 5), with fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, self.out.weight.dtype)
        return self.out(self.encoder(self.embed(tokens), mask=causal, is_causal=True)).flatten(0, 1)


def case(device: str, dtype: torch.dtype, **options: Any) -> ev.Objective:
    torch.manual_seed(0)
    model = Tagger()
    batches = [(torch.randint(11, (n, 9)), torch.randint(5, (9 * n,))) for n in (4, 4, 3)]
    batches[0][1][:7] = -100
    return ev.Objective(copy.deepcopy(model).to(device, dtype), batches, nn.CrossEntropyLoss(), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_operator_on_every_device(
    kind: Any, memory: int | None, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    op, truth = kind(case(device, dtype, memory=memory)), kind(case("cpu", torch.float64))
    V = torch.randn(truth.shape[1], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for vectors in (V, V[:, 0]):
        product = op @ vectors.to(device, dtype)
        assert product.device.type == torch.device(device).type and product.dtype == dtype
        assert (product.double().cpu() - truth @ vectors).norm() <= tolerance * (truth @ vectors).norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_does_not_wait_for_the_device(device: str) -> None:
    """A host that waits for each product leaves the device idle between two of them."""
    H = ev.Hessian(case(device, torch.float32))
    v = torch.ones(H.shape[1], device=device)
    expected = H @ v
    torch.cuda.set_sync_debug_mode("error") if device.startswith("cuda") else None
    try:
        again = H @ v
    finally:
        torch.cuda.set_sync_debug_mode("default") if device.startswith("cuda") else None
    assert torch.allclose(again, expected, rtol=1e-3, atol=1e-6)


def closed(device: str, dtype: torch.dtype, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    block = ev.zoo.Block(ev.zoo.BlockConfig(width=8, heads=2, hidden=12, bias=True, causal=True, **options))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    x, y = (torch.randn(3, 5, 8, generator=generator).to(device, dtype) for _ in range(2))
    return ev.closed_form(copy.deepcopy(block).to(device, dtype), x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 5e-5)])
@pytest.mark.parametrize("options", [{}, {"norm": "pre", "attention": "linear", "gated": True, "activation": "silu"}])
def test_the_same_closed_form_on_every_device(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float, device: str
) -> None:
    op, truth = closed(device, dtype, **options), closed("cpu", torch.float64, **options)
    matrix = ev.to_dense(truth)
    V = torch.randn(truth.shape[1], 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = {
        "product": (op @ V.to(device, dtype), matrix @ V),
        "dense": (ev.to_dense(op), matrix),
        "block": (ev.to_dense(op.block("v", "q")), ev.to_dense(truth.block("v", "q"))),
        "input": (ev.to_dense(op.input), ev.to_dense(truth.input)),
        "norms": (op.norms("fro").values_, truth.norms("fro").values_),
        "bounds": (op.bounds(norms=False).bound.values_, truth.bounds(norms=False).bound.values_),
    }
    for name, (ours, exact) in found.items():
        assert (ours.double().cpu() - exact).norm() <= tolerance * exact.norm(), name


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_answers_on_every_device(device: str) -> None:
    """Eigenvalues to their tolerance; estimates within their own intervals."""
    matrix = ev.to_dense(ev.Hessian(case("cpu", torch.float64)))
    H, values = ev.Hessian(case(device, torch.float64)), torch.linalg.eigvalsh(matrix)
    generator = torch.Generator().manual_seed(0)
    found = ev.eigsh(H, 3, tol=1e-6, generator=generator, progress=False)
    expected = torch.cat([values[:3], values[-3:]])
    assert torch.allclose(found.values.double().cpu(), expected, rtol=1e-6, atol=1e-9)
    for estimate, truth in (
        (ev.trace(H, generator=generator, progress=False), matrix.trace()),
        (ev.spectrum(H, probes=4, steps=20, generator=generator, progress=False).trace, matrix.trace()),
    ):
        low, high = estimate.interval(0.9999)
        assert low <= float(truth) <= high
    b = torch.ones(H.shape[1], dtype=torch.float64)
    solution = ev.solve(ev.GaussNewton(case(device, torch.float64)), b.to(device), damping=1.0, progress=False)
    gauss = ev.to_dense(ev.GaussNewton(case("cpu", torch.float64))) + torch.eye(len(b), dtype=torch.float64)
    assert torch.allclose(solution.x.cpu(), torch.linalg.solve(gauss, b), rtol=1e-2, atol=1e-4)
