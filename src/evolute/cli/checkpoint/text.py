"""Text as batches: windows for language models, one sequence per text for classifiers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evolute.cli.checkpoint.files import Labelled
from evolute.cli.checkpoint.task import class_index
from evolute.cli.checkpoint.tokens import Frame, frame
from evolute.cli.refusal import refuse

IGNORED, MASKED_SHARE = -100, 0.15
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """How many tokens a window has at most, how many windows there are, and how many in a batch."""

    length: int
    samples: int
    batch: int


def windows(tokenizer: Any, content: str, shape: Shape, around: Frame, generator: torch.Generator) -> Tensor:
    """(samples, length) tokens that do not overlap, drawn if there are more than asked for; a short text is one."""
    tokens: list[int] = tokenizer.encode(content, add_special_tokens=False)
    inner = min(shape.length - len(around), len(tokens))
    if inner < 2:
        refuse(f"the text has {len(tokens)} tokens in windows of {shape.length}; expected two or more to predict")
    starts = torch.arange(0, len(tokens) - inner + 1, inner)
    drawn = starts[torch.randperm(len(starts), generator=generator)[: shape.samples].sort().values]
    return torch.tensor([around.around(tokens[start : start + inner]) for start in drawn.tolist()])


def causal(tokenizer: Any, content: str, shape: Shape, generator: torch.Generator) -> list[Batch]:
    """The next token after each; the model's loss shifts the labels."""
    rows = windows(tokenizer, content, shape, Frame(), generator)
    return [{"input_ids": part, "labels": part.clone()} for part in rows.split(shape.batch)]


def masked(tokenizer: Any, content: str, shape: Shape, generator: torch.Generator) -> list[Batch]:
    """15 % of the tokens of each window hidden, the same in every pass; only they are predicted."""
    if tokenizer.mask_token_id is None:
        refuse("the tokenizer has no mask token, so it is not one of a masked language model")
    around = frame(tokenizer)
    rows = windows(tokenizer, content, shape, around, generator)
    hidden = _hidden(rows, around, generator)
    inputs, labels = rows.masked_fill(hidden, tokenizer.mask_token_id), rows.masked_fill(~hidden, IGNORED)
    pairs = zip(inputs.split(shape.batch), labels.split(shape.batch), strict=True)
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y} for x, y in pairs]


def _hidden(rows: Tensor, around: Frame, generator: torch.Generator) -> Tensor:
    """At least one in each row, and no special token."""
    inner = rows.shape[1] - len(around)
    count = max(1, round(MASKED_SHARE * inner))
    places = torch.rand(len(rows), inner, generator=generator).topk(count).indices + len(around.before)
    return torch.zeros_like(rows, dtype=torch.bool).scatter(1, places, value=True)


def sequences(
    tokenizer: Any, pairs: Labelled, config: Any, where: str, shape: Shape, generator: torch.Generator
) -> list[Batch]:
    """Each text with its class, cut to the length; shorter ones are padded where the tokenizer can."""
    order = torch.randperm(len(pairs), generator=generator)[: shape.samples].tolist()
    labels = _labels([pairs[i][1] for i in order], {label for _, label in pairs}, config, where)
    texts = [pairs[i][0] for i in order]
    size = shape.batch if tokenizer.pad_token_id is not None and config.pad_token_id is not None else 1
    return [
        _padded(tokenizer, texts[i : i + size], shape.length) | {"labels": labels[i : i + size]}
        for i in range(0, len(texts), size)
    ]


def _padded(tokenizer: Any, texts: list[str], length: int) -> Batch:
    made = tokenizer(texts, truncation=True, max_length=length, padding=len(texts) > 1, return_tensors="pt")
    if not made["input_ids"].numel():
        refuse("a text has no token in it")
    return dict(made)


def _labels(found: list[str], names: Iterable[str], config: Any, where: str) -> Tensor:
    if config.num_labels == 1 or config.problem_type == "regression":
        try:
            return torch.tensor([float(label) for label in found])
        except ValueError:
            refuse(f"'{where}' predicts a number, and the labels of the data are not numbers")
    index = class_index(sorted(names), config, where)
    return torch.tensor([index[label] for label in found])
