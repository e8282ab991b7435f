"""Tiny checkpoints with random weights, as `save_pretrained` writes them; their tokenizers are made here, offline."""

from pathlib import Path
from typing import Any

import torch

WORDS = "the quick brown fox jumps over the lazy dog and runs away from the slow red cat".split()  # noqa: SIM905
PROSE = " ".join(WORDS * 12)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TEXT = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 16, "pad_token_id": 0}
CLASSES = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, **TEXT}),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, **TEXT, "num_key_value_heads": 1}),
    "BertForMaskedLM": ("BertConfig", SMALL | TEXT),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL | TEXT | {"max_position_embeddings": 12}),
    "BertForSequenceClassification": ("BertConfig", SMALL | TEXT | CLASSES),
    "BertModel": ("BertConfig", SMALL | TEXT),
    "ViTForImageClassification": ("ViTConfig", SMALL | CLASSES | {"image_size": 8, "patch_size": 4}),
}


def save(folder: Path, name: str, *, words: bool = True, **settings: Any) -> Path:
    """A model of that class, with a tokenizer or an image processor beside it."""
    import transformers

    config, sizes = CONFIGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, name)(getattr(transformers, config)(**(sizes | settings)))
    made.save_pretrained(folder)
    if name.startswith("ViT"):
        transformers.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    elif words:
        tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """One token per word; [CLS] and [SEP] around a text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def pictures(folder: Path, *labels: str, each: int = 3) -> Path:
    from PIL import Image

    for index, label in enumerate(labels):
        (folder / label).mkdir(parents=True)
        for number in range(each):
            shade = 60 * index + 20 * number
            Image.new("RGB", (10, 12), (shade, 255 - shade, 40)).save(folder / label / f"{number}.png")
    return folder
