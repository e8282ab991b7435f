"""Scaled dot-product attention that can be differentiated twice and more, exactly, in every mode of PyTorch.

    P = softmax(s q kᵀ + M),  out = P v

PyTorch's fused attention has one derivative, in reverse mode. Here the first derivative has a derivative of its own, and one product with
the symmetric second derivative serves forward and reverse mode alike. It goes by tiles of scores: memory does not grow with the square of
the length. Third derivatives are left to autodiff, over all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from evolute.engine import attention_ops, attention_plain
from evolute.engine.attention_call import four_axes
from evolute.engine.attention_scores import Rule, Slot, working_dtype

score_budget: ContextVar[int] = ContextVar("score_budget", default=64 << 20)
"""Bytes of scores (batch × heads × queries × keys) up to which an attention keeps P and dS between products at one point."""

assert attention_ops  # importing it makes the operators
_ops = torch.ops.evolute


@contextmanager
def scores_within(size: int) -> Generator[None]:
    """Attention called inside keeps its scores between products if they take at most this many bytes; with 0, never."""
    token = score_budget.set(size)
    try:
        yield
    finally:
        score_budget.reset(token)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(s q kᵀ + M) v; the arguments mean what they mean for F.scaled_dot_product_attention without dropout.

    >>> q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    >>> torch.allclose(attention(q, k, v), torch.softmax(q @ k.mT / 8**0.5, -1) @ v)
    True
    """
    call = four_axes(q, k, v, mask, scale, enable_gqa)
    scores = call.q.shape[:-1].numel() * call.k.shape[-2]
    if not scores:  # nothing to attend to, or no one who does
        return (torch.matmul(q, k.mT) @ v).reshape(call.result)
    size = scores * working_dtype(call.q.dtype).itemsize
    rule = Rule(is_causal, call.scale, size <= score_budget.get())
    out, _ = Attention.apply(call.q, call.k, call.v, call.mask, rule)
    return out.reshape(call.result)


class Attention(Function):
    """out = attention(q, k, v, mask), and the logsumexp of each row of scores where a fused kernel made it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Slot, rule: Rule) -> tuple[Tensor, Tensor]:
        return _ops.attention(q, k, v, mask, rule.causal, rule.scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.rule = inputs
        ctx.P = None
        ctx.mark_non_differentiable(output[1])
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, u: Slot, _: Slot) -> tuple[Slot, ...]:
        if u is None:
            return (None,) * 5
        keep, wanted = ctx.rule.keep and torch.is_grad_enabled(), _letters("qkvm", ctx.needs_input_grad)
        *parts, P, _ = AttentionBackward.apply(u, *ctx.saved_tensors, ctx.P, ctx.rule, keep, wanted)
        if keep and not torch._C._are_functorch_transforms_active():
            ctx.P = P  # for the products: each of them visits this node again
        return *_only(wanted, "qkvm", parts), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Slot) -> tuple[Tensor, None]:
        """U v + P c, the part of the second derivative along u."""
        q, k, v, mask, _, _ = ctx.saved_tensors
        parts = SecondOrder.apply(*tangents[:4], q, k, v, mask, None, None, None, ctx.rule, "u")
        return parts[4], None


class AttentionBackward(Function):
    """gq, gk, gv, gm of <u, attention(q, k, v, mask)>; and P and dS, if they are to be kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        u: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Slot,
        out: Tensor,
        lse: Tensor,
        P: Slot,
        rule: Rule,
        keep: bool,
        wanted: str,
    ) -> tuple[Tensor, ...]:
        given, how = (q, k, v, mask), (rule.causal, rule.scale)
        if not keep:
            return *_ops.attention_backward(u, *given, out, lse, P, None, *how, wanted), u.new_empty(0), u.new_empty(0)
        P, dS = _ops.attention_keep(u, *given, *how)
        return *_ops.attention_backward(u, *given, out, lse, P, dS, *how, wanted), P, dS

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, P, ctx.rule, keep, ctx.wanted = inputs
        ctx.mark_non_differentiable(*output[4:])
        _save(ctx, *tensors, *(output[4:] if keep else (P, None)))

    @staticmethod
    def backward(ctx: Any, *vectors: Slot) -> tuple[Slot, ...]:
        u, q, k, v, mask, _, _, P, dS = ctx.saved_tensors
        wanted = _letters("uqkvm", ctx.needs_input_grad)
        if not wanted or all(each is None for each in vectors[:4]):
            return (None,) * 11
        parts = SecondOrder.apply(*vectors[:4], q, k, v, mask, u, P, dS, ctx.rule, wanted)
        return *_only(wanted, "uqkvm", (parts[4], *parts[:4])), *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, du: Slot, *tangents: Slot) -> tuple[Slot, ...]:
        """The second derivative along (q, k, v, mask), and the first, being linear in u, at the tangent of u."""
        u, q, k, v, mask, out, lse, P, dS = ctx.saved_tensors
        parts: list[Slot] = [None] * 4
        if any(each is not None for each in tangents[:4]):
            parts = list(SecondOrder.apply(*tangents[:4], q, k, v, mask, u, P, dS, ctx.rule, ctx.wanted)[:4])
        if du is not None:
            given = (du, q, k, v, mask, out, lse, P, ctx.rule, False, ctx.wanted)
            parts = [y if x is None else x + y for x, y in zip(parts, AttentionBackward.apply(*given), strict=False)]
        return *parts, None, None


class SecondOrder(Function):
    """The Hessian of <u, attention(q, k, v, mask)> times (a, b, c, m, 0): its parts along q, k, v, mask, u that are wanted."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *tensors, rule, wanted = args
        return _ops.attention_second_order(*tensors, rule.causal, rule.scale, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, _, ctx.rule, ctx.wanted = inputs
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Slot) -> tuple[Slot, ...]:
        tensors, plain = _plainly(ctx)
        parts, pull = torch.func.vjp(plain, *tensors.values())
        pulled = pull(tuple(torch.zeros_like(part) if x is None else x for x, part in zip(upstream, parts, strict=True)))
        grads = dict(zip(tensors, pulled, strict=True))
        return tuple(grads.get(i) for i in range(13))

    @staticmethod
    def jvp(ctx: Any, *tangents: Slot) -> tuple[Tensor, ...]:
        tensors, plain = _plainly(ctx)
        steps = (torch.zeros_like(x) if tangents[i] is None else tangents[i] for i, x in tensors.items())
        return torch.func.jvp(plain, tuple(tensors.values()), tuple(steps))[1]


def _plainly(ctx: Any) -> tuple[dict[int, Tensor], Callable[..., tuple[Tensor, ...]]]:
    """The tensors of a second-order product by the places of its arguments, and the product in plain operations on them."""
    saved: list[Any] = list(ctx.saved_tensors)
    tensors = {i: each for i, each in enumerate(saved[:9]) if each is not None and each.is_floating_point()}

    def plain(*values: Tensor) -> tuple[Tensor, ...]:
        given = saved[:9]
        for i, value in zip(tensors, values, strict=True):
            given[i] = value
        parts = attention_plain.second_order(tuple(given[:4]), *given[4:], ctx.rule)  # pyright: ignore[reportArgumentType]
        unwanted = (torch.zeros_like(each) for each in saved[9:])
        return tuple(
            zero if part is None or letter not in ctx.wanted else part
            for letter, part, zero in zip("qkvmu", parts, unwanted, strict=True)
        )

    return tensors, plain


def _save(ctx: Any, *tensors: Slot) -> None:
    """For both modes; a cotangent or tangent that is not there stays None."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _letters(letters: str, needed: Sequence[bool]) -> str:
    return "".join(letter for letter, need in zip(letters, needed, strict=False) if need)


def _only(wanted: str, letters: str, parts: Sequence[Slot]) -> tuple[Slot, ...]:
    return tuple(part if letter in wanted else None for letter, part in zip(letters, parts, strict=True))
