"""A model from its config and weights, which have to fit: transformers fills gaps with random numbers and warns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from evolute.cli.checkpoint.source import Source
from evolute.cli.refusal import refuse


def load(source: Source, maker: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """In evaluation mode, with weights that fit."""
    model, found = source.load(
        maker, "the weights", config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    check_fit(source, model, found)
    return model.eval()


def check_fit(source: Source, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Every weight of the config is in the checkpoint, with its size, and no layer of the checkpoint is left over."""
    where, kind = source.where, type(model).__name__
    for key, there, wanted in sorted(found["mismatched_keys"]):
        sizes = f"{tuple(there)} in the checkpoint and {tuple(wanted)} by its config"
        refuse(f"the weights of '{where}' do not fit its config: '{key}' is {sizes}{_more(found['mismatched_keys'])}")
    for key in sorted(found["missing_keys"]):
        wanted = f"{kind} needs '{key}'{_more(found['missing_keys'])}, which the checkpoint does not have"
        refuse(f"the weights of '{where}' do not fit: {wanted}")
    extra = _left_over(model, cast("Iterable[str]", found["unexpected_keys"]))
    if extra:
        refuse(f"the weights of '{where}' do not fit its config, which has no place for '{extra[0]}'{_more(extra)}")


def _left_over(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Weights of layers beyond the last; heads of other tasks, which the model does not have, may stay behind."""
    kinds = {_numberless(name) for name, _ in model.named_parameters()}
    return sorted(key for key in unexpected if any(map(str.isdigit, key.split("."))) and _numberless(key) in kinds)


def _numberless(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".#", name)


def _more(keys: Iterable[object]) -> str:
    others = len(list(keys)) - 1
    return f" (and {others} more)" if others else ""
