"""Models of the zoo against plain loops, its data against arithmetic, its training against itself."""

import gzip
import importlib
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import evolute as ev
from evolute import zoo
from evolute.errors import DataError, LossError, MissingExtraError, ModelError, NonFiniteError
from evolute.zoo.config import BlockConfig
from evolute.zoo.data import IGNORED, split
from evolute.zoo.data_images import read_idx
from evolute.zoo.schedules import SCHEDULES
from evolute.zoo.trained import one_thread as single_threaded
from evolute.zoo.training import OPTIMIZERS

D = torch.float64


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by more."""
    with single_threaded():
        yield


# ---------------------------------------------------------------- the block, token by token

ACTIVATE: dict[str, Callable[[float], float]] = {
    "relu": lambda h: max(h, 0.0),
    "gelu": lambda h: h * (1 + math.erf(h / math.sqrt(2))) / 2,
    "gelu_tanh": lambda h: h * (1 + math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2,
    "silu": lambda h: h / (1 + math.exp(-h)),
}
SCORE = {"linear": lambda s: s, "sigmoid": lambda s: 1 / (1 + math.exp(-s)), "relu": lambda s: max(s, 0.0)}


def affine(row: Tensor, linear: nn.Linear) -> Tensor:
    out = linear.weight @ row
    return out if linear.bias is None else out + linear.bias


def normalised(row: Tensor, norm: nn.Module, config: BlockConfig) -> Tensor:
    c = row - row.mean() if config.norm_kind == "layer" else row
    z = c / math.sqrt(float((c * c).mean()) + config.eps)
    return z * norm.weight + (norm.bias if config.norm_kind == "layer" else 0.0)


def weights(scores: list[float | None], config: BlockConfig) -> list[float]:
    """A row of A from a row of scores; None where a token is not seen."""
    if config.attention != "softmax":
        return [0.0 if s is None else SCORE[config.attention](s) for s in scores]
    powers = [0.0 if s is None else math.exp(s) for s in scores]
    return [p / sum(powers) for p in powers]


def attended(rows: list[Tensor], block: zoo.Block, seen: list[bool], added: Tensor) -> list[Tensor]:
    config, attn = block.config, block.attn
    q, k, v = ([affine(row, tap) for row in rows] for tap in (attn.q, attn.k, attn.v))
    size = config.width // config.heads
    out = []
    for t in range(len(rows)):
        pieces = []
        for head in range(config.heads):
            cut = slice(head * size, (head + 1) * size)
            scores: list[float | None] = []
            for s in range(len(rows)):
                score = float(q[t][cut] @ k[s][cut]) / math.sqrt(size) + float(added[t, s])
                hidden = not seen[s] or (config.causal and s > t)
                scores.append(None if hidden else score + (config.sink if s == 0 else 0.0))
            pieces.append(sum(a * v[s][cut] for s, a in enumerate(weights(scores, config))))
        joined = torch.cat(pieces)
        out.append(joined if attn.o is None else affine(joined, attn.o))
    return out


def fed(row: Tensor, block: zoo.Block) -> Tensor:
    phi = lambda h: torch.tensor([ACTIVATE[block.config.activation](float(each)) for each in h], dtype=D)  # noqa: E731
    up = affine(row, block.mlp.up)
    inner = phi(up) if block.mlp.gate is None else phi(affine(row, block.mlp.gate)) * up
    return affine(inner, block.mlp.down)


def by_loops(block: zoo.Block, x: Tensor, seen: list[bool], added: Tensor) -> Tensor:
    """One sample through the block as mathematics writes it."""
    config = block.config

    def sublayer(rows: list[Tensor], f: Callable[[list[Tensor]], list[Tensor]], norm: Any) -> list[Tensor]:
        inputs = [normalised(row, norm, config) for row in rows] if config.norm == "pre" else rows
        outs = f(inputs)
        outs = [row + out for row, out in zip(rows, outs, strict=True)] if config.residual else outs
        return [normalised(row, norm, config) for row in outs] if config.norm == "post" else outs

    rows = sublayer(list(x), lambda rows: attended(rows, block, seen, added), block.norm1)
    if config.mlp:
        rows = sublayer(rows, lambda rows: [fed(row, block) for row in rows], block.norm2)
    return torch.stack(rows)


def perturbed(model: nn.Module) -> nn.Module:
    """Away from the ones and zeros that norms and biases begin with."""
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


configs = st.builds(
    BlockConfig,
    width=st.sampled_from([2, 4]),
    heads=st.sampled_from([1, 2]),
    hidden=st.sampled_from([None, 3]),
    norm=st.sampled_from(["pre", "post", "none"]),
    norm_kind=st.sampled_from(["layer", "rms"]),
    eps=st.sampled_from([1e-5, 0.1]),
    attention=st.sampled_from(["softmax", "linear", "sigmoid", "relu"]),
    activation=st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"]),
    gated=st.booleans(),
    mlp=st.booleans(),
    output=st.booleans(),
    residual=st.booleans(),
    bias=st.booleans(),
    causal=st.booleans(),
    sink=st.sampled_from([0.0, 1.5]),
)


@given(config=configs, mask=st.sampled_from(["none", "padding", "added"]))
@example(BlockConfig(2, attention="linear", causal=True, sink=-0.5), "padding")
@example(BlockConfig(2, attention="softmax", causal=True), "added")
def test_block_is_what_its_equations_say(config: BlockConfig, mask: str) -> None:
    torch.manual_seed(0)
    block = perturbed(zoo.Block(config).to(D))
    x = torch.randn(2, 3, config.width, dtype=D)
    padding = torch.tensor([[False, False, True], [False, True, False]])
    added = torch.randn(3, 3, dtype=D) if mask == "added" else torch.zeros(3, 3, dtype=D)
    given_mask = {"none": None, "padding": padding, "added": added}[mask]
    with torch.no_grad():
        for sample, out in enumerate(block(x, given_mask)):
            seen = (~padding[sample]).tolist() if mask == "padding" else [True] * 3
            torch.testing.assert_close(out, by_loops(block, x[sample], seen, added), rtol=1e-10, atol=1e-12)


def test_minus_infinity_in_a_mask_hides_a_token_from_attention_without_softmax_too() -> None:
    block = zoo.Block(BlockConfig(4, attention="linear")).to(D)
    mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    causal = zoo.Block(BlockConfig(4, attention="linear", causal=True)).to(D)
    causal.load_state_dict(block.state_dict())
    x = torch.randn(2, 3, 4, dtype=D)
    assert torch.equal(block(x, mask), causal(x))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_is_the_encoder_layer_of_torch(norm: str, activation: str) -> None:
    theirs = nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, activation, batch_first=True, norm_first=norm == "pre", dtype=D
    ).eval()
    perturbed(theirs)
    ours = zoo.Block(BlockConfig(8, 2, 16, norm=norm, activation=activation, bias=True)).to(D)
    for name in ("weight", "bias"):
        packed = getattr(theirs.self_attn, f"in_proj_{name}").data.chunk(3)
        for tap, piece in zip((ours.attn.q, ours.attn.k, ours.attn.v), packed, strict=True):
            getattr(tap, name).data = piece.clone()
    pairs = {ours.attn.o: theirs.self_attn.out_proj, ours.mlp.up: theirs.linear1, ours.mlp.down: theirs.linear2}
    for mine, other in {**pairs, ours.norm1: theirs.norm1, ours.norm2: theirs.norm2}.items():
        mine.load_state_dict(other.state_dict())
    x, padding = torch.randn(3, 5, 8, dtype=D), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    theirs_masked = theirs(x, src_key_padding_mask=padding)
    torch.testing.assert_close(ours(x, padding)[~padding], theirs_masked[~padding], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm": "before"}, "norm must be 'pre', 'post' or 'none', got 'before'"),
        ({"norm_kind": "batch"}, "norm_kind must be 'layer' or 'rms'"),
        ({"attention": "cosine"}, "attention must be 'softmax', 'linear', 'sigmoid' or 'relu'"),
        ({"activation": "elu"}, "activation must be 'relu', 'gelu', 'gelu_tanh' or 'silu'"),
        ({"heads": 3}, "width must be a multiple of heads, got width 4 and 3 heads"),
        ({"width": 0}, "width must be a positive whole number, got 0"),
        ({"hidden": 2.5}, "hidden must be a positive whole number, got 2.5"),
    ],
)
def test_config_says_what_it_takes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        BlockConfig(**({"width": 4} | options))


@pytest.mark.parametrize("mask", [torch.ones(3, 3), torch.ones(2, 3), torch.ones(2, 4).bool(), torch.ones(2, 3).long()])
def test_a_mask_of_another_kind_is_refused(mask: Tensor) -> None:
    x = torch.randn(2, 3, 4)
    if mask.is_floating_point() and mask.shape == (3, 3):
        assert zoo.Block(BlockConfig(4))(x, mask).shape == x.shape
    else:
        with pytest.raises(DataError, match="expected a mask that is boolean of shape \\(2, 3\\)"):
            zoo.Block(BlockConfig(4))(x, mask)


# ---------------------------------------------------------------- the models


def gpt(**options: Any) -> zoo.GPT:
    return zoo.GPT(5, 6, 8, 2, 2, seed=0, **options)


@pytest.mark.parametrize("options", [{}, {"norm": "post", "sink": 1.0}, {"attention": "sigmoid", "norm": "none"}])
def test_the_future_does_not_change_the_past(options: dict[str, Any]) -> None:
    model, tokens = gpt(**options).to(D), torch.randint(5, (2, 6))
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 5
    assert torch.equal(model(tokens)[:, :4], model(other)[:, :4])
    assert not torch.allclose(model(tokens)[:, 4:], model(other)[:, 4:])


def test_models_take_shorter_sequences_and_their_own_shapes() -> None:
    assert gpt()(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 5)
    assert zoo.ViT((8, 4), 2, 3, 7, 8, 2, 1)(torch.randn(2, 3, 8, 4)).shape == (2, 7)
    assert zoo.AttentionOnly(4, heads=2, layers=3)(torch.randn(2, 5, 4)).shape == (2, 5, 4)
    assert zoo.MLP([12, 3], "identity")(torch.randn(2, 3, 4)).shape == (2, 3)


def test_patches_are_squares_in_the_order_of_reading() -> None:
    model = zoo.ViT(4, 2, 1, 3, 4, norm="none", residual=False, seed=0)
    nn.init.eye_(model.embed.weight)
    nn.init.zeros_(model.embed.bias)
    nn.init.zeros_(model.position.weight)
    entered = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    model(torch.arange(16.0).reshape(1, 1, 4, 4))
    assert entered[0][0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_a_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = gpt().state_dict(), gpt().state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(zoo.GPT(5, 6, 8).embed.weight, zoo.GPT(5, 6, 8).embed.weight)


LAYER = [f"attn.{each}" for each in "qkvo"] + ["mlp.up", "mlp.gate", "mlp.down", "norm1", "norm2"]


def test_groups_have_the_common_names() -> None:
    layers = [f"layers.{i}.{each}" for i in range(2) for each in LAYER]
    assert list(ev.groups(gpt(gated=True))) == ["embed", "embed.position", *layers, "norm", "unembed"]
    plain = [each for each in layers[: len(LAYER)] if "gate" not in each]
    assert list(ev.groups(zoo.ViT(4, 2, 1, 3, 4))) == ["embed", "embed.position", *plain, "norm", "head"]
    taps = [f"layers.{i}.attn.{each}" for i in range(2) for each in "qkv"]
    assert list(ev.groups(zoo.AttentionOnly(4, layers=2))) == taps
    tied = gpt(tied=True, norm="none")
    assert tied.unembed.weight is tied.embed.weight
    assert "unembed" not in ev.groups(tied)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: zoo.MLP([4]), "sizes are those of the input"),
        (lambda: zoo.MLP([4, 0]), "each of sizes must be a positive whole number"),
        (lambda: zoo.MLP([4, 2], "softplus"), "activation must be 'relu', "),
        (lambda: zoo.GPT(0, 4, 4), "vocabulary must be a positive"),
        (lambda: zoo.GPT(4, 4, 4, layers=0), "layers must be a positive"),
        (lambda: zoo.GPT(4, 4, 4, atention="linear"), "no option 'atention': did you mean 'attention'"),
        (lambda: zoo.ViT(8, 3, 1, 10, 4), "size must be a multiple of patch"),
    ],
)
def test_models_say_what_they_take(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        make()


def test_inputs_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"tokens \(B, L\) with L ≤ 6, got shape \(2, 7\)"):
        gpt()(torch.zeros(2, 7, dtype=torch.long))
    with pytest.raises(DataError, match=r"expected images \(B, 1, 8, 8\), got \(2, 8, 8\)"):
        zoo.ViT(8, 4, 1, 10, 4)(torch.zeros(2, 8, 8))


SMALL = {
    "softmax": lambda: zoo.GPT(12, 17, 4, 2, 1, hidden=4, seed=0),
    "sigmoid, rms, gated, sink": lambda: zoo.GPT(
        12, 17, 4, 2, 1, hidden=4, attention="sigmoid", norm_kind="rms", gated=True, sink=1.0, tied=True, seed=0
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_hessian_of_a_model_of_the_zoo_is_symmetric_and_the_difference_of_gradients(name: str) -> None:
    model, data = SMALL[name]().to(D), zoo.addition(train=5, test=1)
    H = ev.Hessian(ev.Objective(model, data.batches(2), ev.Loss(*zoo.cross_entropy)))
    u, v = torch.randn(2, H.shape[1], dtype=D)
    Hv = H @ v
    torch.testing.assert_close(u @ Hv, v @ (H @ u), rtol=1e-10, atol=1e-12)

    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    step = 1e-5 * v / v.norm()

    def gradient(point: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(point, model.parameters())
        loss = nn.functional.cross_entropy(model(data.train.x).flatten(0, 1), data.train.y.flatten())
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    difference = (gradient(w + step) - gradient(w - step)) / 2e-5 * v.norm()
    torch.testing.assert_close(Hv, difference, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- data


def test_sums_are_right_and_only_the_answer_is_asked_for() -> None:
    data = zoo.addition(train=200, test=50)
    assert (data.vocabulary, data.length) == (12, 17)
    for x, y in [*zip(data.train.x, data.train.y, strict=True), *zip(data.test.x, data.test.y, strict=True)]:
        written = data.decode(x) + data.labels[int(y[-1])]
        terms, _, answer = written.partition("=")
        a, _, b = terms.partition("+")
        assert len(written) == 18
        assert len(a) == len(b) == 5
        assert int(a) + int(b) == int(answer)
        assert (y[:11] == IGNORED).all()
        assert data.decode(y[11:]) == answer


def test_no_sum_is_both_trained_on_and_tested() -> None:
    data = zoo.addition(train=90, test=10, digits=1)
    seen = {tuple(row) for row in torch.cat([data.train.x, data.test.x]).tolist()}
    assert len(seen) == 100


def test_english_prose_is_what_python_brings() -> None:
    data = zoo.english(length=50)
    assert 400_000 < sum(len(part) * 50 for part in (data.train, data.test)) < 700_000
    assert 90 <= data.vocabulary <= 130
    assert torch.equal(data.train.x[:, 1:], data.train.y[:, :-1])
    assert "the" in data.decode(data.test.x[:20].flatten())


def test_handwritten_digits() -> None:
    data = zoo.digits()
    assert len(data.train) + len(data.test) == 1797
    assert data.train.x.shape[1:] == (1, 8, 8)
    assert (data.train.x.min(), data.train.x.max()) == (-1, 1)
    assert sorted(set(data.train.y.tolist())) == list(range(10))


DATA: dict[str, Callable[[int], zoo.Dataset]] = {
    "addition": lambda seed: zoo.addition(50, 10, seed=seed),
    "english": lambda seed: zoo.english(200, seed=seed),
    "digits": lambda seed: zoo.digits(seed=seed),
}


@pytest.mark.parametrize("name", DATA)
def test_data_is_the_same_each_time_and_another_for_another_seed(name: str) -> None:
    state = torch.get_rng_state()
    data, again, other = DATA[name](0), DATA[name](0), DATA[name](1)
    assert torch.equal(state, torch.get_rng_state())
    assert data.fingerprint == again.fingerprint != other.fingerprint
    assert data.name == again.name != other.name
    batches = data.batches(7)
    assert sum(len(x) for x, _ in batches) == len(data.train)
    assert all(torch.equal(x, z) for (x, _), (z, _) in zip(batches, again.batches(7), strict=True))


def test_first_samples_and_their_name() -> None:
    data = zoo.addition(50, 10)
    assert torch.equal(data.first(8).train.x, data.train.x[:8])
    assert data.first(8).name.endswith("[:8]")
    assert data.first(8).fingerprint != data.fingerprint


@pytest.mark.parametrize("test", [0.01, 0.5, 0.99])
def test_either_side_of_a_split_has_something(test: float) -> None:
    samples = zoo.Samples(torch.arange(3), torch.arange(3))
    left, right = split(samples, test)
    assert len(left) >= 1 <= len(right)
    assert torch.equal(torch.cat([left.x, right.x]), samples.x)


def test_text_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("xyz" * 30)
    (tmp_path / "a.txt").write_text("äbc" * 30, encoding="utf-8")
    whole = zoo.text(tmp_path, length=5)
    assert whole.vocabulary == len("äbcxyz\n")
    assert whole.fingerprint == zoo.text([tmp_path / "a.txt", tmp_path / "b.txt"], length=5).fingerprint
    assert zoo.text(tmp_path / "a.txt", length=5, level="byte").vocabulary == 256
    tested = zoo.text(tmp_path / "b.txt", length=3).test
    assert whole.decode(whole.test.x[-1]).strip("xyz") == ""
    assert torch.equal(tested.x[0], torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        (lambda at: at / "none.txt", {}, "does not exist"),
        (lambda at: at, {}, r"no \*\.txt below the folder"),
        (lambda at: [], {}, "got none"),
        (lambda at: written(at, b""), {}, "is empty"),
        (lambda at: written(at, b"\xff\xfe"), {}, r"is not utf-8 text \(.*at byte 0\); give its encoding"),
        (lambda at: written(at, b"abc"), {"encoding": "klingon"}, "unknown encoding"),
        (lambda at: written(at, b"short"), {"length": 10}, "got length=10 and 5 tokens"),
        (lambda at: written(at, b"short"), {"length": 0}, "windows of one token or more"),
        (lambda at: written(at, b"long enough"), {"length": 2, "test": 1.5}, "expected 0 < test < 1"),
    ],
)
def test_text_that_cannot_be_used(
    tmp_path: Path, prepare: Callable[[Path], Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        zoo.text(prepare(tmp_path), **options)


def written(folder: Path, content: bytes) -> Path:
    file = folder / "file.txt"
    file.write_bytes(content)
    return file


def test_a_level_of_another_name_is_refused() -> None:
    with pytest.raises(ModelError, match="level must be 'character' or 'byte', got 'word'"):
        zoo.text("x", level="word")


# ---------------------------------------------------------------- images in files


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def fashion(folder: Path) -> Path:
    for part, count in (("train", 6), ("t10k", 3)):
        images = np.arange(count * 784).reshape(count, 28, 28) % 256
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count)))
    return folder


def test_fashion_mnist_in_idx_files_packed_or_not(tmp_path: Path) -> None:
    data = zoo.fashion_mnist(fashion(tmp_path))
    assert data.train.x.shape == (6, 1, 28, 28)
    assert data.test.y.tolist() == [0, 1, 2]
    assert sorted(data.train.y.tolist()) == list(range(6))
    torch.testing.assert_close(data.test.x[0, 0, 0, :3], torch.tensor([0, 1, 2]) / 255 * 2 - 1)


def test_fashion_mnist_that_is_not_there_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"apt install dataset-fashion-mnist\), or give the folder"):
        zoo.fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a", b"\0\0\x0d\x01\0\0\0\0", "not an IDX file of bytes: it begins with 00 00 0d 01"),
        ("a", b"", "not an IDX file"),
        ("a", idx(np.arange(9))[:-1], r"cut off: 8 entries, but its header says \(9,\)"),
        ("a.gz", b"not packed", "cannot be read"),
    ],
)
def test_idx_files_that_are_none(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_idx(tmp_path / name)


def folder_of(at: Path, **arrays: np.ndarray) -> Path:
    for name, array in arrays.items():
        label, _, number = name.partition("_")
        (at / label).mkdir(exist_ok=True)
        np.save(at / label / f"{number}.npy", array)
    return at


def test_image_folder_of_arrays(tmp_path: Path) -> None:
    grey = np.full((4, 6), 255, dtype=np.uint8)
    data = zoo.image_folder(folder_of(tmp_path, dog_1=grey, cat_1=grey * 0, cat_2=np.zeros((4, 6))), channels=1)
    assert data.labels == ("cat", "dog")
    x, y = torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
    assert x.shape == (3, 1, 4, 6)
    assert x[y == 1].unique().tolist() == [1.0]
    assert x[y == 0].unique().tolist() == [-1.0]


def test_image_folder_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, colour in {"blue": (0, 0, 255), "red": (255, 0, 0)}.items():
        (tmp_path / label).mkdir()
        image.new("RGB", (5, 7), colour).save(tmp_path / label / "1.png")
    data = zoo.image_folder(tmp_path, size=4)
    samples = [*data.train.batches(1), *data.test.batches(1)]
    pixels = {data.labels[int(y)]: x[0, :, 0, 0].tolist() for x, y in samples}
    assert pixels == {"blue": [-1, -1, 1], "red": [1, -1, -1]}
    assert data.train.x.shape[1:] == (3, 4, 4)
    assert zoo.image_folder(tmp_path, channels=1).train.x.shape[1:] == (1, 7, 5)
    (tmp_path / "red" / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="is not a picture that can be read"):
        zoo.image_folder(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "options", "words"),
    [
        (lambda at: at / "none", {}, "is not a folder"),
        (lambda at: at, {}, "no image in a subfolder"),
        (lambda at: at, {"channels": 2}, "channels 1 .grey. or 3 .colour., got 2"),
        (lambda at: folder_of(at, a_1=np.zeros((2, 2)), a_2=np.zeros((2, 3))), {"channels": 1}, "images of one size"),
        (lambda at: folder_of(at, a_1=np.zeros((2, 2))), {}, r"has shape \(2, 2\), expected \(height, width, 3\)"),
        (lambda at: folder_of(at, a_1=np.zeros((2, 2))), {"channels": 1}, "two samples or more"),
        (lambda at: folder_of(at, a_1=np.array([None])), {}, "is not a NumPy array"),
    ],
)
def test_image_folders_that_cannot_be_used(
    tmp_path: Path, prepare: Callable[[Path], Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        zoo.image_folder(prepare(tmp_path), **options)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib.import_module("evolute.zoo.extras"), "import_module", missing)
    with pytest.raises(MissingExtraError, match="need scikit-learn: pip install scikit-learn"):
        zoo.digits()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"")
    with pytest.raises(MissingExtraError, match="Folders of pictures need pillow: pip install pillow"):
        zoo.image_folder(tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: zoo.addition(digits=0), "numbers of 1 to 9 digits, got 0"),
        (lambda: zoo.addition(100, 1, digits=1), "there are 100 sums of two numbers of 1 digits"),
        (lambda: zoo.addition(5, 1).batches(0), "at least one sample, got size 0"),
        (lambda: zoo.addition(5, 1).first(6), "between 1 and 5 samples, got 6"),
        (lambda: zoo.Samples(torch.ones(2), torch.ones(3)), "one target per input, got 2 inputs and 3 targets"),
    ],
)
def test_data_says_what_it_takes(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        make()


# ---------------------------------------------------------------- training


def classifier() -> zoo.MLP:
    return zoo.MLP([64, 16, 10], seed=0)


@pytest.fixture(scope="module")
def written_digits() -> zoo.Dataset:
    return zoo.digits()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimiser_learns(optimizer: str, written_digits: zoo.Dataset) -> None:
    lr = {"sgd": 0.3, "momentum": 0.05}.get(optimizer, 1e-2)
    result = zoo.train(classifier(), written_digits, steps=80, optimizer=optimizer, lr=lr, schedule="cosine")
    assert result.accuracy > 0.8
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert (result.steps, result.interrupted, result.optimizer) == (80, False, optimizer)


def test_a_step_of_gradient_descent_is_what_the_equation_says(written_digits: zoo.Dataset) -> None:
    model, batch = classifier().to(D), written_digits.first(20).batches(20)[0]
    batch = (batch[0].to(D), batch[1])
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    g = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
    result = zoo.train(model, [batch], nn.CrossEntropyLoss(), steps=1, optimizer="sgd", lr=0.1)
    torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()).detach(), w - 0.1 * g)
    torch.testing.assert_close(result.losses[0], loss.item())


def test_training_repeats_itself_and_leaves_no_trace(written_digits: zoo.Dataset) -> None:
    state = torch.get_rng_state()
    models = [nn.Sequential(nn.Dropout(0.2), classifier()).eval() for _ in range(3)]
    results = [zoo.train(m, written_digits, steps=5, seed=s) for m, s in zip(models, (0, 0, 1), strict=True)]
    assert results[0].losses == results[1].losses != results[2].losses
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module.training for model in models for module in model.modules())
    assert all(parameter.grad is None for parameter in models[0].parameters())


def test_losses_of_torch_of_evolute_and_of_the_zoo_are_one(written_digits: zoo.Dataset) -> None:
    losses = (nn.CrossEntropyLoss(), ev.Loss(*zoo.cross_entropy), zoo.cross_entropy)
    results = [zoo.train(classifier(), written_digits, loss, steps=3) for loss in losses]
    for result in results[1:]:
        assert result.losses == pytest.approx(results[0].losses)
        assert result.loss == pytest.approx(results[0].loss)
        assert result.accuracy == results[0].accuracy


def test_score_is_the_objective_however_it_is_cut() -> None:
    model, data = zoo.GPT(12, 17, 8, seed=0), zoo.addition(11, 1)
    value = ev.Objective(model, data.batches(11), ev.Loss(*zoo.cross_entropy)).value()
    for size in (1, 4, 11):
        score = zoo.evaluate(model, data.batches(size))
        assert score.loss == pytest.approx(value, rel=1e-5)
        assert score.terms == 11 * 6


def test_targets_that_are_no_labels_have_no_accuracy() -> None:
    x = torch.randn(6, 3)
    result = zoo.train(nn.Linear(3, 3), [(x, 2 * x)], nn.MSELoss(), steps=3)
    assert result.accuracy is None


def test_callback_sees_every_so_many_steps() -> None:
    seen: list[int] = []
    model, x = nn.Linear(2, 2), torch.randn(4, 2)

    def callback(step: int, loss: float, trained: nn.Module) -> None:
        assert trained is model
        seen.append(step)

    zoo.train(model, [(x, x)], nn.MSELoss(), steps=7, every=3, callback=callback)
    assert seen == [2, 5]


def test_ctrl_c_keeps_what_is_done(written_digits: zoo.Dataset) -> None:
    def stop(step: int, loss: float, model: nn.Module) -> None:
        if step == 3:
            raise KeyboardInterrupt

    result = zoo.train(classifier(), written_digits, steps=50, callback=stop)
    assert result.interrupted
    assert result.steps == 4
    assert result.losses == zoo.train(classifier(), written_digits, steps=4).losses


def test_progress_is_silent_where_nobody_looks(capfd: pytest.CaptureFixture[str], written_digits: zoo.Dataset) -> None:
    zoo.train(classifier(), written_digits, steps=2)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_a_loss_that_is_not_finite_says_when_and_what_to_try(written_digits: zoo.Dataset) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 10))
    with pytest.raises(NonFiniteError, match=r"loss of step \d+ is (nan|inf) \(it was .*\)\. Try a smaller lr than"):
        zoo.train(model, written_digits, steps=50, optimizer="sgd", lr=1e12)


def test_schedules_stay_between_zero_and_one() -> None:
    for schedule in SCHEDULES.values():
        values = [schedule(step / 100) for step in range(101)]
        assert all(0 <= value <= 1 for value in values)
        assert max(values) == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": 0}, ModelError, "steps must be a positive"),
        ({"lr": -1.0}, ModelError, "lr must be a positive number, got -1.0"),
        ({"optimizer": "lbfgs"}, ModelError, "optimizer must be 'sgd', 'momentum', 'adam' or 'adamw', got 'lbfgs'"),
        ({"schedule": "linear"}, ModelError, "schedule must be 'constant', 'cosine', 'warmup' or 'warmup_cosine'"),
        ({"data": []}, DataError, "at least one batch in every pass"),
        ({"data": iter([])}, DataError, r"pass list\(batches\)"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, ModelError, "there is nothing to train"),
        (
            {"model": zoo.GPT(12, 17, 4), "data": zoo.addition(4, 1), "loss": nn.CrossEntropyLoss()},
            LossError,
            "use zoo.c",
        ),
    ],
)
def test_training_says_what_it_takes(options: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"model": nn.Linear(2, 2), "data": [(torch.ones(1, 2), torch.ones(1, 2))], "loss": nn.MSELoss()}
    with pytest.raises(error, match=words):
        zoo.train(**(arguments | {"steps": 1} | options))


def test_a_trained_model_in_a_few_seconds() -> None:
    threads = torch.get_num_threads()
    trained = zoo.trained_addition(width=32, heads=2, layers=1, steps=100)
    assert trained.result.loss < 0.85 * trained.result.losses[0]
    assert trained.data.vocabulary == 12
    assert torch.get_num_threads() == threads
