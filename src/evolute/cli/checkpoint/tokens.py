"""The tokenizer of a checkpoint, and how many tokens the model can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from evolute.cli.checkpoint.source import Source, library
from evolute.cli.refusal import refuse

DEFAULT_LENGTH = 128
LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")


def tokenizer(source: Source, config: Any) -> Any:
    """That of the checkpoint and no other; transformers makes one without words where there is none."""
    made = source.load(library().AutoTokenizer, "the tokenizer")
    if len(made) <= len(made.all_special_ids):
        remedy = "put its tokenizer.json there, with tokenizer.save_pretrained"
        refuse(f"'{source.where}' has no tokenizer, and text means nothing to the model without its own; {remedy}")
    known = _text_config(config).vocab_size
    if max(made.get_vocab().values()) >= known and len(made) > known:
        refuse(f"the tokenizer of '{source.where}' knows {len(made):,} tokens and the model {known:,}; they do not fit")
    return made


def context(model: nn.Module, config: Any, tokenizer: Any) -> int | None:
    """Tokens that the model can read at once; None if there is no limit."""
    config = _text_config(config)
    found = [getattr(config, name, None) for name in LIMITS] + [tokenizer.model_max_length, _positions(model)]
    limits = [limit for limit in found if isinstance(limit, int) and 0 < limit < 10**9]
    return min(limits, default=None)


def _positions(model: nn.Module) -> int | None:
    """RoBERTa and its like begin to count after the padding."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            padding: int | None = module.padding_idx  # pyright: ignore[reportAssignmentType]
            return module.num_embeddings - (0 if padding is None else padding + 1)
    return None


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_length(asked: int | None, limit: int | None, where: str) -> int:
    """Tokens in a window: never more than the model can read."""
    if asked is not None and limit is not None and asked > limit:
        refuse(f"--length {asked} is more than the {limit} tokens that '{where}' can read at once")
    return asked or min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)


@dataclass(frozen=True)
class Frame:
    """The special tokens around a text.

    >>> Frame((2,), (3,)).around([7, 8])
    [2, 7, 8, 3]
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, tokens: list[int]) -> list[int]:
        return [*self.before, *tokens, *self.after]


def frame(tokenizer: Any) -> Frame:
    """What the tokenizer puts around a text, such as [CLS] and [SEP]."""
    bare, full = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return Frame(tuple(full[:start]), tuple(full[start + len(bare) :]))
