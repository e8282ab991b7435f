"""What runs between the blocks of a model, as leaves that a loss can be differentiated by: x_l + δ_l at δ_l = 0."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from evolute.errors import ModelError

NORM = re.compile(r"(Layer|RMS)_?Norm")


@dataclass(eq=False)
class Taps:
    """Of one forward pass: δ_l and the residual stream x_l after each block, and rows of what its norms were given.

    `share` is cos² of the angle between what goes into a block and what comes out, `variances` 1/σ²: means over rows.
    """

    deltas: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    streams: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    shares: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    variances: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def block(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """The output with δ added to its residual stream."""
        stream, rebuilt = _stream(name, output)
        if name in self.deltas:
            raise ModelError(
                f"'{name}' runs more than once in one pass: its activations are not one place. Name other blocks."
            )
        delta = torch.zeros_like(stream).requires_grad_()
        self.deltas[name], self.streams[name] = delta, stream.detach()
        before = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        self.shares[name] = _share(before, stream)
        return rebuilt(stream + delta)

    def norm(self, name: str, module: nn.Module, x: Tensor) -> None:
        """1/σ² of each row."""
        rms = "RMS" in type(module).__name__
        axes = tuple(range(-len(getattr(module, "normalized_shape", (0,))), 0))
        c = x.detach() if rms else x.detach() - x.detach().mean(axes, keepdim=True)
        eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None) or 0.0
        self.variances[name] = 1 / (c.square().mean(axes) + eps)


@contextmanager
def tapped(blocks: Mapping[str, nn.Module], taps: Taps) -> Generator[None]:
    """While the model runs inside, once."""
    hooks: list[Any] = []
    try:
        for name, module in blocks.items():
            hooks.append(module.register_forward_hook(_on_block(taps, name), with_kwargs=True))
            for below, each in cast("Any", module.named_modules(prefix=name)):
                if NORM.search(type(each).__name__) and isinstance(getattr(each, "weight", None), Tensor | None):
                    hooks.append(each.register_forward_pre_hook(_on_norm(taps, below)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on_block(taps: Taps, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return taps.block(name, args, kwargs, output)

    return hook


def _on_norm(taps: Taps, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            taps.norm(name, module, args[0])

    return hook


def _stream(name: str, output: Any) -> tuple[Tensor, Any]:
    """The tensor that a block hands on, the first of several, and how its output is made of another one."""
    if isinstance(output, Tensor):
        return output, lambda stream: stream
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        rest = cast("tuple[Any, ...]", output)[1:]
        return output[0], lambda stream: type(output)((stream, *rest))
    raise ModelError(
        f"'{name}' gives a {type(output).__name__}; expected a tensor, or a tuple that begins with one. "
        "Name other blocks."
    )


def _share(before: Tensor | None, after: Tensor) -> Tensor:
    """(x_in·x_out)²/(‖x_in‖²‖x_out‖²) of each row; none where the block changes the shape."""
    if before is None or before.shape != after.shape:
        return after.new_zeros(0)
    x, y = before.detach(), after.detach()
    return (x * y).sum(-1).square() / (x.square().sum(-1) * y.square().sum(-1)).clamp_min(
        1e-300 if x.dtype == torch.float64 else 1e-30
    )
