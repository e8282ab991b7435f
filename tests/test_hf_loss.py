"""On one batch Σ sum / Σ terms is the model's own loss, for every kind; over batches, sums and counts add up."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evolute.engine.hf import hf_loss, unwrap
from evolute.engine.loss import Loss, as_loss
from evolute.errors import DataError, LossError
from families import FAMILIES

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, VOCAB, IGNORED = 4, 5, 11, -100
Batch = dict[str, Tensor]
Case = tuple[Callable[[], nn.Module], Batch]


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens(*shape: int, below: int = VOCAB) -> Tensor:
    return torch.randint(3, below, shape, generator=_random())


def _ignoring(labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[0, 1:] = IGNORED  # an unequal number in each row
    labels[2, 3] = IGNORED
    return labels


TOKENS = _tokens(ROWS, LENGTH)
MASK = torch.arange(LENGTH) < torch.tensor([5, 4, 5, 2]).unsqueeze(1)
TEXT: Batch = {"input_ids": TOKENS.where(MASK, 0), "attention_mask": MASK.long()}
LABELLED: Batch = TEXT | {"labels": _ignoring(TOKENS)}
IMAGES: Batch = {"pixel_values": torch.randn(ROWS, 1, 4, 4, dtype=torch.float64, generator=_random())}
CLASSES = torch.tensor([0, 2, 1, 1])
SCORES = torch.randn(ROWS, 3, dtype=torch.float64, generator=_random())
CHOICES: Batch = {"input_ids": _tokens(ROWS, 3, LENGTH)}
SPAN: Batch = {"start_positions": torch.tensor([0, 1, 2, 9]), "end_positions": torch.tensor([1, 3, 4, 9])}

_ENCODER: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "hidden_size": 8}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_FEED_FORWARD = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 12)
_HEADS = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
_STACKS = dict.fromkeys(("encoder_layers", "decoder_layers"), 1) | _HEADS | _FEED_FORWARD
_BART: dict[str, Any] = _STACKS | {"d_model": 8, "max_position_embeddings": 16, "decoder_start_token_id": 2}
_OTHER: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "DistilBert": {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12},
    "OPT": {key: _ENCODER[key] for key in _ENCODER if "inter" not in key} | {"ffn_dim": 12, "word_embed_proj_dim": 8},
    "T5": {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    "Albert": _ENCODER | {"embedding_size": 4},
    "Roberta": _ENCODER | {"max_position_embeddings": 16},
    "ViT": _ENCODER | {"image_size": 4, "patch_size": 2, "num_channels": 1},
    **dict.fromkeys(("Llama", "Mistral", "Qwen2"), _ENCODER | {"num_key_value_heads": 1}),
    **dict.fromkeys(("Bart", "Blenderbot"), _BART),  # Blenderbot prepares no decoder inputs
}


def _model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Builds a tiny model of that class, in float64."""
    family = name.split("For")[0].removesuffix("LMHeadModel").removesuffix("DoubleHeadsModel").removesuffix("Model")
    sizes = _OTHER.get(family, _ENCODER) | ({} if family == "ViT" else {"vocab_size": VOCAB} | _SPECIAL)

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**(sizes | settings))
            return getattr(transformers, name)(config).double().eval()

    return build


_LANGUAGE = """GPT2LMHeadModel LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM GPTNeoXForCausalLM OPTForCausalLM
    BertForMaskedLM RobertaForMaskedLM AlbertForMaskedLM DistilBertForMaskedLM
    T5ForConditionalGeneration BartForConditionalGeneration BlenderbotForConditionalGeneration"""
_ONE_OF_THREE = "BertForSequenceClassification GPT2ForSequenceClassification LlamaForSequenceClassification"
_BERT = "BertForSequenceClassification"
_VIT = "ViTForImageClassification"
CASES: dict[str, Case] = {
    **{name: (_model(name), LABELLED) for name in _LANGUAGE.split()},
    "BertLMHeadModel": (_model("BertLMHeadModel", is_decoder=True), LABELLED),
    "BertForTokenClassification": (_model("BertForTokenClassification", num_labels=VOCAB), LABELLED),
    **{name: (_model(name, num_labels=3), TEXT | {"labels": CLASSES}) for name in _ONE_OF_THREE.split()},
    f"{_BERT}, a number": (_model(_BERT, num_labels=1), TEXT | {"labels": SCORES[:, 0]}),
    f"{_BERT}, a column": (_model(_BERT, num_labels=1), TEXT | {"labels": SCORES[:, :1]}),
    f"{_BERT}, numbers": (_model(_BERT, num_labels=3, problem_type="regression"), TEXT | {"labels": SCORES}),
    f"{_BERT}, any of three": (_model(_BERT, num_labels=3), TEXT | {"labels": SCORES.sign().clamp(0)}),
    _VIT: (_model(_VIT, num_labels=3), IMAGES | {"labels": CLASSES}),
    f"{_VIT}, a number": (_model(_VIT, num_labels=1), IMAGES | {"labels": SCORES[:, 0]}),
    **{name: (_model(name), TEXT | SPAN) for name in ("BertForQuestionAnswering", "GPT2ForQuestionAnswering")},
    "BertForMultipleChoice": (_model("BertForMultipleChoice"), CHOICES | {"labels": CLASSES}),
    "BertForNextSentencePrediction": (_model("BertForNextSentencePrediction"), TEXT | {"labels": CLASSES % 2}),
}


def _sum(loss: Loss, model: nn.Module, batch: Any) -> tuple[float, float]:
    total, count = loss.criterion(loss.forward(model, batch), batch)
    assert total.shape == ()
    return float(total.detach()), float(count)


@pytest.mark.parametrize("name", CASES)
def test_on_one_batch_it_is_the_models_own_loss(name: str) -> None:
    build, batch = CASES[name]
    model = build()
    total, count = _sum(hf_loss(model), model, batch)  # first: the model's own loss may write to its config
    assert total / count == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)  # theirs is float32 in places


@pytest.mark.parametrize("name", CASES)
def test_batches_add_up(name: str) -> None:
    build, batch = CASES[name]
    model = build()
    loss = hf_loss(model)
    pieces = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    sums, counts = zip(*(_sum(loss, model, piece) for piece in pieces), strict=True)
    assert (sum(sums), sum(counts)) == pytest.approx(_sum(loss, model, batch), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_terms_add_up_to_the_sum(name: str) -> None:
    build, batch = CASES[name]
    model = build()
    loss = hf_loss(model)
    output = loss.forward(model, batch)
    assert loss.terms is not None
    terms, (total, _) = loss.terms(output, batch), loss.criterion(output, batch)
    assert terms.dim() == 1
    torch.testing.assert_close(terms.sum(), total, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", [name for name in CASES if "Blenderbot" not in name])
def test_the_model_sees_no_labels_and_keeps_no_cache(name: str) -> None:
    build, batch = CASES[name]
    model, seen = build(), dict[str, Any]()
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    hf_loss(model).forward(model, batch)
    assert not {"labels", "start_positions", "end_positions"} & seen.keys()
    assert seen.get("use_cache", False) is False


def test_counts_follow_the_shift_and_the_mask() -> None:
    kept = LABELLED["labels"] != IGNORED
    counts = {
        name: _sum(hf_loss(model := CASES[name][0]()), model, LABELLED)[1]
        for name in ("GPT2LMHeadModel", "BertForMaskedLM")
    }
    assert counts == {"GPT2LMHeadModel": int(kept[:, 1:].sum()), "BertForMaskedLM": int(kept.sum())}


def test_a_config_that_asks_for_tuples() -> None:
    for name in (
        "BertForMaskedLM",
        "BertForQuestionAnswering",
        "T5ForConditionalGeneration",
    ):
        build, batch = CASES[name]
        model, plain = build(), build()
        model.config.return_dict = False
        assert _sum(hf_loss(model), model, batch) == pytest.approx(_sum(hf_loss(plain), plain, batch), rel=1e-12)


def test_given_decoder_inputs_are_used() -> None:
    build, batch = CASES["T5ForConditionalGeneration"]
    model = build()
    given = batch | {"decoder_input_ids": _tokens(ROWS, LENGTH)}
    total, count = _sum(hf_loss(model), model, given)
    assert total / count == pytest.approx(float(model(**given).loss.detach()), rel=1e-6)


def test_half_precision_is_judged_in_single() -> None:
    model = CASES["GPT2LMHeadModel"][0]().bfloat16()
    loss = hf_loss(model)
    assert loss.criterion(loss.forward(model, LABELLED), LABELLED)[0].dtype == torch.float32


def test_a_batch_may_be_any_mapping() -> None:
    model = CASES["GPT2LMHeadModel"][0]()
    batch: Mapping[str, Any] = transformers.BatchEncoding(LABELLED)
    assert _sum(hf_loss(model), model, batch) == _sum(hf_loss(model), model, LABELLED)


def _wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "compiled":
        return torch.compile(model)  # type: ignore[return-value]
    if kind == "data parallel":
        return nn.DataParallel(model)
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize("kind", ["data parallel", "lora", "compiled"])
def test_wrappers_are_looked_through(kind: str) -> None:
    plain = CASES["GPT2LMHeadModel"][0]()
    expected = _sum(hf_loss(plain), plain, LABELLED)
    model = _wrapped(kind, plain)
    loss = hf_loss(model)
    assert isinstance(unwrap(model), transformers.GPT2LMHeadModel)
    assert _sum(loss, plain if kind == "compiled" else model, LABELLED) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_missing_labels_are_named(name: str) -> None:
    model = CASES[name][0]()
    with pytest.raises(DataError, match="the batch has no 'labels', only 'input_ids', 'attention_mask'"):
        hf_loss(model).forward(model, TEXT)


def test_a_missing_end_is_named() -> None:
    model = CASES["BertForQuestionAnswering"][0]()
    with pytest.raises(DataError, match="the batch has no 'end_positions'"):
        hf_loss(model).forward(model, TEXT | {"start_positions": CLASSES})


def test_a_batch_that_is_no_mapping_is_refused() -> None:
    model = CASES["GPT2LMHeadModel"][0]()
    with pytest.raises(DataError, match=r"expected a mapping .* got tuple"):
        hf_loss(model).forward(model, (TOKENS, TOKENS))


def test_labels_that_do_not_fit_are_refused() -> None:
    for name, labels in (
        ("BertForMaskedLM", TOKENS[:, 1:]),
        ("BertForSequenceClassification, numbers", SCORES[:, :1]),
    ):
        model = CASES[name][0]()
        loss = hf_loss(model)
        with pytest.raises(LossError, match=r"labels.* do not fit logits of shape"):
            loss.criterion(loss.forward(model, LABELLED), TEXT | {"labels": labels})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear is not a Hugging Face model whose loss is known"),
        (_model("BertModel"), "BertModel is not a Hugging Face model whose loss is known"),
        (_model("GPT2DoubleHeadsModel"), "GPT2DoubleHeadsModel is not"),
        (_model("BartForCausalLM"), "BartForCausalLM computes its loss in a way of its own"),
        (
            _model("MixtralForCausalLM", num_local_experts=2, output_router_logits=True),
            "set config.output_router_logits",
        ),
    ],
)
def test_an_unknown_loss_is_answered_with_the_recipe(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(LossError, match="criterion=lambda output, batch: ") as error:
        hf_loss(build())
    assert message in str(error.value)


def test_a_loss_function_of_the_users_own_is_not_guessed() -> None:
    model: Any = CASES["GPT2LMHeadModel"][0]()
    model.loss_function = lambda *args, **kwargs: 0.0
    with pytest.raises(LossError, match="is not a Hugging Face model whose loss is known"):
        hf_loss(model)


# ---------------------------------------------------------------- the registry of tiny models that other tests use


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_small_double_and_ragged(name: str) -> None:
    family = FAMILIES[name]()
    loss = as_loss(family.loss)
    pairs = [_sum(loss, family.model, batch) for batch in family.batches]
    parameters = list(family.model.parameters())
    assert sum(p.numel() for p in parameters) <= 1200
    assert {p.dtype for p in parameters} == {torch.float64}
    assert len({count for _, count in pairs}) == len(pairs)
    mean = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    assert abs(sum(total / count for total, count in pairs) / len(pairs) - mean) > 1e-4 * mean  # a mean of means


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_the_same_every_time(name: str) -> None:
    one, other = FAMILIES[name](), FAMILIES[name]()
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "albert", "vit", "t5", "gpt2, lora"])
def test_a_hugging_face_family_has_its_own_attention_and_loss(name: str) -> None:
    family = FAMILIES[name]()
    model: Any = family.model
    assert model.config._attn_implementation == "sdpa"
    for batch in family.batches:
        total, count = _sum(as_loss(family.loss), model, batch)
        assert total / count == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)
