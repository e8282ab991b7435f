"""Nothing of the user's is changed: what a computation has to touch is put back, errors and Ctrl-C included."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module, wanted: Iterable[nn.Parameter], *, keep_training: bool) -> Generator[None]:
    """Evaluation mode (unless told to keep it), gradients on for `wanted`; afterwards everything is as it was."""
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_buffers_kept(model))
        stack.enter_context(_hooks_off(model))
        if not keep_training:
            stack.enter_context(_evaluating(model))
        stack.enter_context(_differentiable(model, list(wanted)))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def random_state_kept() -> Generator[None]:
    """Python's, NumPy's and PyTorch's global generators continue afterwards where they were."""
    python, torch_state = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy.random")
    numpy_state = numpy.get_state() if numpy else None
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if on_cuda else []
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.set_state(numpy_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Without the hooks and side effects of model.eval(), which a user may have overridden."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _buffers_kept(model: nn.Module) -> Generator[None]:
    """The same buffers with the same bits: running statistics, counters, caches."""
    modules = list(model.modules())
    held = [(module._buffers, dict(module._buffers)) for module in modules]  # pyright: ignore[reportPrivateUsage]
    copies = [(b, b.clone(), b._version) for _, buffers in held for b in buffers.values() if b is not None]  # pyright: ignore
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy, version in copies:
                if buffer._version != version:  # pyright: ignore[reportPrivateUsage]
                    buffer.copy_(copy)
                    torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))  # pyright: ignore
        for buffers, before in held:
            buffers.clear()
            buffers.update(before)


@contextmanager
def _hooks_off(model: nn.Module) -> Generator[None]:
    """Hooks on parameters (clipping, logging) would change the derivatives, and see gradients not meant for them."""
    held = [(p, p._backward_hooks) for p in model.parameters() if p._backward_hooks]  # pyright: ignore
    try:
        for parameter, _ in held:
            parameter._backward_hooks = None  # pyright: ignore
        yield
    finally:
        for parameter, hooks in held:
            parameter._backward_hooks = hooks  # pyright: ignore


@contextmanager
def _differentiable(model: nn.Module, wanted: list[nn.Parameter]) -> Generator[None]:
    """Exactly the wanted parameters are differentiated: the others cost nothing."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in wanted}
    try:
        for parameter, flag in flags:
            if flag != (id(parameter) in chosen):
                parameter.requires_grad_(not flag)
        yield
    finally:
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
