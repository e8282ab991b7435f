"""From a checkpoint and data to an objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evolute import Objective
from evolute.cli.checkpoint import files, images, text, weights
from evolute.cli.checkpoint.source import Source, find, library
from evolute.cli.checkpoint.task import TASKS, maker, task_of
from evolute.cli.checkpoint.tokens import check_length, context, tokenizer
from evolute.cli.refusal import refuse
from evolute.cli.subject import Options, Subject, chosen, refuse_non_finite

__all__ = ["TASKS", "checkpoint"]

SAMPLES, BATCH = 64, 8


def checkpoint(
    model: str, data: str | None, options: Options, *, task: str | None, length: int | None, trusted: bool
) -> Subject:
    """The model in `model`, judged on `data` as its kind is."""
    source = find(model, trusted=trusted)
    config = source.load(library().AutoConfig, "the config")
    task = task_of(config, source.where, task)
    made = weights.load(source, maker(library(), task), config, options.dtype or torch.float32)
    refuse_non_finite(made, source.where)
    batches = _batches(source, made, config, task, data, length, options)
    made.to(options.device)
    params = chosen(made, options.params)
    objective = Objective.from_hf(made, batches, params=params, memory=options.memory)
    return Subject(objective, source.name, _about(made, task, data, batches))


def _batches(
    source: Source, model: nn.Module, config: Any, task: str, data: str | None, length: int | None, options: Options
) -> list[text.Batch]:
    generator = torch.Generator().manual_seed(options.seed)
    samples, batch = options.samples or SAMPLES, options.batch_size or BATCH
    if task == "image-classification":
        return _images(source, config, data, length, text.Shape(0, samples, batch), generator, options)
    words = tokenizer(source, config)
    shape = text.Shape(check_length(length, context(model, config, words), source.where), samples, batch)
    if task == "sequence-classification":
        return text.sequences(words, files.labelled(_given(data, task)), config, source.where, shape, generator)
    make = text.causal if task == "causal-lm" else text.masked
    return make(words, files.prose(data or "english"), shape, generator)


def _images(
    source: Source,
    config: Any,
    data: str | None,
    length: int | None,
    shape: text.Shape,
    generator: torch.Generator,
    options: Options,
) -> list[text.Batch]:
    if length is not None:
        refuse("--length is for text, and this model reads images")
    found = images.images(source, _given(data, "image-classification"), config, shape, generator)
    return [{key: _cast(value, options.dtype) for key, value in batch.items()} for batch in found]


def _given(data: str | None, task: str) -> str:
    if data is None:
        refuse(f"--data is needed for {task}: a folder with a subfolder per class")
    return data


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _about(model: nn.Module, task: str, data: str | None, batches: list[text.Batch]) -> dict[str, Any]:
    count = sum(len(batch["labels"]) for batch in batches)
    what = {"image-classification": "images", "sequence-classification": "texts"}.get(task)
    what = what or f"windows of {batches[0]['input_ids'].shape[1]} tokens"
    name = Path(data).name if data and Path(data).exists() else data or "english"
    return {"model": type(model).__name__, "data": f"{name}: {count} {what}"}
