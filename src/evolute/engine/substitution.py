"""For the time of a computation: attention and LayerNorm that differentiate twice, compiled code run as written.

Two ways in, since either alone misses cases: a function mode sees calls from anywhere in the user's code, and a
module attribute is what PyTorch's own composites (multi_head_attention_forward) look up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

from evolute.engine import attention as _attention
from evolute.engine import layer_norm as _layer_norm
from evolute.errors import ModelError

_here = threading.local()
_lock = threading.Lock()
_users = 0
_SDPA: Callable[..., Tensor] = F.scaled_dot_product_attention


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0:  # a fixed mask was asked for: PyTorch's own composite draws it, and differentiates twice
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _attention.attention(
        query, key, value, mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _patched_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in for F.scaled_dot_product_attention; other threads get the original."""
    return (_attend if getattr(_here, "depth", 0) else _SDPA)(*args, **kwargs)


def _norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if not _layer_norm.supported(input, normalized_shape, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    return _layer_norm.layer_norm(input, weight, bias, eps)


def _no_flex() -> ModelError:
    return ModelError(
        "the model calls flex_attention, which PyTorch cannot differentiate twice; expected scaled dot-product "
        "attention. Load or build it with F.scaled_dot_product_attention (Hugging Face: attn_implementation='sdpa')."
    )


_REPLACED: dict[Any, Callable[..., Any]] = {_SDPA: _attend, F.layer_norm: _norm}


class _Substitute(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and "flex_attention" in func.name():
            raise _no_flex()
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def twice_differentiable() -> Generator[None]:
    """Inside, models differentiate twice whatever attention they use; outside, nothing has changed."""
    with _flex_refused(), _patched(), _as_written(), _Substitute():
        yield


@contextmanager
def _flex_refused() -> Generator[None]:
    """On a CPU it refuses by itself, before any mode sees it, and without a word on what to do."""
    try:
        yield
    except NotImplementedError as error:
        if "FlexAttention" in str(error):
            raise _no_flex() from error
        raise


def _as_written() -> AbstractContextManager[Any]:
    """Compiled modules run their Python source: what Dynamo compiles cannot be differentiated twice."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _patched() -> Generator[None]:
    global _users
    with _lock:
        _users += 1
        F.scaled_dot_product_attention = _patched_sdpa
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            _users -= 1
            if _users == 0:
                F.scaled_dot_product_attention = _SDPA
