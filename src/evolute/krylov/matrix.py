"""An operator written down: where it is no larger than the basis of an iteration would be."""

from __future__ import annotations

import torch
from torch import Tensor

from evolute.krylov.work import Work


def matrix(work: Work) -> Tensor:
    """A written down, (A + Aᵀ)/2 in float64 on the CPU."""
    identity = torch.eye(work.n, dtype=work.dtype, device=work.op.device)
    A = work(identity).to("cpu", torch.float64)
    work.finite(A)
    return (A + A.mT) / 2
