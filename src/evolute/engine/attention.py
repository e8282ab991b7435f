"""Scaled dot-product attention that can be differentiated twice and more, exactly, in every mode of PyTorch.

    P = softmax(s q kᵀ + M),  out = P v

PyTorch's fused attention has one derivative, in reverse mode. Here the first derivative has a derivative of its own,
and one product with the symmetric second derivative serves forward and reverse mode alike. It goes by tiles of scores:
memory does not grow with the square of the length. Third derivatives are left to autodiff, over all scores at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from evolute.engine import attention_ops, attention_plain, attention_vmap
from evolute.engine.attention_call import four_axes
from evolute.engine.attention_scores import Rule, Slot, working_dtype

score_budget: ContextVar[int] = ContextVar("score_budget", default=64 << 20)
"""Bytes of scores (batch × heads × queries × keys) up to which an attention keeps P and dS for the products to come.

The two take up to twice that, or as much if the attention is causal. They are made with the graph of a gradient
(create_graph=True) and live as long.
"""

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
        return (call.q.sum() + call.k.sum() + call.v.sum()) * call.q.new_zeros(call.result)
    size = scores * working_dtype(call.q.dtype).itemsize
    rule = Rule(is_causal, call.scale, size <= score_budget.get())
    out, _ = Attention.apply(call.q, call.k, call.v, call.mask, rule)
    return out.reshape(call.result)


class Attention(Function):
    """out = attention(q, k, v, mask), and the logsumexp of each row of scores where a fused kernel made it."""

    vmap = staticmethod(attention_vmap.rule(lambda *args: Attention.apply(*args), "cccm-", "cc"))

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
    def backward(ctx: Any, *grad_outputs: Slot) -> tuple[Slot, ...]:
        u = grad_outputs[0]
        if u is None:
            return (None,) * 5
        keep, wanted = ctx.rule.keep and torch.is_grad_enabled(), _letters("qkvm", ctx.needs_input_grad)
        *parts, P, _ = AttentionBackward.apply(u, *ctx.saved_tensors, ctx.P, ctx.rule, keep, wanted)
        if keep and not torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
            ctx.P = P  # for the products: each of them visits this node again
        return *_only(wanted, "qkvm", parts), None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Slot) -> tuple[Tensor, None]:
        """U v + P c, the part of the second derivative along u."""
        q, k, v, mask, _, _ = ctx.saved_tensors
        parts = SecondOrder.apply(*grad_inputs[:4], q, k, v, mask, None, None, None, ctx.rule, "u")
        return parts[4], None


class AttentionBackward(Function):
    """gq, gk, gv, gm of <u, attention(q, k, v, mask)>, for u or n of them; and P and dS, if they are to be kept."""

    vmap = staticmethod(attention_vmap.rule(lambda *args: AttentionBackward.apply(*args), "vcccmcck-!f", "vvvwkk"))

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
        if keep:
            return _ops.attention_keep(u, q, k, v, mask, rule.causal, rule.scale, wanted)
        parts = _ops.attention_backward(u, q, k, v, mask, out, lse, P, None, rule.causal, rule.scale, wanted)
        return *parts, u.new_empty(0), u.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, P, ctx.rule, keep, ctx.wanted = inputs
        ctx.mark_non_differentiable(*output[4:], *_unwanted(ctx.wanted, "qkvm", output))
        _save(ctx, *tensors, *(output[4:] if keep else (P, None)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Slot) -> tuple[Slot, ...]:
        vectors, wanted = grad_outputs[:4], _letters("uqkvm", ctx.needs_input_grad)
        if not wanted or all(each is None for each in vectors):
            return (None,) * 11
        parts = _bent(ctx, vectors, wanted)
        if ctx.saved_tensors[0].dim() == 5:  # n of u, but one q, k, v, mask
            parts = *(part.sum(0) if part.numel() else part for part in parts[:4]), parts[4]
        return *_only(wanted, "uqkvm", (parts[4], *parts[:4])), *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Slot) -> tuple[Slot, ...]:
        """The second derivative along (q, k, v, mask), and the first, being linear in u, at the tangent of u."""
        u, q, k, v, mask, out, lse, P, _ = ctx.saved_tensors
        du, vectors, parts = grad_inputs[0], grad_inputs[1:5], None
        if any(each is not None for each in vectors):
            if u.dim() == 5:
                vectors = tuple(None if each is None else each.expand(len(u), *each.shape) for each in vectors)
            parts = _bent(ctx, vectors, ctx.wanted)[:4]
        if du is not None:
            more = AttentionBackward.apply(du, q, k, v, mask, out, lse, P, ctx.rule, False, ctx.wanted)[:4]
            parts = more if parts is None else tuple(map(Sum.apply, parts, more))
        return *_only(ctx.wanted, "qkvm", parts or (None,) * 4), None, None


def _bent(ctx: Any, vectors: tuple[Slot, ...], wanted: str) -> tuple[Tensor, ...]:
    """The second-order product where the gradient was taken; with n of u, of as many vectors, each with its own."""
    u, q, k, v, mask, _, _, P, dS = ctx.saved_tensors
    if u.dim() == 4:
        return SecondOrder.apply(*vectors, q, k, v, mask, u, P, dS, ctx.rule, wanted)

    def one(a: Slot, b: Slot, c: Slot, m: Slot, u: Tensor) -> tuple[Tensor, ...]:
        return SecondOrder.apply(a, b, c, m, q, k, v, mask, u, None, None, ctx.rule, wanted)

    in_dims = (*(None if each is None else 0 for each in vectors), 0)
    several: Any = torch.vmap(one, in_dims)
    return several(*vectors, u)


class SecondOrder(Function):
    """The Hessian of <u, attention(q, k, v, mask)> times (a, b, c, m, 0): its wanted parts along q, k, v, mask, u."""

    vmap = staticmethod(attention_vmap.rule(lambda *args: SecondOrder.apply(*args), "vvvwcccmckk-f", "vvvwv"))

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *tensors, rule, wanted = args
        return _ops.attention_second_order(*tensors, rule.causal, rule.scale, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.rule, ctx.wanted = inputs
        ctx.mark_non_differentiable(*_unwanted(ctx.wanted, "qkvmu", output))
        _save(ctx, *tensors[:9])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Slot) -> tuple[Slot, ...]:
        saved = ctx.saved_tensors
        live = _live(saved)
        parts, pull, *_ = torch.func.vjp(_plain(saved, live, ctx.rule, ctx.wanted), *(saved[i] for i in live))
        pulled = pull(tuple(_filled(x, part) for x, part in zip(grad_outputs, parts, strict=True)))
        grads = dict(zip(live, pulled, strict=True))
        return tuple(grads.get(i) for i in range(13))

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Slot) -> tuple[Slot, ...]:
        parts = SecondOrderTangent.apply(*grad_inputs[:9], *ctx.saved_tensors, ctx.rule, ctx.wanted)
        return _only(ctx.wanted, "qkvmu", parts)


class SecondOrderTangent(Function):
    """The derivative of SecondOrder along tangents of its arguments; itself it has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        tangents, saved, (rule, wanted) = args[:9], args[9:18], args[18:]
        live = _live(saved)
        points = tuple(saved[i] for i in live)
        steps = tuple(_filled(tangents[i], saved[i]) for i in live)
        return torch.func.jvp(_plain(saved, live, rule, wanted), points, steps)[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


class Sum(Function):
    """x + y. In a jvp, plain operations would lose the tangents of outer levels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(True)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_outputs[0], grad_outputs[0]

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor) -> Tensor:
        return Sum.apply(*grad_inputs)


def _live(saved: Sequence[Slot]) -> list[int]:
    """The places of the arguments that can have derivatives."""
    return [i for i, each in enumerate(saved) if each is not None and each.is_floating_point()]


def _plain(saved: Sequence[Slot], live: Sequence[int], rule: Rule, wanted: str) -> Callable[..., tuple[Tensor, ...]]:
    """The second-order product in plain operations, as a function of the arguments that are there."""

    def product(*values: Tensor) -> tuple[Tensor, ...]:
        given = list(saved)
        for i, value in zip(live, values, strict=True):
            given[i] = value
        return attention_plain.second_order(tuple(given), rule, wanted)

    many = next(each for each in saved[:3] if each is not None).dim() == 5
    return torch.vmap(product, tuple(0 if i < 4 else None for i in live)) if many else product


def _filled(x: Slot, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


def _save(ctx: Any, *tensors: Slot) -> None:
    """Saves for both modes; a cotangent or tangent that is not there stays None."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _letters(letters: str, needed: Sequence[bool]) -> str:
    return "".join(letter for letter, need in zip(letters, needed, strict=False) if need)


def _unwanted(wanted: str, letters: str, parts: Sequence[Tensor]) -> list[Tensor]:
    return [part for letter, part in zip(letters, parts, strict=False) if letter not in wanted]


def _only(wanted: str, letters: str, parts: Sequence[Slot]) -> tuple[Slot, ...]:
    return tuple(part if letter in wanted else None for letter, part in zip(letters, parts, strict=True))
