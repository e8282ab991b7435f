"""Powers of the input's size σ in the blocks of attention alone, with softmax and without, by depth.

Theory, at small σ, in the last layer of depth D, with targets that do not shrink; A are the weights of attention.

- Softmax, sigmoid: A does not vanish with the scores, so every layer gives back the size σ: ∂F/∂W_V ~ σ. A query moves
  A by σ²: ∂F/∂W_Q ~ σ³. H_o goes as σ⁶ for Q and K, as σ⁴ for one of them with V, as σ² for V.
- Identity, ReLU: A itself goes as σ², and ∂F/∂W as σ³ whichever W: one power, 6, for all blocks of H_o. Without
  residuals each layer cubes, F ~ σ^(3^D), and H_o goes as σ^(2·3^D), which is Σ_XX to the power 3^D.
- H_f is ∂ℓ/∂F · ∂²F. For two different weights it goes as σ³, or σ^(3^D). For V with V it is zero: F is linear in W_V.
  For Q with Q and K with K it is what A″ brings: zero for identity and ReLU, σ⁵ from a third moment for softmax, σ⁷ for
  the sigmoid, whose second derivative vanishes with the scores.
- Softmax does not feel what all keys have in common. Where each row is an average of all tokens, those of the last
  layer differ by δ ~ σ^(3^(D−1)) only: ∂F/∂W_Q ~ σδ², and H_o goes as σ²δ⁴ for Q and K, H_f as σ²δ³. The averages of
  causal rows differ, and so do tokens with residuals: there δ ~ σ at any depth.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from evolute.calculus.closed_form import closed_form
from evolute.engine.objective import Objective
from evolute.engine.operators import FunctionalHessian, GaussNewton
from evolute.linop.convert import to_dense
from evolute.studies.blocks import CLOSED, exact_norms, layers, pair
from evolute.studies.study import Cell, Row
from evolute.zoo import AttentionOnly

KINDS = ("softmax", "linear", "sigmoid", "relu")
LETTERS = ("Q", "K", "V")
FLAT = ("softmax", "sigmoid")  # A has a value where the scores vanish
ZERO = 1e-12  # of the largest block of H_f: rounding


def measure(cell: Cell) -> list[Row]:
    """‖block‖_F of H_o and H_f in the last layer, exact, for each σ."""
    told = {name: cell[name] for name in ("part", "kind", "wiring", "depth", "seed")}
    return [
        {**told, "sigma": sigma, "of": part, "block": block, "norm": norm}
        for sigma in cell["sigmas"]
        for (block, part), norm in last_layer(cell, sigma).items()
    ]


def last_layer(cell: Cell, sigma: float) -> dict[tuple[str, str], float]:
    """(block, part) → norm; in closed form where the last layer is the only one."""
    model = _model(cell)
    x, y = (_normal(cell, more) for more in (0, 1))
    if cell["depth"] == 1:
        found = exact_norms(closed_form(model.layers[0], sigma * x, y), {name: CLOSED[name] for name in LETTERS})
        norms = {key: norm.value for key, norm in found.items() if key[1] != "H"}
    else:
        norms = _dense_norms(Objective(model, [(sigma * x, y)], nn.MSELoss()), layers(model)[-1])
    rounding = ZERO * max(norm for (_, part), norm in norms.items() if part == "H_f")
    return {key: 0.0 if key[1] == "H_f" and norm <= rounding else norm for key, norm in norms.items()}


def _model(cell: Cell) -> AttentionOnly:
    options: dict[str, Any] = {
        "attention": cell["kind"],
        "residual": cell["wiring"] == "residual",
        "causal": cell["wiring"] != "bidirectional",
    }
    return AttentionOnly(cell["width"], 1, cell["depth"], seed=cell["seed"], **options).double()


def _normal(cell: Cell, more: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * cell["seed"] + more)
    return torch.randn(cell["sequences"], cell["length"], cell["width"], generator=generator, dtype=torch.float64)


def _dense_norms(objective: Objective, letters: dict[str, str]) -> dict[tuple[str, str], float]:
    """From the dense matrices of a layer."""
    out = dict[tuple[str, str], float]()
    names = [letters[letter] for letter in LETTERS]
    for part, op in (("H_o", GaussNewton(objective)), ("H_f", FunctionalHessian(objective))):
        matrix = to_dense(op.restrict(names))
        size = len(matrix) // len(LETTERS)
        blocks = matrix.view(len(LETTERS), size, len(LETTERS), size)
        for (i, a), (j, b) in combinations_with_replacement(enumerate(LETTERS), 2):
            out[pair(a, b), part] = float(blocks[i, :, j].norm())
    return out


# ---- theory


def theory(kind: str, wiring: str, depth: int, block: str, part: str) -> float | None:
    """The power of σ, as the text above derives it; None where the block is zero.

    >>> [theory("softmax", "residual", 3, block, "H_o") for block in ("Q", "Q,V", "V")]
    [6.0, 4.0, 2.0]
    >>> [theory("linear", "plain", depth, "V", "H_o") for depth in (1, 2, 3)]
    [6.0, 18.0, 54.0]
    """
    slopes, mixed = _slopes(kind, wiring, depth)
    first, last = block.split(",")[0], block.split(",")[-1]
    if part == "H_o":
        return slopes[first] + slopes[last]
    if first != last:
        return mixed
    bend = {"softmax": 2.0 + 3 * _spread(kind, wiring, depth), "sigmoid": 7.0}
    return None if first == "V" else bend.get(kind)


def _spread(kind: str, wiring: str, depth: int) -> int:
    """Tokens of the last layer differ by σ to this power."""
    return 3 ** (depth - 1) if kind == "softmax" and wiring == "bidirectional" else 1


def _slopes(kind: str, wiring: str, depth: int) -> tuple[dict[str, float], float]:
    """The powers of ∂F/∂W in the last layer, and of ∂²F in two different weights."""
    if kind in FLAT:
        turned = 1.0 + 2 * _spread(kind, wiring, depth)
        return {"Q": turned, "K": turned, "V": 1.0}, turned
    degree = 3.0 if wiring == "residual" else 3.0**depth
    return dict.fromkeys(LETTERS, degree), degree
