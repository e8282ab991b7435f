"""Causal language models of Hugging Face from a local folder, with English prose as their tokens; never the network."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from evolute.errors import StudyError
from evolute.zoo import english
from evolute.zoo.extras import extra

CHARACTERS = 16  # of prose for each token that is wanted: enough for any tokenizer
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model with eager attention, so that its weights of attention can be read, and (samples, length) tokens."""

    model: nn.Module
    tokens: Tensor

    def batch(self, sink: float) -> Mapping[str, Any]:
        """Its arguments; `sink` is added to every score of the first token, by way of the mask."""
        L = self.tokens.shape[1]
        dtype = next(self.model.parameters()).dtype
        mask = torch.full((L, L), torch.finfo(dtype).min, dtype=dtype).triu(1)
        mask[:, 0] += sink
        return {
            "input_ids": self.tokens,
            "labels": self.tokens,
            "attention_mask": mask.expand(len(self.tokens), 1, L, L),
        }

    def attention(self, sink: float) -> list[Tensor]:
        """The weights of attention of each layer, (samples, heads, length, length)."""
        with torch.no_grad():
            return list(self._output(self.batch(sink)).attentions)

    def takes_masks(self) -> bool:
        """Whether the causal mask of `batch`, without a sink, is the one that the model makes by itself."""
        try:
            with torch.no_grad():
                own, ours = (self._output(each).logits for each in ({"input_ids": self.tokens}, self.batch(0.0)))
        except (IndexError, RuntimeError, TypeError, ValueError):  # some read the mask as one of padding
            return False
        return torch.allclose(own, ours, rtol=1e-3, atol=1e-3 * float(own.abs().max()))

    def _output(self, batch: Mapping[str, Any]) -> Any:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return self.model(**inputs, output_attentions=True, use_cache=False)


def load(folder: str, samples: int, length: int, tokens: str, precision: str, seed: int) -> Checkpoint:
    """The model of that folder in evaluation mode.

    Args:
        folder: what `save_pretrained` wrote.
        samples: how many windows of text.
        length: tokens of each.
        tokens: "tokenizer", the one that is saved in the folder; or "bytes", for models whose tokens are bytes.
        precision: "float64" or "float32".
        seed: which windows.
    """
    transformers = extra("transformers", "'evolute[hf]'", "Checkpoints")
    if not (Path(folder) / "config.json").is_file():
        raise StudyError(
            f"model: expected a folder with config.json, as save_pretrained writes it, got '{folder}'; "
            "a model of the hub has to be downloaded first."
        )
    if precision not in ("float64", "float32"):
        raise StudyError(f"precision: expected float64 or float32, got {precision!r}.")
    try:
        with _without_bars(transformers.utils.logging):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, attn_implementation="eager", dtype=getattr(torch, precision)
            )
    except (OSError, ValueError) as error:
        raise StudyError(f"model: '{folder}' cannot be loaded as a causal language model: {error}") from error
    ids = _ids(transformers, folder, samples, length, tokens, seed)
    words = int(model.config.get_text_config().vocab_size)
    if int(ids.max()) >= words:
        raise StudyError(
            f"tokens: the text has the token {int(ids.max())}, the model in '{folder}' only {words} of them."
        )
    made = Checkpoint(cast("nn.Module", model).eval(), ids)
    if not made.takes_masks():
        raise StudyError(
            f"'{folder}' ({type(model).__name__}) does not run on {length} tokens with a four-dimensional causal mask, "
            "which is how a sink is added; expected a decoder such as GPT-2 or Llama, and a --set length= it takes."
        )
    return made


@contextmanager
def _without_bars(logging: Any) -> Generator[None]:
    """The study has a progress bar of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _ids(transformers: Any, folder: str, samples: int, length: int, tokens: str, seed: int) -> Tensor:
    if tokens not in ("tokenizer", "bytes"):
        raise StudyError(f"tokens: expected tokenizer or bytes, got {tokens!r}.")
    rows = english(CHARACTERS * length, seed=seed).first(samples)
    texts = [rows.decode(row) for row in rows.train.x]
    if tokens == "bytes":
        return torch.tensor([list(text.encode())[:length] for text in texts])
    encoded = [ids[:length] for ids in _tokenized(transformers, folder, texts)]
    if min(map(len, encoded)) < length:
        raise StudyError(f"length: a text of {CHARACTERS * length} characters has fewer than {length} tokens here.")
    return torch.tensor(encoded)


def _tokenized(transformers: Any, folder: str, texts: list[str]) -> list[list[int]]:
    """By the tokenizer of the folder; without files of one, transformers would make one up from the config."""
    missing = StudyError(
        f"model: there is no tokenizer in '{folder}'; save it there, or say --set tokens=bytes if the tokens of the "
        "model are bytes."
    )
    if not any(any(Path(folder).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise missing
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return [tokenizer(text)["input_ids"] for text in texts]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise missing from error
