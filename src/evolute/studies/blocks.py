"""The blocks of a layer by letters, and the norms ‖H_ab‖_F, ‖H_o,ab‖_F, ‖H_f,ab‖_F of pairs of them.

Q, K, V, O are the weights of attention, W1, Wg, W2 those of the feed-forward (up, gate, down), N1, N2 the norms; of a
multilayer perceptron every layer has the one letter W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn

from evolute.calculus.closed_form import ClosedForm
from evolute.engine.groups import groups
from evolute.errors import StudyError
from evolute.linop.operator import LinearOperator

PARTS = ("H", "H_o", "H_f")
LETTERS = {
    "attn.q": "Q",
    "attn.k": "K",
    "attn.v": "V",
    "attn.o": "O",
    "mlp.up": "W1",
    "mlp.gate": "Wg",
    "mlp.down": "W2",
    "norm1": "N1",
    "norm2": "N2",
}
CLOSED = {"Q": "q", "K": "k", "V": "v", "O": "o", "W1": "w1", "Wg": "gate", "W2": "w2"}  # their names in a closed form


@dataclass(frozen=True)
class Norm:
    """‖block‖_F and its standard error: 0 if it is exact, infinite if it comes from a single sample."""

    value: float
    error: float


Norms = dict[tuple[str, str], Norm]  # (block, part), such as ("Q,K", "H_o")


def layers(model: nn.Module) -> list[dict[str, str]]:
    """For each layer, letter → name of the group, in the order of the model.

    >>> from evolute.zoo import GPT, MLP
    >>> layers(GPT(12, 17, 8, norm="none", layers=2, seed=0))[1]["W1"]
    'layers.1.mlp.up'
    >>> layers(MLP([4, 8, 2], seed=0))
    [{'W': 'layers.0'}, {'W': 'layers.1'}]
    """
    found = dict[int, dict[str, str]]()
    for name in groups(model):
        _, number, role = (*name.split(".", 2), "", "")[:3]
        letter = LETTERS.get(role) if role else "W"
        if name.startswith("layers.") and number.isdigit() and letter:
            found.setdefault(int(number), {})[letter] = name
    if not found:
        raise StudyError(f"expected a model of the zoo with layers; {type(model).__name__} has none that are known.")
    return [found[number] for number in sorted(found)]


def pair(a: str, b: str) -> str:
    """The name of a block.

    >>> pair("Q", "Q"), pair("Q", "K")
    ('Q', 'Q,K')
    """
    return a if a == b else f"{a},{b}"


def probed_norms(
    outer: LinearOperator, functional: LinearOperator, letters: Mapping[str, str], probes: int, seed: int
) -> Norms:
    """‖H_ab‖²_F = E ‖H_ab v‖², for normal vectors v on one group at a time; both triangles are used.

    `outer` and `functional` are H_o and H_f, of which H is the sum; letters are names of their groups.
    """
    generator = torch.Generator().manual_seed(seed)
    names = list(letters.values())
    samples = dict[tuple[str, str, str], Tensor]()
    for letter, group in letters.items():
        columns = outer.block(names, group), functional.block(names, group)
        V = torch.randn(columns[0].shape[1], probes, generator=generator, dtype=torch.float64).to(outer.dtype)
        H_o, H_f = (column @ V for column in columns)
        for part, product in zip(PARTS, (H_o + H_f, H_o, H_f), strict=True):
            pieces = product.split([outer.space.resolve(name).size for name in names])
            samples |= {(part, other, letter): p.square().sum(0) for other, p in zip(letters, pieces, strict=True)}
    return {
        (pair(a, b), part): _norm(samples[part, a, b], samples[part, b, a])
        for a, b in combinations_with_replacement(letters, 2)
        for part in PARTS
    }


def _norm(one: Tensor, other: Tensor) -> Norm:
    """√mean of the samples of a block and of its transpose."""
    all_ = one if one is other else torch.cat([one, other])
    mean, n = float(all_.mean()), len(all_)
    value = math.sqrt(mean)
    error = math.inf if n < 2 else float(all_.std()) / math.sqrt(n) / (2 * value) if value else 0.0
    return Norm(value, error)


def exact_norms(H: ClosedForm, letters: Mapping[str, str]) -> Norms:
    """From the Kronecker terms of a closed form, without an error; letters → names of its groups."""
    tables = {
        part: op.norms("fro", list(letters.values()))
        for part, op in (("H", H), ("H_o", H.outer), ("H_f", H.functional))
    }
    return {
        (pair(a, b), part): Norm(tables[part][letters[a], letters[b]], 0.0)
        for a, b in combinations_with_replacement(letters, 2)
        for part in PARTS
    }
