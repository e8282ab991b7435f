"""The mixer of RWKV: a weighted mean of all past values, whose weights fade at a rate of each feature's own.

    y_t = (Σ_{s<t} e^{k_s − (t−1−s) w} v_s + e^{k_t + b} v_t) / (the same with 1 for v)        w > 0

Numerator and denominator are linear recurrences. Shapes: B samples, L tokens, d features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from evolute.zoo.config import check_count


def fading_mean(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Y of the equation above: k, v (B, L, d), decay w and bonus b (d), token by token.

    Sums are kept as multiples of e^top, top being the largest exponent so far. What they are multiples of changes no
    value, so it is a constant to derivatives of every order.

    >>> k, v = torch.zeros(1, 3, 1), torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1)
    >>> fading_mean(k, v, torch.zeros(1), torch.zeros(1)).flatten()
    tensor([1.0000, 1.5000, 3.0000])
    """
    keys, values = k.unbind(1), v.unbind(1)
    top = keys[0].detach()
    below = (keys[0] - top).exp()
    above, out = below * values[0], [values[0]]
    for key, value in zip(keys[1:], values[1:], strict=True):
        old, new, _ = _weights(top, key + bonus)
        out.append((old * above + new * value) / (old * below + new))
        old, new, top = _weights(top - decay, key)
        above, below = old * above + new * value, old * below + new
    return torch.stack(out, 1)


def _weights(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e^old and e^new as multiples of e^top, and top."""
    top = torch.maximum(old, new).detach()
    return (old - top).exp(), (new - top).exp(), top


class LinearRecurrence(nn.Module):
    """(σ(r) ⊙ y) W_o, with r, k, v linear maps of m ⊙ x_t + (1 − m) ⊙ x_{t−1}, each with a mixture m of its own.

    The time mixing of RWKV's fourth version.

    >>> LinearRecurrence(4)(torch.ones(1, 3, 4)).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        check_count("width", width)
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        place = torch.linspace(0, 1, width)
        self.mixture = nn.Parameter(torch.stack([place**0.5, place, place]))  # of r, k, v
        self.log_decay = nn.Parameter(-5 + 8 * place**0.7)
        self.bonus = nn.Parameter(torch.full((width,), math.log(0.3)))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        r, k, v = (
            tap(before + m * (x - before))
            for tap, m in zip((self.receptance, self.key, self.value), self.mixture, strict=True)
        )
        return self.out(r.sigmoid() * fading_mean(k, v, self.log_decay.exp(), self.bonus))
