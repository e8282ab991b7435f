"""Tiny random models, one for each family that has to work: float64, at most 1200 parameters, seeded, ragged data.

`FAMILIES[name]()` builds a fresh one. Every parameter is away from its initial value (no zero biases, no unit norms),
and no two batches have the same number of terms, so that a mean of batch means is another number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evolute.engine.hf import hf_loss
from evolute.engine.loss import Loss

VOCAB, D, HEADS, LENGTH = 9, 8, 2, 5
SIZES = (2, 3, 1)  # sequences in each batch
IGNORED = -100


@dataclass(frozen=True)
class Family:
    model: nn.Module
    batches: list[Any]
    loss: nn.Module | Loss


def _generic(build: Callable[[], nn.Module], scale: float = 0.3) -> nn.Module:
    """Built from one seed, in float64, every parameter away from its initial value, without dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    return model


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=_random(seed))


def _tokens(*shape: int, seed: int, below: int = VOCAB) -> Tensor:
    return torch.randint(2, below, shape, generator=_random(seed))  # 0 pads and 1 ends


def _lengths(size: int) -> Tensor:
    """Which tokens are text: the i-th sequence of a batch has LENGTH − i of them."""
    return torch.arange(LENGTH) < LENGTH - torch.arange(size).unsqueeze(1)


# ---------------------------------------------------------------- plain PyTorch


class _Tagger(nn.Module):
    """A tag for each token, by `nn.TransformerEncoder`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        layer = nn.TransformerEncoderLayer(D, HEADS, 12, dropout=0.0, batch_first=True, **settings)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(D, 4)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return self.head(x).transpose(1, 2)  # (b, l, tags) -> (b, tags, l)


def _encoder(padded: bool, **settings: Any) -> Family:
    batches: list[Any] = []
    for seed, size in enumerate(SIZES):
        tokens, tags, text = (
            _tokens(size, LENGTH, seed=seed),
            _tokens(size, LENGTH, seed=seed + 9, below=4),
            _lengths(size),
        )
        x = {"tokens": tokens, "padding": ~text} if padded else tokens
        batches.append((x, tags.where(text, IGNORED)))
    return Family(_generic(partial(_Tagger, **settings)), batches, nn.CrossEntropyLoss())


def _attention() -> Family:
    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return model(x, x, x, attn_mask=causal, need_weights=False)[0]

    def criterion(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.mse_loss(output, batch[1], reduction="sum"), output.numel()

    model = _generic(lambda: nn.MultiheadAttention(D, HEADS, batch_first=True))
    batches = [(_normal(n, LENGTH, D, seed=n), _normal(n, LENGTH, D, seed=n + 9)) for n in SIZES]
    return Family(model, batches, Loss(forward, criterion))


def _mlp(loss: nn.Module) -> Family:
    model = _generic(lambda: nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))
    targets = [_normal(n, 2, seed=n + 9) for n in (5, 3, 1)]
    targets = [y.sigmoid() if isinstance(loss, nn.BCEWithLogitsLoss) else y for y in targets]
    return Family(model, [(_normal(len(y), 4, seed=len(y)), y) for y in targets], loss)


class _TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
        self.right = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1)
        return self.log_scale.exp() * left @ right.T  # (batch, batch) similarities


def _contrastive() -> Family:
    """InfoNCE inside each batch: its terms are coupled, so that here the batches are part of the objective."""

    def terms(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, torch.arange(len(output)), reduction="none")

    def criterion(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return terms(output, batch).sum(), len(output)

    batches = [(_normal(n, 4, seed=n), _normal(n, 5, seed=n + 9)) for n in (4, 3, 2)]
    return Family(_generic(_TwoTowers), batches, Loss(lambda model, batch: model(*batch), criterion, terms))


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 4)
        self.unused = nn.Linear(4, 2)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.used(x).sigmoid())


def _unused() -> Family:
    return Family(_generic(_Unused), [(_normal(n, 3, seed=n), _normal(n, 2, seed=n + 9)) for n in (4, 2)], nn.MSELoss())


class _Tied(nn.Module):
    """The next token from the mean of the ones before, with one matrix to read and to write."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.mix = nn.Linear(D, D)
        self.unembed = nn.Linear(D, VOCAB)
        self.unembed.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1).unsqueeze(-1)
        return self.unembed(F.gelu(self.mix(x))).transpose(1, 2)


def _tied() -> Family:
    batches: list[Any] = []
    for seed, size in enumerate(SIZES):
        tokens = _tokens(size, LENGTH + 1, seed=seed)
        batches.append((tokens[:, :-1], tokens[:, 1:].where(_lengths(size), IGNORED)))
    return Family(_generic(_Tied), batches, nn.CrossEntropyLoss())


# ---------------------------------------------------------------- Hugging Face, with the attention they come with


def _hf(build: Callable[[], nn.Module], batch: Callable[[int, int], Mapping[str, Tensor]]) -> Family:
    model = _generic(build)
    return Family(model, [batch(seed, size) for seed, size in enumerate(SIZES)], hf_loss(model))


def _text(seed: int, size: int) -> dict[str, Tensor]:
    """Padded text with labels at every token of it."""
    tokens, text = _tokens(size, LENGTH, seed=seed), _lengths(size)
    return {"input_ids": tokens.where(text, 0), "attention_mask": text.long(), "labels": tokens.where(text, IGNORED)}


def _masked_text(seed: int, size: int) -> dict[str, Tensor]:
    """Padded text with labels at some tokens."""
    batch = _text(seed, size)
    chosen = torch.rand(size, LENGTH, generator=_random(seed)) < 0.5
    return batch | {
        "labels": _tokens(size, LENGTH, seed=seed + 9).where(chosen & (batch["labels"] != IGNORED), IGNORED)
    }


def _translation(seed: int, size: int) -> dict[str, Tensor]:
    target = _tokens(size, 4, seed=seed + 9)
    target[0, 3:] = IGNORED
    return _text(seed, size) | {"labels": target}


def _images(seed: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": _normal(size, 1, 4, 4, seed=seed), "labels": _tokens(size, seed=seed, below=4) - 1}


def _gpt2_model(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_embd": D,
        "n_layer": 1,
        "n_head": HEADS,
        "n_positions": LENGTH,
        "n_inner": 12,
    }
    tokens = {"bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings))


def _llama_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    grouped = {"num_key_value_heads": 1, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, **grouped, bos_token_id=1, eos_token_id=1))


def _encoder_sizes() -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": D, "intermediate_size": 12, "num_attention_heads": HEADS}
    return sizes | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert_model() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": LENGTH}
    return BertForMaskedLM(BertConfig(**sizes, **_encoder_sizes()))


def _albert_model() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": LENGTH, "embedding_size": 4}
    return AlbertForMaskedLM(AlbertConfig(**sizes, **_encoder_sizes(), bos_token_id=1, eos_token_id=1))


def _vit_model() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": 1, "image_size": 4, "patch_size": 2, "num_channels": 1, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes, **_encoder_sizes()))


def _t5_model() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": D,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": HEADS,
    }
    buckets: dict[str, Any] = {"relative_attention_num_buckets": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **buckets))


def _lora_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    low_rank = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(_gpt2_model(), low_rank)


FAMILIES: dict[str, Callable[[], Family]] = {
    "encoder, post-norm, relu": lambda: _encoder(False, activation="relu"),
    "encoder, pre-norm, gelu": lambda: _encoder(False, activation="gelu", norm_first=True),
    "encoder, post-norm, gelu, padded": lambda: _encoder(True, activation="gelu"),
    "attention": _attention,
    "gpt2": lambda: _hf(_gpt2_model, _text),
    "llama": lambda: _hf(_llama_model, _text),
    "bert": lambda: _hf(_bert_model, _masked_text),
    "albert": lambda: _hf(_albert_model, _masked_text),
    "vit": lambda: _hf(_vit_model, _images),
    "t5": lambda: _hf(_t5_model, _translation),
    "gpt2, lora": lambda: _hf(_lora_model, _text),
    "mlp, mse": lambda: _mlp(nn.MSELoss()),
    "mlp, bce": lambda: _mlp(nn.BCEWithLogitsLoss()),
    "two towers, contrastive": _contrastive,
    "unused parameter": _unused,
    "tied embeddings": _tied,
}
