"""A Hugging Face checkpoint under a sink: the share of attention of its first token, beside its curvature."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from evolute.engine.objective import Objective
from evolute.studies.checkpoints import Checkpoint, load
from evolute.studies.first_token import share_of
from evolute.studies.sinks.gpt import curvature
from evolute.studies.study import Cell, Row


def measure(cell: Cell) -> list[Row]:
    """As it was loaded, with a sink imposed on every layer."""
    sink = cell["sink"]
    checkpoint = _checkpoint(*(cell[name] for name in ("model", "samples", "length", "tokens", "precision", "seed")))
    objective = Objective.from_hf(checkpoint.model, [checkpoint.batch(sink)])
    layers = [share_of(A) for A in checkpoint.attention(sink)]
    name = Path(cell["model"]).name
    told = {"kind": "checkpoint", "model": name, "point": "imposed", "sink": sink, "seed": cell["seed"]}
    return [
        {
            **told,
            "loss": objective.value(),
            "attention": sum(layers) / len(layers),
            "attention_by_layer": layers,
            **curvature(objective, cell["probes"], cell["lanczos"], cell["seed"]),
        }
    ]


@lru_cache(maxsize=1)
def _checkpoint(folder: str, samples: int, length: int, tokens: str, precision: str, seed: int) -> Checkpoint:
    return load(folder, samples, length, tokens, precision, seed)
