"""flow: against dense Hessians of the rest of a model in its activations, and in the parameters of its blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import evolute as ev
from evolute.apps.flow import Flow, _Sums  # pyright: ignore[reportPrivateUsage]
from evolute.zoo import GPT, MLP, ViT, cross_entropy

D = torch.float64
LOSS = ev.Loss(*cross_entropy)


def tiny(norm: Any = "pre") -> tuple[GPT, list[tuple[Tensor, Tensor]]]:
    model = GPT(5, 3, 4, 1, 2, norm=norm, hidden=4, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 1, 2]])
    labels = torch.tensor([[1, -100, 3], [4, 0, 1], [2, 2, 2]])
    return model, [(tokens[:2], labels[:2]), (tokens[2:], labels[2:])]


def rest(model: GPT, layer: int, labels: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Logits from the stream after that layer, and the sum of the losses from logits."""

    def logits(x: Tensor) -> Tensor:
        for block in model.layers[layer + 1 :]:
            x = block(x)
        return model.unembed(x if model.norm is None else model.norm(x)).flatten(0, -2)

    return logits, lambda out: F.cross_entropy(out, labels.flatten(), ignore_index=-100, reduction="sum")


def composed(outer: Callable[[Tensor], Tensor], inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: outer(inner(x))


def streams(model: GPT, tokens: Tensor) -> list[Tensor]:
    x = model.embed(tokens) + model.position.weight[: tokens.shape[1]]
    found = [x.detach()]
    for block in model.layers:
        found.append(block(found[-1]).detach())
    return found


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_activations_are_those_of_the_dense_hessian(norm: str) -> None:
    """All of H, H_o, H_f, exact: a shift in the wrong place, or one that leaks into another batch, would differ."""
    model, batches = tiny(norm)
    found = ev.flow(model, batches, LOSS, probes=30)
    assert found.status == "exact" and found.terms == 8
    for layer, block in enumerate(found.blocks):
        totals = {name: torch.zeros(2, dtype=D) for name in ("H", "H_o", "H_f")}
        square = 0.0
        for tokens, labels in batches:
            x = streams(model, tokens)[layer + 1]
            logits, loss = rest(model, layer, labels)
            n = x.numel()
            whole = composed(loss, logits)
            with sdpa_kernel(SDPBackend.MATH):
                H = torch.autograd.functional.hessian(whole, x).reshape(n, n)
            J = torch.autograd.functional.jacobian(logits, x).reshape(-1, n)
            inner = torch.autograd.functional.hessian(loss, logits(x)).reshape(len(J), -1)
            square += float(torch.autograd.functional.jacobian(whole, x).square().sum())
            G = J.T @ inner @ J
            for name, A in (("H", H), ("H_o", G), ("H_f", H - G)):
                totals[name] += torch.stack([A.trace(), A.square().sum()])
        for name, (trace, norms) in totals.items():
            assert float(block.activations.trace[name]) == pytest.approx(float(trace) / 8, rel=1e-8, abs=1e-10)
            assert float(block.activations.norm[name]) == pytest.approx(float(norms / 8) ** 0.5, rel=1e-8, abs=1e-10)
            assert block.activations.trace[name].exact
        assert block.activations.gradient == pytest.approx((square / 8) ** 0.5)


def test_parameters_are_those_of_the_blocks_of_the_hessian() -> None:
    model, batches = tiny()
    objective = ev.Objective(model, batches, LOSS)
    found = ev.flow(model, batches, LOSS, probes=200)
    for layer, block in enumerate(found.blocks):
        names = [name for name in objective.parameters if name.startswith(f"layers.{layer}.")]
        H, G = (ev.to_dense(op.restrict(names)) for op in (ev.Hessian(objective), ev.GaussNewton(objective)))
        assert block.parameters and block.parameters.size == len(H)
        for name, A in (("H", H), ("H_o", G), ("H_f", H - G)):
            assert float(block.parameters.trace[name]) == pytest.approx(float(A.trace()), rel=1e-8, abs=1e-10)
            assert float(block.parameters.norm[name]) == pytest.approx(float(A.norm()), rel=1e-8)


def test_norms_shares_and_sizes_are_those_of_the_streams() -> None:
    model, batches = tiny()
    found = ev.flow(model, batches, LOSS, probes=2)
    x = [torch.cat(each) for each in zip(*(streams(model, tokens) for tokens, _ in batches), strict=True)]
    for layer, block in enumerate(found.blocks):
        variance = x[layer].var(-1, correction=0) + 1e-5
        assert block.inverse_variance[f"layers.{layer}.norm1"] == pytest.approx(float((1 / variance).mean()))
        cosine = F.cosine_similarity(x[layer], x[layer + 1], dim=-1)
        assert block.residual_share == pytest.approx(float(cosine.square().mean()))
        assert block.activation == pytest.approx(float(x[layer + 1].square().mean().sqrt()))
        assert set(block.inverse_variance) == {f"layers.{layer}.norm{i}" for i in (1, 2)}


def test_estimates_hold_the_truth_and_say_their_error() -> None:
    model, batches = tiny()
    exact = ev.flow(model, batches, LOSS, probes=200)
    for seed in range(3):
        found = ev.flow(model, batches, LOSS, probes=8, generator=torch.Generator().manual_seed(seed))
        assert found.status == "sampled"
        for truth, block in zip(exact.blocks, found.blocks, strict=True):
            for a, b in ((truth.activations, block.activations), (truth.parameters, block.parameters)):
                for name in a.trace:
                    low, high = b.trace[name].interval(0.999)
                    assert low <= float(a.trace[name]) <= high
                    low, high = b.norm[name].interval(0.999)
                    assert low <= float(a.norm[name]) <= high


def test_data_may_be_cut_into_batches_in_any_way() -> None:
    model, batches = tiny()
    tokens, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    one, many = (ev.flow(model, each, LOSS, probes=200) for each in ([(tokens, labels)], batches))
    for a, b in zip(one.blocks, many.blocks, strict=True):
        assert float(a.activations.trace["H"]) == pytest.approx(float(b.activations.trace["H"]))
        assert float(a.activations.norm["H_f"]) == pytest.approx(float(b.activations.norm["H_f"]))


# ---------------------------------------------------------------- which blocks


def test_blocks_of_other_models() -> None:
    images = [(torch.randn(2, 1, 4, 4), torch.tensor([0, 1]))]
    cross = nn.CrossEntropyLoss()
    found = ev.flow(ViT(4, 2, 1, 3, 4, layers=2, seed=0), images, cross, probes=2)
    assert [block.name for block in found.blocks] == ["layers.0", "layers.1"]
    mlp = ev.flow(MLP([16, 4, 3], seed=0), images, cross, probes=2)
    assert mlp.blocks[0].residual_share is None and not mlp.blocks[0].inverse_variance
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(ev.ModelError, match=r"Sequential has no list of blocks \(nn.ModuleList\). Name the list"):
        ev.flow(plain, images, cross)
    named = ev.flow(plain, images, cross, blocks=[plain[1], plain[3]], probes=2)
    assert [block.name for block in named.blocks] == ["1", "3"]
    assert [block.name for block in ev.flow(plain, images, cross, blocks="", probes=2).blocks] == ["0", "1", "2", "3"]
    assert ev.flow(plain, images, cross, blocks=[plain[2]], probes=2).blocks[0].parameters is None


def test_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=7, n_positions=4, n_embd=4, n_layer=2, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.tensor([[0, 1, 2, 3]])
    found = ev.flow(model, [{"input_ids": ids, "labels": ids}], probes=2)
    assert [block.name for block in found.blocks] == ["transformer.h.0", "transformer.h.1"]
    assert set(found.blocks[0].inverse_variance) == {f"transformer.h.0.ln_{i}" for i in (1, 2)}
    assert found.blocks[1].activations.size == 16 and found.terms == 3
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=7, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=1, decoder_start_token_id=0
        )
    )
    with pytest.raises(ev.ModelError, match=r"several lists of blocks \(encoder.block, decoder.block\)"):
        ev.flow(t5, [{"input_ids": ids, "labels": ids}])
    assert ev.flow(t5, [{"input_ids": ids, "labels": ids}], blocks="encoder.block", probes=2).blocks[0].inverse_variance


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2)])
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[0](x))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ev.ModelError, "'blocks.0' runs more than once in one pass"),
        ({"blocks": "layers"}, ev.ModelError, "Twice has no module 'layers'. Name the list of blocks"),
        ({"blocks": "idle"}, ev.ModelError, "'idle' is a Linear with no modules inside"),
        ({"blocks": [nn.Linear(2, 2)]}, ev.ModelError, "expected modules of the Twice, got Linear"),
        ({"blocks": []}, ev.ModelError, "expected modules of the Twice, got none"),
        ({"probes": 1}, ev.VectorError, "probes: expected how many, at least 2, got 1"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, batches = Twice(), [(torch.ones(3, 2), torch.zeros(3, 2))]
    with pytest.raises(error, match=message):
        ev.flow(model, batches, nn.MSELoss(), **options)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_blocks_that_do_not_run_are_named() -> None:
    model = Twice()
    with pytest.raises(ev.ModelError, match="'idle' does not run when the loss is computed"):
        ev.flow(model, [(torch.ones(3, 2), torch.zeros(3, 2))], nn.MSELoss(), blocks=[model.idle])
    with pytest.raises(ev.ModelError, match=r"expected a torch\.nn\.Module, got int"):
        ev.flow(3, [], nn.MSELoss())  # pyright: ignore


def test_nothing_of_the_model_changes_and_results_come_back(tmp_path: Path) -> None:
    model, batches = tiny()
    before = copy.deepcopy(model.state_dict())
    found = ev.flow(model.train(), batches, LOSS, probes=4)
    assert model.training and all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = Flow.load(found.save(tmp_path / "flow"))
    assert str(again) == str(found) and "layers.1" in str(again)
    assert float(again.blocks[1].activations.norm["H_f"]) == float(found.blocks[1].activations.norm["H_f"])


def test_columns_of_the_table_stand_apart_from_long_names() -> None:
    model = nn.ModuleDict({"a_name_of_more_than_twenty_letters": nn.Linear(2, 2, dtype=torch.float64)})
    block = model["a_name_of_more_than_twenty_letters"]
    run = ev.Loss(lambda model, batch: block(batch), lambda output, batch: (output.square().sum(), len(batch)))
    row = str(ev.flow(model, [torch.ones(3, 2).double()], run, blocks=[block], probes=80)).splitlines()[1]
    assert row.split()[0] == "a_name_of_more_than_twenty_letters" and float(row.split()[1]) == pytest.approx(4.0)


def test_the_error_of_a_trace_is_the_spread_of_many_runs() -> None:
    """Var vᵀAv = 2(n tr A² − (tr A)²)/(n + 2) of directions of length √n; half of it would do in most runs."""
    A, n, probes = torch.tensor([9.0, 1.0, 1.0, 1.0, -2.0, 0.0], dtype=torch.float64), 6, 4
    said = 0.0
    for seed in range(400):
        sums = _Sums(probes)
        rows = sums.drawn(n, A, torch.Generator().manual_seed(seed))
        sums.add(rows, rows * A, torch.zeros_like(rows), 0.0)
        said += sums.curvature(1.0, per_term=False).trace["H"].standard_error ** 2 / 400
    truth = 2 * (n * float(A.square().sum()) - float(A.sum()) ** 2) / (n + 2) / probes
    assert said == pytest.approx(truth, rel=0.1)
