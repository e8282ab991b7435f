"""Groups partition the parameters, have the names of the table, and their slices are what they say."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evolute.engine.groups import groups
from evolute.linop.space import Group, Part
from families import FAMILIES

transformers = pytest.importorskip("transformers")

D = 8
_SIZES: dict[str, Any] = {
    "vocab_size": 9,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_GROUPED = _SIZES | {"num_key_value_heads": 1, "head_dim": 4}
_GPT: dict[str, Any] = {"vocab_size": 9, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 6}
_OPT: dict[str, Any] = {"vocab_size": 9, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
_STACKS = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
_HEADS = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
_WIDTHS = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 12)
_BART: dict[str, Any] = {"vocab_size": 9, "d_model": D, "max_position_embeddings": 6} | _STACKS | _HEADS | _WIDTHS
_IMAGE: dict[str, Any] = {"image_size": 4, "patch_size": 2, "num_channels": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": _SIZES | {"embedding_size": 4},
    "BartForConditionalGeneration": _BART,
    "BertForMaskedLM": _SIZES,
    "BertForQuestionAnswering": _SIZES,
    "BloomForCausalLM": {"vocab_size": 9, "hidden_size": D, "n_layer": 2, "n_head": 2},
    "DistilBertForSequenceClassification": {"vocab_size": 9, "dim": D, "n_layers": 2, "n_heads": 2, "hidden_dim": 12},
    "GPT2LMHeadModel": _GPT,
    "GPTBigCodeForCausalLM": _GPT,
    "GPTNeoXForCausalLM": _SIZES,
    "LlamaForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "MixtralForCausalLM": _GROUPED | {"num_local_experts": 2},
    "OPTForCausalLM": _OPT | {"ffn_dim": 12, "word_embed_proj_dim": 4, "max_position_embeddings": 6},
    "Phi3ForCausalLM": _SIZES,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": _GROUPED,
    "RobertaForMaskedLM": _SIZES,
    "SwinForImageClassification": _IMAGE
    | {"image_size": 16, "embed_dim": 4, "depths": [2, 1], "num_heads": [1, 2], "window_size": 2},
    "T5ForConditionalGeneration": {
        "vocab_size": 9,
        "d_model": D,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 1,
        "num_heads": 2,
    },
    "ViTForImageClassification": {key: _SIZES[key] for key in _SIZES if key != "vocab_size"} | _IMAGE,
}


def _hugging_face(name: str, **settings: Any) -> nn.Module:
    config = name.split("For")[0].removesuffix("LMHeadModel") + "Config"
    tokens = {} if "Image" in name else _TOKENS
    return getattr(transformers, name)(getattr(transformers, config)(**(CONFIGS[name] | tokens | settings)))


class _Attention(nn.Module):
    """Packed in one linear, as small GPTs are written."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(D, 3 * D)
        self.c_proj = nn.Linear(D, D)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(D)
        self.attn = _Attention()
        self.ln_2 = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D))
        self.gain = nn.Parameter(torch.ones(D))


class _GPT2Like(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(9, D)
        self.h = nn.ModuleList(_Block() for _ in range(layers))
        self.ln_f = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, 9, bias=False)


class _Of(nn.Module):
    """Any modules under any names."""

    def __init__(self, children: Mapping[str, nn.Module | nn.Parameter]) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda build=build: build().model for name, build in FAMILIES.items()},
    **{name: lambda name=name: _hugging_face(name) for name in CONFIGS},
    "GPT-2 with cross attention": lambda: _hugging_face("GPT2LMHeadModel", add_cross_attention=True),
    "BERT, untied": lambda: _hugging_face("BertForMaskedLM", tie_word_embeddings=False),
    "nn.Transformer": lambda: nn.Transformer(D, 2, 1, 2, 12),
    "nn.TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(D, 2, 12),
    "nn.MultiheadAttention, apart": lambda: nn.MultiheadAttention(D, 2, kdim=6, vdim=5, add_bias_kv=True),
    "packed in a linear": _GPT2Like,
    "two towers": lambda: _Of({"image": _Of({"blocks": nn.ModuleList([_Block()])}), "text": _GPT2Like()}),
    "weight norm": lambda: _weight_norm(),
    "not a transformer": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(2, 2)),
}


def _weight_norm() -> nn.Module:
    model = _GPT2Like()
    nn.utils.parametrizations.weight_norm(model.h[0].mlp[0])
    return model


def _assert_partition(model: nn.Module, found: Mapping[str, Group]) -> None:
    """Every entry of every parameter is in one group, and in one only."""
    marks = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for parts in found.values():
        for part in parts:
            part.of(marks[part.name]).add_(1)
    assert [name for name, mark in marks.items() if not bool((mark == 1).all())] == []
    assert all(name and parts and "#" not in name and ".." not in name for name, parts in found.items())


@pytest.mark.parametrize("name", MODELS)
def test_groups_partition_the_parameters(name: str) -> None:
    model = MODELS[name]()
    _assert_partition(model, groups(model))


_WORDS = """layers h blocks layer 0 1 self_attn attn multihead_attn q_proj c_attn qkv mlp fc1 wi norm encoder decoder
    module embed lm_head head relative_position lora_A"""
_NAMES = st.sampled_from(_WORDS.split())
_LEAVES: list[Callable[[], Any]] = [
    lambda: nn.Linear(2, 6),
    lambda: nn.LayerNorm(2),
    lambda: nn.MultiheadAttention(2, 1),
    lambda: nn.Embedding(2, 2),
    lambda: nn.Parameter(torch.zeros(3)),
    lambda: transformers.pytorch_utils.Conv1D(6, 2),
    _Attention,
    _Block,
]
_TREES = st.recursive(
    st.sampled_from(_LEAVES).map(lambda leaf: leaf()),
    lambda children: st.dictionaries(_NAMES, children, min_size=1, max_size=4).map(_Of),
    max_leaves=12,
).filter(lambda tree: isinstance(tree, nn.Module))


@given(_TREES)
def test_groups_partition_whatever_the_names(model: nn.Module) -> None:
    _assert_partition(model, groups(model))


# ---------------------------------------------------------------- names

_ATTENTION = ["attn.q", "attn.k", "attn.v", "attn.o"]
_CROSS = ["cross.q", "cross.k", "cross.v", "cross.o"]
_MLP = ["mlp.up", "mlp.down"]
_GATED = ["mlp.gate", "mlp.up", "mlp.down"]
_NORMS = ["norm1", "norm2"]
_BERT = ["embed", "embed.position", "embed.type", "embed.norm", "head.dense", "head.norm", "unembed"]


def _layers(names: list[str], count: int = 2, stack: str = "") -> list[str]:
    return [f"{stack}layers.{index}.{name}" for index in range(count) for name in names]


_T5_ENCODER = _layers([*_ATTENTION, "attn.position", *_MLP, *_NORMS], 1, "encoder.")
_T5_DECODER = _layers([*_ATTENTION, "attn.position", *_CROSS, *_MLP, *_NORMS, "norm3"], 1, "decoder.")
EXPECTED: dict[str, list[str]] = {
    "attention": _ATTENTION,
    "encoder, pre-norm, gelu": ["embed", *_layers([*_ATTENTION, *_MLP, *_NORMS], 1), "head"],
    "nn.TransformerDecoderLayer": [*_ATTENTION, *_CROSS, *_MLP, *_NORMS, "norm3"],
    "nn.MultiheadAttention, apart": [*_ATTENTION, "attn.bias_k", "attn.bias_v"],
    "GPT2LMHeadModel": ["embed", "embed.position", *_layers([*_ATTENTION, *_MLP, *_NORMS]), "norm"],
    "GPTNeoXForCausalLM": ["embed", *_layers(["attn.qkv", "attn.o", *_MLP, *_NORMS]), "norm", "unembed"],
    "LlamaForCausalLM": ["embed", *_layers([*_ATTENTION, *_GATED, *_NORMS]), "norm", "unembed"],
    "MistralForCausalLM": ["embed", *_layers([*_ATTENTION, *_GATED, *_NORMS]), "norm", "unembed"],
    "Qwen2ForCausalLM": ["embed", *_layers([*_ATTENTION, *_GATED, *_NORMS]), "norm", "unembed"],
    "Phi3ForCausalLM": ["embed", *_layers([*_ATTENTION, *_GATED, *_NORMS]), "norm", "unembed"],
    "BertForMaskedLM": [*_BERT, *_layers([*_ATTENTION, *_MLP, *_NORMS])],
    "RobertaForMaskedLM": [*_BERT, *_layers([*_ATTENTION, *_MLP, *_NORMS])],
    "AlbertForMaskedLM": [*_BERT, "embed.project", *_layers([*_ATTENTION, *_MLP, *_NORMS], 1)],
    "DistilBertForSequenceClassification": [
        *("embed", "embed.position", "embed.norm", "head", "head.dense"),
        *_layers([*_ATTENTION, *_MLP, *_NORMS]),
    ],
    "ViTForImageClassification": [
        *("embed", "embed.cls", "embed.position", "norm", "head"),
        *_layers([*_ATTENTION, *_MLP, *_NORMS]),
    ],
    "T5ForConditionalGeneration": ["embed", *_T5_ENCODER, "encoder.norm", *_T5_DECODER, "decoder.norm"],
    "nn.Transformer": [
        *_layers([*_ATTENTION, *_MLP, *_NORMS], 1, "encoder."),
        *_layers([*_ATTENTION, *_CROSS, *_MLP, *_NORMS, "norm3"], 2, "decoder."),
        "encoder.norm",
        "decoder.norm",
    ],
    "packed in a linear": ["embed", *_layers(["gain", *_ATTENTION, *_MLP, *_NORMS]), "norm", "unembed"],
    "mlp, mse": ["0", "2", "4"],
    "two towers, contrastive": ["log_scale", "left.0", "left.2", "right.0", "right.2"],
    "unused parameter": ["used", "unused", "out"],
    "tied embeddings": ["embed", "mix", "unembed"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_names(name: str) -> None:
    assert sorted(groups(MODELS[name]())) == sorted(EXPECTED[name])


def test_a_bias_is_with_its_weight() -> None:
    found = groups(_hugging_face("GPT2LMHeadModel"))
    attention = "transformer.h.1.attn.c_attn"
    assert found["layers.1.attn.k"] == (Part(f"{attention}.weight", 1, 8, 16), Part(f"{attention}.bias", 0, 8, 16))
    assert found["layers.1.mlp.up"] == (Part("transformer.h.1.mlp.c_fc.weight"), Part("transformer.h.1.mlp.c_fc.bias"))


def test_norms_are_in_the_order_of_the_computation() -> None:
    found = groups(_hugging_face("AlbertForMaskedLM"))
    assert "attention.LayerNorm" in found["layers.0.norm1"][0].name
    assert "full_layer_layer_norm" in found["layers.0.norm2"][0].name


def test_tied_weights_count_once_under_their_first_name() -> None:
    found = groups(_hugging_face("GPT2LMHeadModel"))
    assert found["embed"] == (Part("transformer.wte.weight"),)
    assert "unembed" not in found


def test_frozen_parameters_are_there_too() -> None:
    model = _GPT2Like()
    before = groups(model)
    assert groups(model.requires_grad_(False)) == before


# ---------------------------------------------------------------- slices are what they say


def _without(model: nn.Module, group: Group) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for part in group:
            part.of(parameters[part.name]).zero_()


@pytest.mark.parametrize("role", ["q", "k", "v"])
@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "packed in a linear", "Phi3ForCausalLM", "GPT-2 with cross attention"]
)
def test_a_slice_feeds_its_own_third_of_the_outputs(name: str, role: str) -> None:
    model = MODELS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    found = groups(model)
    packed = model.get_submodule(found["layers.1.attn.q"][0].name.rpartition(".")[0])
    x = torch.randn(3, D)
    before = packed(x).chunk(3, dim=-1)
    _without(model, found[f"layers.1.attn.{role}"])
    after = packed(x).chunk(3, dim=-1)
    for index, third in enumerate("qkv"):
        assert torch.equal(after[index], torch.zeros(3, D) if third == role else before[index])


def test_multihead_attention_without_keys_is_uniform_and_without_values_silent() -> None:
    x = torch.randn(1, 4, D)
    for role, expected in (("q", "uniform"), ("k", "uniform"), ("v", "silent")):
        model = nn.MultiheadAttention(D, 2, batch_first=True)
        nn.init.normal_(model.in_proj_bias)
        _without(model, groups(model)[f"attn.{role}"])
        output, weights = model(x, x, x)
        if expected == "uniform":
            torch.testing.assert_close(weights, torch.full((1, 4, 4), 0.25))
        else:
            torch.testing.assert_close(output, model.out_proj.bias.expand(1, 4, D))


@pytest.mark.parametrize("name", ["BloomForCausalLM", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM"])
def test_interleaved_heads_are_not_cut(name: str) -> None:
    found = groups(_hugging_face(name))
    assert "layers.0.attn.q" not in found
    assert all(part.whole for part in found["layers.0.attn.qkv"])


def test_grouped_queries_packed_together_are_not_cut() -> None:
    found = groups(_hugging_face("Phi3ForCausalLM", num_key_value_heads=1))
    assert found["layers.0.attn.qkv"][0].whole


# ---------------------------------------------------------------- wrappers and adapters


def _blocks_compiled() -> nn.Module:
    model: Any = _GPT2Like()
    for index, block in enumerate(model.h):
        model.h[index] = torch.compile(block)
    return model


@pytest.mark.parametrize(
    "wrapped",
    [lambda: nn.DataParallel(_GPT2Like()), lambda: torch.compile(_GPT2Like()), _blocks_compiled],
    ids=["data parallel", "compiled", "blocks compiled"],
)
def test_wrappers_are_in_the_names_of_parts_only(wrapped: Callable[[], nn.Module]) -> None:
    model = wrapped()
    found = groups(model)
    assert list(found) == list(groups(_GPT2Like()))
    _assert_partition(model, found)  # by the true names


def _lora(model: nn.Module, **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **settings))


def test_adapters_stand_beside_what_they_adapt() -> None:
    model = _lora(_hugging_face("BertForQuestionAnswering"), target_modules=["query"], modules_to_save=["qa_outputs"])
    found, prefix = groups(model), "base_model.model.bert.encoder.layer.0.attention.self.query"
    _assert_partition(model, found)
    assert found["layers.0.attn.q"] == (Part(f"{prefix}.base_layer.weight"), Part(f"{prefix}.base_layer.bias"))
    assert found["layers.0.attn.q.lora_a"] == (Part(f"{prefix}.lora_A.default.weight"),)
    assert found["layers.0.attn.q.lora_b"] == (Part(f"{prefix}.lora_B.default.weight"),)
    assert [part.name.split(".")[3] for part in found["head"]] == ["modules_to_save"] * 2
    assert [part.name.split(".")[3] for part in found["head.original"]] == ["original_module"] * 2


def test_adapters_of_a_packed_weight_stay_whole() -> None:
    model = _lora(_hugging_face("GPT2LMHeadModel"), target_modules=["c_attn"], fan_in_fan_out=True)
    found = groups(model)
    assert found["layers.0.attn.q"][0].label.endswith("c_attn.base_layer.weight[:, 0:8]")
    assert [part.whole for name in "ab" for part in found[f"layers.0.attn.qkv.lora_{name}"]] == [True, True]


def test_adapters_around_an_attention() -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 12)
    model = _lora(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), target_modules=["self_attn"])
    assert {"layers.0.attn.q", "layers.0.attn.qkv.lora_a", "layers.0.attn.o.lora_b"} <= groups(model).keys()


# ---------------------------------------------------------------- models of one's own


def test_stacks_are_told_apart_by_what_their_paths_do_not_share() -> None:
    found = groups(MODELS["two towers"]())
    assert {"image.layers.0.attn.q", "text.layers.1.attn.q", "text.embed", "text.norm", "text.unembed"} <= found.keys()


def test_attention_outside_of_layers_is_named_by_where_it_is() -> None:
    model = _Of({"pool": nn.MultiheadAttention(D, 2), "first": _Block(), "self_attn": nn.MultiheadAttention(D, 2)})
    expected = [f"{prefix}{name}" for prefix in ("pool.", "first.", "") for name in _ATTENTION]
    expected += [f"first.{name}" for name in (*_MLP, *_NORMS, "gain")]
    assert sorted(groups(model)) == sorted(expected)


def test_where_two_modules_want_one_name_both_go_by_their_paths() -> None:
    layer = _Of({"attn": _Attention(), "fc1": nn.Linear(D, D), "expert": _Of({"fc1": nn.Linear(D, D)})})
    model = _Of({"layers": nn.ModuleList([layer])})
    assert sorted(groups(model)) == sorted([*_layers(_ATTENTION, 1), "layers.0.fc1", "layers.0.expert.fc1"])


def test_a_group_never_hides_a_prefix() -> None:
    """'layers.0' selects all of the layer, so no group may be called that."""
    for build in (lambda: _GPT2Like(), lambda: _hugging_face("SwinForImageClassification")):
        found = groups(build())
        assert not any(other.startswith(f"{name}.") for name in found if name.startswith("layers") for other in found)


def test_the_order_is_that_of_the_parameters() -> None:
    model = _GPT2Like()
    names = [name for name, _ in model.named_parameters()]
    first = [names.index(parts[0].name) for parts in groups(model).values()]
    assert first == sorted(first)
