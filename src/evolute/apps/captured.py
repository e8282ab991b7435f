"""What goes into modules of a model and comes out of them, and how cotangents of its outputs arrive there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evolute.engine.groups import groups
from evolute.engine.objective import Objective

Columns = Callable[[Tensor, Tensor], Iterator[Tensor]]  # (outputs, labels) → cotangents of the outputs


@dataclass(frozen=True, eq=False)
class Captured:
    """One batch, run forward. Tokens of a module are (B, S, features): B samples, S of them in each (1 of vectors)."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    logits: Tensor  # (B, T, V)
    labels: Tensor  # (B, T)
    terms: float
    raw: Tensor  # the model's outputs as they came

    def pull_to_outputs(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Jᵀ s at what comes out of the modules."""
        return self._pull(self.outputs, cotangent)

    def pull_to_inputs(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Jᵀ s at what goes into them, by every way from there."""
        return self._pull(self.inputs, cotangent)

    def _pull(self, places: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
        into = cotangent.reshape(self.raw.shape)
        found = torch.autograd.grad(self.raw, list(places.values()), into, retain_graph=True)
        return {name: tokens(each) for name, each in zip(places, found, strict=True)}


def captured(objective: Objective, modules: Mapping[str, nn.Module]) -> Iterator[Captured]:
    """Each batch (x, labels) of an objective, its outputs as terms of a sample."""
    for index, batch in objective.batches:
        inputs, outputs = dict[str, Tensor](), dict[str, Tensor]()
        with objective.running(), torch.enable_grad(), ExitStack() as hooks:
            for name, module in modules.items():
                hook = module.register_forward_hook(partial(_keep, inputs, outputs, name))
                hooks.callback(hook.remove)
            each = objective.evaluate_one(index, batch)
        samples = len(batch[0])
        logits = each.outputs.detach().reshape(samples, -1, each.outputs.shape[-1])
        labels = batch[1].reshape(samples, -1)
        yield Captured(inputs, outputs, logits, labels, each.terms, each.outputs)


def _keep(
    inputs: dict[str, Tensor], outputs: dict[str, Tensor], name: str, module: nn.Module, args: Any, out: Tensor
) -> None:
    inputs[name], outputs[name] = args[0], out


def tokens(x: Tensor) -> Tensor:
    """(B, features) → (B, 1, features); (B, S, features) stays.

    >>> tokens(torch.zeros(5, 3)).shape
    torch.Size([5, 1, 3])
    """
    x = x.detach()
    return x[:, None] if x.ndim == 2 else x


def linear_groups(model: nn.Module) -> dict[str, nn.Linear]:
    """Group → the linear map that is all of it, in the order of the model.

    >>> from evolute.zoo import GPT
    >>> list(linear_groups(GPT(12, 17, 8, seed=0)))[-3:]
    ['layers.0.mlp.up', 'layers.0.mlp.down', 'unembed']
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = dict[str, nn.Linear]()
    for group, parts in groups(model).items():
        owner = parts[0].name.rpartition(".")[0]
        whole = [f"{owner}.{name}" for name, _ in modules[owner].named_parameters()] if owner in modules else []
        if whole and [part.label for part in parts] == whole:
            found[group] = modules[owner]
    return found


# ---- the group of a linear map, row by row: entry (o, i) of W at o·p + i, and b_o last in its row


def with_one(x: Tensor, linear: nn.Linear) -> Tensor:
    """(B, S, inputs), and a 1 for the bias, if there is one."""
    x = tokens(x)
    return torch.cat([x, torch.ones_like(x[..., :1])], -1) if _biased(linear) else x


def by_rows(linear: nn.Linear) -> Tensor:
    """Where the entries of the group (all of W, then b) go: `block[order][:, order]` is row by row.

    >>> by_rows(nn.Linear(2, 3)).tolist()
    [0, 1, 6, 2, 3, 7, 4, 5, 8]
    """
    rows, inputs = linear.weight.shape
    order = torch.arange(rows * inputs).view(rows, inputs)
    if not _biased(linear):
        return order.flatten()
    return torch.cat([order, rows * inputs + torch.arange(rows)[:, None]], 1).flatten()


def sample_gradients(batch: Captured, linears: Mapping[str, nn.Linear], cotangent: Tensor) -> dict[str, Tensor]:
    """Jᵀ s of each sample in the weights, (B, o, p): Σ_s g_s (x_s, 1)ᵀ."""
    pulled = batch.pull_to_outputs(cotangent)
    return {name: pulled[name].mT @ with_one(batch.inputs[name], linears[name]) for name in linears}


def _biased(linear: nn.Linear) -> bool:
    return "bias" in dict(linear.named_parameters())
