"""Sizes of the blocks of queries, keys and values in a GPT, untrained and trained, for each map of its scores.

The norms of the last block are exact, from closed forms. The model has no norm, so that H_o of the block is that of the
model, and ReLU in its feed-forward, so that H_f(V,V) is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from evolute.studies.blocks import CLOSED, exact_norms
from evolute.studies.first_token import attentions, scores, seen
from evolute.studies.last_block import last_block
from evolute.studies.study import Cell, Row
from evolute.studies.subjects import Moment, Subject, moments

POINTS = ("untrained", "trained")
OWN, MIXED = ("Q", "K", "V"), ("Q,K", "Q,V", "K,V")
SPREADS = {"H_o": OWN, "H_f": MIXED, "H": (*OWN, *MIXED)}  # the blocks of each part that no theory says are zero


def measure(cell: Cell) -> list[Row]:
    """‖block‖_F of H, H_o and H_f at both ends of the training, with the loss on other data, and the scores."""
    options = {"norm": "none", "activation": "relu", "attention": cell["kind"]}
    sizes = {name: cell[name] for name in ("width", "heads", "layers", "steps", "samples", "seed")}
    subject = Subject(f"gpt_{cell['task']}", **sizes, options=options)
    rows = list[Row]()
    for point, moment in zip(POINTS, moments(subject, [0, subject.steps]), strict=True):
        told = {"part": "blocks", "task": cell["task"], "kind": cell["kind"], "point": point, "seed": cell["seed"]}
        score = moment.score()
        rows.append({**told, "loss": score.loss, "accuracy": score.accuracy, "scores": _scores(moment)})
        found = exact_norms(last_block(moment), {letter: CLOSED[letter] for letter in OWN})
        rows += [{**told, "block": block, "of": part, "norm": norm.value} for (block, part), norm in found.items()]
    return rows


def _scores(moment: Moment) -> float:
    """The root mean square of the scores of the last layer, of which the powers of theory take that they are small."""
    with torch.no_grad(), seen(moment.model) as inputs:
        moment.model(moment.sample[0])
        return float(scores(attentions(moment.model)[-1], inputs[-1]).square().mean().sqrt())


def spread(norms: Mapping[str, float], blocks: Sequence[str]) -> float:
    """The largest of these blocks is so many times the smallest."""
    values = [norms[block] for block in blocks]
    return max(values) / min(values)
