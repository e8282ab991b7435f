"""The exponents of theory: how the norm of a block grows with the size σ of the input.

Every derivative brings powers of what it multiplies. In softmax attention at small scores, ∂Z/∂W_Q and ∂Z/∂W_K go as
σ³ (a token, and the second moment of all), ∂Z/∂W_V and ∂Z/∂W_O as σ. H_o is a product of two of them, in every layer,
since the layers above are linear in the limit; H_f has the second derivatives of Z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

FIRST = {"Q": 3.0, "K": 3.0, "V": 1.0, "O": 1.0}  # exponents of ∂Z at small σ
SECOND = {"Q": 5.0, "K": 5.0, "Q,K": 3.0, "Q,V": 3.0, "Q,O": 3.0, "K,V": 3.0, "K,O": 3.0, "V,O": 1.0}  # of ∂²Z
FELT_ABOVE = 3.0  # ∂²Z by V or O twice: linear in its own layer, bent by the attention above, σ (∂Z)²

Rates = Mapping[str, float]  # part → exponent, where theory has one and the block is not zero
Where = tuple[int, bool, str, str]  # depth, whether it is the last layer, block, range


def theory(model: str, depth: int, layer: int, block: str, part: str, range_: str) -> float | None:
    """The exponent of σ; None where theory has none, or the block is zero.

    >>> [theory("softmax", 1, 0, "Q,V", part, "small") for part in ("H_o", "H_f", "H")]
    [4.0, 3.0, 3.0]
    >>> theory("linear", 3, 0, "Q", "H_o", "large"), theory("mlp", 5, 2, "W", "H", "mid")
    (54.0, 2.0)
    """
    return MODELS[model]((depth, layer == depth - 1, block, range_)).get(part)


def ends(block: str) -> tuple[str, str]:
    """Rows and columns of a block.

    >>> ends("Q"), ends("Q,K")
    (('Q', 'Q'), ('Q', 'K'))
    """
    a, _, b = block.partition(",")
    return a, b or a


def at_small(outer: float, functional: float | None) -> Rates:
    """H goes with the smaller exponent, in the limit; a block of H_f that is zero leaves it to H_o."""
    if functional is None:
        return {"H": outer, "H_o": outer}
    return {"H": min(outer, functional), "H_o": outer, "H_f": functional}


def _softmax(where: Where) -> Rates:
    """Residual attention, ReLU, no norm: a theory of small scores and small logits alone."""
    _, last, block, range_ = where
    a, b = ends(block)
    return at_small(FIRST[a] + FIRST[b], SECOND.get(block, None if last else FELT_ABOVE)) if range_ == "small" else {}


def _pre_norm(where: Where) -> Rates:
    """Small σ is forgotten. At large σ the last norm divides by σ what a layer adds, and bends it by 1/σ²."""
    *_, block, range_ = where
    bends = -2.0 if block in ("V", "O") else -1.0  # whether the layer itself has a second derivative
    return {"small": at_small(0.0, 0.0), "mid": {}, "large": {"H": bends, "H_o": -2.0, "H_f": bends}}[range_]


def _linear(where: Where) -> Rates:
    """Z, ∂Z and ∂²Z are of degree 3^D in the input; ∂ℓ/∂Z is that of the targets while Z is small."""
    depth, last, block, range_ = where
    degree = 3.0**depth
    if last and block in ("Q", "K", "V"):  # Z is linear in each of the last weights
        return at_small(2 * degree, None)
    return at_small(2 * degree, degree) if range_ == "small" else {"H_o": 2 * degree}


def _mlp(where: Where) -> Rates:
    """Z is linear in each weight, and of degree 1 in the input."""
    return at_small(2.0, None)


MODELS: Mapping[str, Callable[[Where], Rates]] = {
    "softmax": _softmax,
    "linear": _linear,
    "pre_norm": _pre_norm,
    "mlp": _mlp,
}
