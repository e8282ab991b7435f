"""What a checkpoint was made for, by the name of its class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from evolute.cli.refusal import refuse

TASKS = {
    "causal-lm": ("AutoModelForCausalLM", r"ForCausalLM|LMHeadModel"),
    "masked-lm": ("AutoModelForMaskedLM", r"ForMaskedLM"),
    "image-classification": ("AutoModelForImageClassification", r"ForImageClassification"),
    "sequence-classification": ("AutoModelForSequenceClassification", r"ForSequenceClassification"),
}


def task_of(config: Any, where: str, asked: str | None) -> str:
    """The one that was asked for, or the one of the config's architectures.

    >>> from types import SimpleNamespace
    >>> task_of(SimpleNamespace(architectures=["GPT2LMHeadModel"]), "gpt2", None)
    'causal-lm'
    """
    if asked is not None:
        return asked
    classes = list(getattr(config, "architectures", None) or [])
    found = [task for task, (_, ending) in TASKS.items() if classes and re.search(rf"({ending})$", classes[0])]
    if not found:
        saved = f"was saved as {classes[0]}" if classes else "does not say what it was made for"
        refuse(
            f"'{where}' {saved}; choose one of {', '.join(TASKS)} with --task, or bring the loss yourself with --from"
        )
    return found[0]


def maker(library: Any, task: str) -> Any:
    """The class of transformers that reads a checkpoint for the task."""
    return getattr(library, TASKS[task][0])


def class_index(names: list[str], config: Any, where: str) -> dict[str, int]:
    """From names of classes to those of the model: by name, by number, or in order where the model has no names."""
    known: Mapping[str, int] = {str(name).casefold(): int(i) for name, i in (config.label2id or {}).items()}
    if all(name.casefold() in known for name in names):
        return {name: known[name.casefold()] for name in names}
    if all(name.isdecimal() and int(name) < config.num_labels for name in names):
        return {name: int(name) for name in names}
    unnamed = all(re.fullmatch(r"label_\d+", name) for name in known)
    if unnamed and len(names) <= config.num_labels:
        return {name: i for i, name in enumerate(sorted(names))}
    return _refuse_classes(names, known, config, where, unnamed=unnamed)


def _refuse_classes(names: list[str], known: Mapping[str, int], config: Any, where: str, *, unnamed: bool) -> Any:
    if unnamed:
        refuse(f"the data has {len(names)} classes and '{where}' knows {config.num_labels}")
    odd = next(name for name in names if name.casefold() not in known)
    few = ", ".join(map(repr, list(known)[:5])) + (", …" if len(known) > 5 else "")
    refuse(f"'{where}' does not know the class {odd!r} of the data; it knows {few}")
