"""The loss of a Hugging Face model as (sum, number of terms); nothing here imports transformers.

Labels are read as the model's own `loss` reads them: -100 is no term, causal models are shifted by one token,
encoder-decoders are not (their decoder's inputs are), and the mean over one batch is `model(**batch).loss`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evolute.engine.loss import RECIPE, Count, Loss
from evolute.errors import DataError, LossError

IGNORED = -100
Rule = Callable[[Any, Mapping[str, Any], Any], tuple[Tensor, Count]]  # (output, batch, config) -> (each term, count)


def hf_loss(model: nn.Module) -> Loss:
    """Σ sum / Σ terms over batches that are mappings with labels; on one batch it is `model(**batch).loss`.

    Causal and masked language models, sequence-to-sequence, classification of sequences, tokens, images, video and
    audio, multiple choice and extractive question answering, also inside PEFT, DataParallel and compiled wrappers.
    """
    base = unwrap(model)
    kind = _kind(base)
    rule, config = _RULES[kind], cast(Any, base).config

    def forward(model: nn.Module, batch: Any) -> Any:
        return _outputs(kind, model, _labelled(kind, batch))

    def criterion(output: Any, batch: Any) -> tuple[Tensor, Count]:
        each, count = rule(output, _labelled(kind, batch), config)
        return each.sum(), count

    def terms(output: Any, batch: Any) -> Tensor:
        return rule(output, _labelled(kind, batch), config)[0]

    return Loss(forward, criterion, terms)


def unwrap(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside PEFT, (Distributed)DataParallel and torch.compile wrappers."""
    if callable(getattr(model, "get_base_model", None)):
        return unwrap(cast(Any, model).get_base_model())
    for name in ("_orig_mod", "module"):
        inner = dict(model.named_children()).get(name)
        if inner is not None:
            return unwrap(inner)
    return model


# ---------------------------------------------------------------- which loss a model has

_KINDS = {
    r"For(MaskedLM|TokenClassification|MultipleChoice|NextSentencePrediction)": "tokens",
    r"For(Sequence|Image|Video|Audio)Classification": "classes",
    r"ForQuestionAnswering(Simple)?": "spans",
    r"ForConditionalGeneration|EncoderDecoderModel": "seq2seq",
    r"ForCausalLM|LMHeadModel|ModelWithLMHead": "causal",
}


def _kind(model: nn.Module) -> str:
    name, config = type(model).__name__, getattr(model, "config", None)
    kind = next((kind for pattern, kind in _KINDS.items() if re.search(rf"({pattern})$", name)), None)
    if config is None or kind is None or "_loss_function" in vars(model):
        raise LossError(f"{name} is not a Hugging Face model whose loss is known. {RECIPE}")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False):
        raise LossError(
            f"{name} adds a router loss, which is not a sum over tokens: set config.output_router_logits = False "
            f"to study the language-modelling loss alone. {RECIPE}"
        )
    return _language_kind(model, kind) if kind in ("seq2seq", "causal") else kind


def _language_kind(model: nn.Module, kind: str) -> str:
    """Encoder-decoders do not shift labels; the rest does where the library's common loss is called."""
    called = set(inspect.unwrap(type(model).forward).__code__.co_names)
    if kind == "seq2seq" and getattr(model.config, "is_encoder_decoder", False):
        if called & {"loss_function", "CrossEntropyLoss", "cross_entropy"}:
            return "seq2seq"
    elif "loss_function" in called:
        return "causal"
    # Bart's decoder does not shift, Qwen2-Audio shifts under a mask, ProphetNet predicts n-grams: no guessing
    raise LossError(f"{type(model).__name__} computes its loss in a way of its own, shifted or not. {RECIPE}")


# ---------------------------------------------------------------- what the model computes


def _labelled(kind: str, batch: Any) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise DataError(
            f"expected a mapping with the arguments of the model and labels, got {type(batch).__name__}. "
            "For batches (x, y) pass a loss of torch.nn; for any other, ev.Loss(forward, criterion)."
        )
    batch = cast("Mapping[str, Any]", batch)
    missing = [key for key in _label_keys(kind) if batch.get(key) is None]
    if missing:
        hint = (
            "; a language model's labels are its input_ids, with -100 where there is padding"
            if kind == "causal"
            else ""
        )
        raise DataError(f"the batch has no {missing[0]!r}, only {', '.join(map(repr, batch))}: add it{hint}.")
    return batch


def _label_keys(kind: str) -> tuple[str, ...]:
    return ("start_positions", "end_positions") if kind == "spans" else ("labels",)


def _outputs(kind: str, model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Logits, or (start, end) logits; the model does not see the labels, so that no loss is computed twice."""
    base = unwrap(model)
    inputs = {key: value for key, value in batch.items() if key not in _label_keys(kind)}
    if "use_cache" in inspect.signature(base.forward).parameters:
        inputs.setdefault("use_cache", False)
    if kind == "seq2seq" and not {"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys():
        inputs |= _decoder_inputs(base, batch["labels"])
    output = model(**inputs)
    if kind == "spans":
        return _field(output, "start_logits", 0), _field(output, "end_logits", 1)
    return _field(output, "logits", int("labels" in inputs))


def _field(output: Any, name: str, position: int) -> Tensor:
    """One of the model's outputs, also where config.return_dict is False."""
    value = cast("tuple[Any, ...]", output)[position] if isinstance(output, tuple) else getattr(output, name, None)
    if not isinstance(value, Tensor):
        got = type(cast(object, output)).__name__
        raise LossError(f"expected an output with '{name}', got {got}. {RECIPE}")
    return value


def _decoder_inputs(base: nn.Module, labels: Tensor) -> dict[str, Tensor]:
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    return {"labels": labels} if prepare is None else {"decoder_input_ids": prepare(labels=labels)}


# ---------------------------------------------------------------- what its loss is


def _tokens(logits: Tensor, batch: Mapping[str, Any], config: Any) -> tuple[Tensor, Count]:
    return _cross_entropy(logits, batch["labels"])


def _next_tokens(logits: Tensor, batch: Mapping[str, Any], config: Any) -> tuple[Tensor, Count]:
    labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]  # cheaper than a copy of logits[..., :-1, :]
    return _cross_entropy(logits, labels)


def _classes(logits: Tensor, batch: Mapping[str, Any], config: Any) -> tuple[Tensor, Count]:
    labels, single = cast(Tensor, batch["labels"]), config.num_labels == 1
    integer = labels.dtype in (torch.int64, torch.int32)
    guess = "regression" if single else "single_label_classification" if integer else "multi_label_classification"
    problem = config.problem_type or guess
    if problem == "single_label_classification":
        return _cross_entropy(logits, labels)
    if problem == "regression":
        return _entries(F.mse_loss, *(x.reshape(-1) if single else x for x in (logits, labels)))
    return _entries(F.binary_cross_entropy_with_logits, logits, labels)


def _spans(output: tuple[Tensor, Tensor], batch: Mapping[str, Any], config: Any) -> tuple[Tensor, Count]:
    """A start and an end are a term each; positions outside of the text are none.

    Hugging Face takes the mean of two means: the same, unless the numbers of starts and ends inside the text differ.
    """
    length = output[0].shape[1]
    ends = [batch[key].reshape(-1).clamp(0, length) for key in _label_keys("spans")]
    labels = torch.cat(ends)
    return _cross_entropy(torch.cat(output), labels.where(labels < length, IGNORED))


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Count]:
    labels = labels.reshape(-1).to(logits.device)
    if labels.numel() * logits.shape[-1] != logits.numel():
        raise LossError(f"{labels.numel()} labels do not fit logits of shape {tuple(logits.shape)}. {RECIPE}")
    each = F.cross_entropy(_full(logits).reshape(-1, logits.shape[-1]), labels, ignore_index=IGNORED, reduction="none")
    return each, (labels != IGNORED).sum()


def _entries(loss: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> tuple[Tensor, Count]:
    if logits.shape != labels.shape:
        raise LossError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}. {RECIPE}"
        )
    logits = _full(logits)
    return loss(logits, labels.to(logits), reduction="none").reshape(-1), labels.numel()


def _full(logits: Tensor) -> Tensor:
    """Half precision is too coarse for a loss; double stays double."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


_RULES: dict[str, Rule] = {
    "tokens": _tokens,
    "seq2seq": _tokens,
    "causal": _next_tokens,
    "classes": _classes,
    "spans": _spans,
}
