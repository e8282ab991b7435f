"""Theorems 1 and 6: no norm by automatic differentiation is above its bound."""

from collections.abc import Callable

import torch
from torch import Tensor

from evolute.calculus.published import block, bounds, counterexamples
from evolute.calculus.published.algebra import norm
from evolute.calculus.published.attention import SelfAttention
from evolute.calculus.published.block import Block
from evolute.verify import attention, oracle
from evolute.verify import block as of_block
from evolute.verify.statement import Sampler, Statement, excess, first_line, register

ROUNDING = 1e-10


def sample(draw: Sampler) -> SelfAttention:
    """As for the theorems, with tokens and weights of any size: from linear attention to one-hot."""
    a = attention.sample(draw)
    x, w = draw.choice(0.1, 1.0, 10.0), draw.choice(0.1, 1.0, 10.0)
    return SelfAttention(x * a.X, w * a.W_Q, w * a.W_K, w * a.W_V, draw.choice(0.0, 1.0, 100.0) * a.Y)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _norm(truth: Callable[[SelfAttention, str, str], Tensor], pair: str) -> Callable[[SelfAttention], Tensor]:
    return lambda a: _number(norm(truth(a, *pair)))


def _whole(a: SelfAttention) -> Tensor:
    return _number(norm(oracle.hessian(attention.loss(a), attention.weights(a))))


def _of(bound: Callable[[SelfAttention], float]) -> Callable[[SelfAttention], Tensor]:
    return lambda a: _number(bound(a))


def _bound(
    name: str, bound: Callable[[SelfAttention], float], truth: Callable[[SelfAttention], Tensor], says: str = ""
) -> Statement[SelfAttention]:
    return Statement(f"Theorem 1 · {name}", says or first_line(bound), sample, _of(bound), truth, excess, ROUNDING)


def _erratum(
    name: str,
    says: str,
    example: Callable[[], SelfAttention],
    bound: Callable[[SelfAttention], float],
    truth: Callable[[SelfAttention], Tensor],
) -> Statement[SelfAttention]:
    title = f"Theorem 1 · {name}, as printed"
    return Statement(title, says, lambda _: example(), _of(bound), truth, excess, ROUNDING, erratum=True)


def _corrected(a: SelfAttention) -> Tensor:
    return bounds.block_bounds(a, bounds.CORRECTED_OUTER)


def _block_loss(b: Block) -> Tensor:
    Z = of_block.forward(b)

    def loss(*w: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(Z(*w), b.attention.Y)

    return _number(norm(oracle.hessian(loss, of_block.weights(b))))


def _block_statement(name: str, says: str, closed: Callable[[Block], float]) -> Statement[Block]:
    return Statement(name, says, of_block.sample, lambda b: _number(closed(b)), _block_loss, excess, ROUNDING)


def _seconds(b: Block) -> Tensor:
    """‖∂²Z/∂w_i∂w_j‖ for the pairs (V,V), (Q,W1) and (W1,W2), one of each kind."""
    Z, w = of_block.forward(b), of_block.weights(b)
    places = [(block.GROUPS.index(i), block.GROUPS.index(j)) for i, j in _KINDS]
    return torch.stack([_number(norm(oracle.second(Z, w, i, j))) for i, j in places])


_KINDS = ("VV", "Q1", "12")
_vv, _vq = _norm(attention.outer, "VV"), _norm(attention.outer, "VQ")

register(
    _bound("‖H_o(V,V)‖", bounds.outer_vv_corrected, _vv, "≤ 2‖A‖²‖X‖²/(L d_V)"),
    _bound("‖H_o(Q,Q)‖", bounds.outer_qq, _norm(attention.outer, "QQ"), "≤ 2‖W‖⁴‖X‖⁶/(L d_V d_K)"),
    _bound("‖H_o(V,Q)‖", bounds.outer_vq_corrected, _vq, "≤ ‖A‖‖X‖⁴‖W‖²/(L d_V √d_K)"),
    _bound("‖H_o(Q,K)‖", bounds.outer_qq, _norm(attention.outer, "QK"), "≤ 2‖W‖⁴‖X‖⁶/(L d_V d_K)"),
    _bound("‖H_f(Q,Q)‖", bounds.functional_qq, _norm(attention.functional, "QQ"), "≤ 2R‖W‖³‖X‖⁵/(L d_V d_K)"),
    _bound("‖H_f(V,Q)‖", bounds.functional_vq, _norm(attention.functional, "VQ"), "≤ 2RS‖X‖³‖W‖/(L d_V √d_K)"),
    _bound("‖H_f(Q,K)‖", bounds.functional_qk, _norm(attention.functional, "QK"), "≤ the sum of both kinds"),
    _bound("‖Z1‖", bounds.first_moment, lambda a: _number(norm(a.Z1)), "≤ ‖X‖³"),
    _bound("‖H‖", lambda a: bounds.whole_by_count(_corrected(a)), _whole, "≤ 3 max of the block bounds"),
    _bound("‖H‖, tighter", lambda a: bounds.whole(_corrected(a)), _whole, "≤ ‖[b_ij]‖, the matrix of block bounds"),
    Statement(
        "Theorem 6 · ‖∂²Z‖",
        "≤ ‖ξ‖/σ + (2 + √(d−1))/√d · ‖B_i‖‖B_j‖/σ²",
        of_block.sample,
        lambda b: torch.stack([_number(bounds.block_second(b, i, j)) for i, j in _KINDS]),
        _seconds,
        excess,
        ROUNDING,
    ),
    _block_statement(
        "Theorem 6 · ‖H‖", "≤ 5 max of the block bounds", lambda b: bounds.whole_by_count(bounds.block_loss_bounds(b))
    ),
    _block_statement(
        "Theorem 6 · ‖H‖, tighter",
        "≤ ‖[b_ij]‖, the matrix of bounds",
        lambda b: bounds.whole(bounds.block_loss_bounds(b)),
    ),
    _erratum("‖H_o(V,V)‖", "≤ 2‖X‖²/(L d_V)", counterexamples.one_token_that_all_look_at, bounds.outer_vv, _vv),
    _erratum(
        "‖H_o(V,Q)‖",
        "≤ 2‖X‖⁴‖W‖²/(L d_V √d_K)",
        counterexamples.ten_tokens_that_look_at_two,
        bounds.outer_vq,
        _vq,
    ),
    _erratum(
        "‖H_o(V,V)‖_F",
        "≤ 2‖X‖²_F/(L d_V), every norm a Frobenius norm",
        counterexamples.one_token,
        bounds.outer_vv_frobenius,
        lambda a: attention.outer(a, "V", "V").norm(),
    ),
    _erratum(
        "‖H‖",
        "≤ the maximum of the block bounds",
        counterexamples.orthogonal_tokens,
        lambda a: bounds.whole_by_maximum(_corrected(a)),
        _whole,
    ),
)
