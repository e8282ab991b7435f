"""The loss of every single sample, at one point or at several around it, from one pass over the data."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from evolute.engine.objective import Objective
from evolute.errors import DataError, NonFiniteError

SINGLE = "Give batches of one sample each: such a batch is taken as it is."


@dataclass(frozen=True, eq=False)
class SampleLosses:
    """L = Σ sums / Σ terms: `sums` (points, samples) and `terms` (samples), in the order of the data, in float64.

    A sample is one entry along the first axis of a batch: an image, or a sequence with all the tokens that count in it.
    """

    sums: Tensor
    terms: Tensor

    def __len__(self) -> int:
        return len(self.terms)


def sample_losses(objective: Objective, shifts: Sequence[Tensor] = ()) -> SampleLosses:
    """(s_i, n_i) of each sample i at w, or at every w + δ of `shifts`; the model's own parameters stay as they are.

    >>> from torch.nn import CrossEntropyLoss, Linear
    >>> objective = Objective(Linear(2, 3), [(torch.ones(5, 2), torch.arange(5) % 3)], CrossEntropyLoss())
    >>> each = sample_losses(objective)
    >>> each.sums.shape, bool(abs(each.sums.sum() / each.terms.sum() - objective.value()) < 1e-6)
    (torch.Size([1, 5]), True)
    """
    points = [_moved(objective, shift) for shift in shifts] or [{}]
    sums, terms = list[Tensor](), list[Tensor]()
    with objective.running(), torch.no_grad():
        for index, batch in objective.batches:
            found = [_of_batch(objective, index, batch, outputs_at(objective, index, batch, each)) for each in points]
            sums.append(torch.stack([one for one, _ in found]))
            terms.append(found[0][1])
    return SampleLosses(torch.cat(sums, 1), torch.cat(terms))


def outputs_at(objective: Objective, index: int, batch: Any, parameters: Mapping[str, Tensor]) -> Any:
    """The outputs of the model as if these parameters were others; inside of `objective.running()`."""
    if objective.dropout_seed is not None:
        torch.manual_seed(objective.dropout_seed + index)
    return functional_call(_Whole(objective), {f"model.{name}": p for name, p in parameters.items()}, (batch,))


def _moved(objective: Objective, shift: Tensor) -> dict[str, Tensor]:
    space, named = objective.space, objective.parameters
    flat = space.flatten({name: p.detach() for name, p in named.items()}) + shift
    return {name: p.to(named[name].dtype) for name, p in space.unflatten(flat).items()}


class _Whole(nn.Module):
    """batch ↦ outputs, with the model inside, so that a parameter can be exchanged under any `forward` of a loss."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model, self.outputs = objective.model, objective.loss.forward

    def forward(self, batch: Any) -> Any:
        return self.outputs(self.model, batch)


def _of_batch(objective: Objective, index: int, batch: Any, outputs: Any) -> tuple[Tensor, Tensor]:
    """(B,) sums and (B,) terms, which add up to those of the batch."""
    total, terms = objective.judge(outputs, batch)
    size = _samples(batch)
    singles = _cut(index, outputs, batch, size) if size != 1 else iter([(outputs, batch)])
    judged = [objective.judge(output, one) for output, one in singles]
    sums = torch.tensor([each.double().item() for each, _ in judged], dtype=torch.float64)
    if not torch.isfinite(total) or not torch.isfinite(sums).all():
        bad = (~torch.isfinite(sums)).nonzero().flatten().tolist()
        which = f": sample {bad[0]} first, {len(bad)} in all" if bad else ""
        raise NonFiniteError(f"the loss of batch {index} is {total.item()}{which}.")
    counts = torch.tensor([count for _, count in judged], dtype=torch.float64)
    gap, slack = abs(float(sums.sum()) - total.double().item()), torch.finfo(total.dtype).eps ** 0.5
    if gap > slack * float(sums.abs().sum()) or abs(float(counts.sum()) - terms) > slack * terms:
        raise DataError(
            f"the {size} samples of batch {index} have losses that add up to {float(sums.sum()):.6g} over "
            f"{float(counts.sum()):g} terms, the batch itself to {total.item():.6g} over {terms:g}: its loss couples "
            f"samples, or the first axis of its tensors does not count them. {SINGLE}"
        )
    return sums, counts


def _samples(batch: Any) -> int:
    """The first axis of the first tensor."""
    axes = [len(leaf) for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.ndim]
    return axes[0] if axes else 1


def _cut(index: int, outputs: Any, batch: Any, size: int) -> Generator[tuple[Any, Any]]:
    """(outputs, batch) of each sample: m rows of an output that has m·B; what has another first axis is for all."""
    rows = {len(leaf) for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.ndim}
    if size < 1 or any(each % size for each in rows):
        got = ", ".join(map(str, sorted(rows)))
        raise DataError(f"batch {index} has {size} samples, but outputs with a first axis of {got}. {SINGLE}")

    def part(leaf: Any, i: int, exact: bool) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or (exact and len(leaf) != size):
            return leaf
        m = len(leaf) // size
        return leaf[i * m : (i + 1) * m]

    for i in range(size):
        yield (
            tree_map(lambda leaf: part(leaf, i, False), outputs),  # noqa: B023  used before i moves on
            tree_map(lambda leaf: part(leaf, i, True), batch),  # noqa: B023
        )
