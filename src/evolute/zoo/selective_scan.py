"""The mixer of a state-space model: a linear recurrence whose step, input and output the token itself decides.

    h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t u_t B_t        y_t = h_t C_t        A < 0

Shapes: B samples, L tokens, d features, N states per feature. A plain loop over tokens, of elementary functions alone,
so that it can be differentiated as often as one likes; nothing of it is parallel in time.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolute.zoo.config import check_count

STEPS = (1e-3, 1e-1)  # from which to which the first Δ are, as in Mamba


def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y_t = Σ_{s ≤ t} C_t · exp(A Σ_{s < r ≤ t} Δ_r) Δ_s u_s B_s, token by token.

    u, Δ (B, L, d); A (d, N); B, C (B, L, N).

    >>> one = torch.ones(1, 3, 1)
    >>> selective_scan(one, one, -math.log(2) * torch.ones(1, 1), one, one).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    decay = (delta[..., None] * A).exp()  # (B, L, d, N)
    inflow = (delta * u)[..., None] * B[:, :, None]
    h, out = torch.zeros_like(inflow[:, 0]), list[Tensor]()
    for each, new, seen in zip(decay.unbind(1), inflow.unbind(1), C.unbind(1), strict=True):
        h = each * h + new
        out.append((h * seen[:, None]).sum(-1))
    return torch.stack(out, 1)


class SelectiveScan(nn.Module):
    """((scan(u) + D ⊙ u) ⊙ silu(x W_gate)) W_out, with u = silu(x W_in), and Δ = softplus(u W_Δ + b), B, C from u.

    Of Mamba without its short convolution, as wide inside as outside, and with a W_Δ of full rank.

    >>> SelectiveScan(4, states=2)(torch.ones(1, 3, 4)).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        check_count("width", width)
        check_count("states", states)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.step = nn.Linear(width, width)
        self.write = nn.Linear(width, states, bias=False)
        self.read = nn.Linear(width, states, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.log_rate = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))  # of −A
        self.skip = nn.Parameter(torch.ones(width))
        with torch.no_grad():
            first = torch.empty(width).uniform_(*map(math.log, STEPS)).exp()
            self.step.bias.copy_(first.expm1().log())  # softplus⁻¹

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.value(x))
        delta = F.softplus(self.step(u))
        y = selective_scan(u, delta, -self.log_rate.exp(), self.write(u), self.read(u))
        return self.out((y + self.skip * u) * F.silu(self.gate(x)))
