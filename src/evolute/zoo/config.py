"""What a Transformer block is made of, as one frozen value that is checked when it is made."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from evolute.errors import ModelError

Norm = Literal["pre", "post", "none"]
NormKind = Literal["layer", "rms"]
AttentionKind = Literal["softmax", "linear", "sigmoid", "relu"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class BlockConfig:
    """The options of a block; `hidden` is 4·width unless given, `sink` is added to every score of the first token.

    `mlp=False` leaves the feed-forward sublayer out, `output=False` the product W_O after the heads, `residual=False`
    both additions. `bias` is that of the linear maps; a LayerNorm always has its own.

    >>> BlockConfig(width=8, heads=2)
    BlockConfig(width=8, heads=2, hidden=32, norm='post', norm_kind='layer', eps=1e-05, attention='softmax', ...)
    >>> BlockConfig(width=8, norm="before")
    Traceback (most recent call last):
    evolute.errors.ModelError: norm must be 'pre', 'post' or 'none', got 'before'.
    """

    width: int
    heads: int = 1
    hidden: int | None = None
    norm: Norm = "post"
    norm_kind: NormKind = "layer"
    eps: float = 1e-5
    attention: AttentionKind = "softmax"
    activation: Activation = "relu"
    gated: bool = False
    mlp: bool = True
    output: bool = True
    residual: bool = True
    bias: bool = False
    causal: bool = False
    sink: float = 0.0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(BlockConfig).items():
            check_choice(name, getattr(self, name), get_args(hint))
        for name in ("width", "heads", "hidden"):
            check_count(name, getattr(self, name), default=name == "hidden")
        if self.width % self.heads:
            raise ModelError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads.")
        if self.hidden is None:
            object.__setattr__(self, "hidden", 4 * self.width)

    @property
    def head_width(self) -> int:
        """Features per head, d_K = d_V = width / heads."""
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """`hidden`, which is a number once the config is made."""
        return self.hidden or 4 * self.width


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """One of a few words, or a sentence that lists them."""
    words = [each for each in allowed if isinstance(each, str)]
    if words and value not in words:
        listed = ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
        raise ModelError(f"{name} must be {listed}, got {value!r}.")


def check_count(name: str, value: object, *, default: bool = False) -> None:
    """A positive whole number; None too where that stands for the default."""
    if default and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} must be a positive whole number, got {value!r}.")


class BlockOptions(TypedDict, total=False):
    """Everything of a BlockConfig but width and heads, for models that make their own."""

    hidden: int | None
    norm: Norm
    norm_kind: NormKind
    eps: float
    attention: AttentionKind
    activation: Activation
    gated: bool
    mlp: bool
    output: bool
    residual: bool
    bias: bool
    causal: bool
    sink: float


def block_config(width: int, heads: int, defaults: BlockOptions, options: BlockOptions) -> BlockConfig:
    """A config from a model's own defaults and what its caller asked for.

    >>> block_config(8, 2, {"norm": "pre"}, {"bias": True}).norm
    'pre'
    >>> block_config(8, 2, {}, {"atention": "linear"})
    Traceback (most recent call last):
    evolute.errors.ModelError: no option 'atention': did you mean 'attention'? ...
    """
    known = BlockOptions.__annotations__
    for name in options:
        if name not in known:
            near = "".join(f" did you mean {each!r}?" for each in difflib.get_close_matches(name, known, 1))
            raise ModelError(f"no option {name!r}:{near} A block takes {', '.join(known)}.")
    merged: dict[str, Any] = {**defaults, **options}
    return BlockConfig(width, heads, **merged)
