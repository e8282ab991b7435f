"""An objective: a model, its data and a loss that adds up, at the model's present parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from evolute.engine.batches import Batches
from evolute.engine.groups import groups as model_groups
from evolute.engine.guards import untouched
from evolute.engine.hf import hf_loss
from evolute.engine.loss import RECIPE, Loss, as_loss
from evolute.engine.substitution import twice_differentiable
from evolute.engine.tape import unrecorded
from evolute.errors import CurvatureWarning, DataError, EvoluteError, LossError, ModelError, NonFiniteError
from evolute.linop.space import Group, Select, Space


@dataclass(frozen=True)
class Evaluated:
    """One batch run forward: the outputs of the model, the sum of its losses, and how many there are."""

    index: int
    batch: Any
    outputs: Any
    total: Tensor
    terms: float


class Objective:
    """L(w) = Σ_batches (sum of loss) / Σ_batches (number of terms), the same however the data is cut into batches.

    `batches` is iterated again and again and must give the same each time; `loss` is a loss of `torch.nn` on (x, y)
    batches or an `ev.Loss`. `params` chooses parameters or groups (default: those with requires_grad). Dropout is off
    unless `dropout_seed` fixes its masks. `memory` is the budget in bytes for what is kept between products.

    >>> import evolute as ev
    >>> x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    >>> ev.Objective(torch.nn.Linear(3, 2), [(x, y)], torch.nn.CrossEntropyLoss()).space.size
    8
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss | nn.Module,
        *,
        params: Select | None = None,
        dropout_seed: int | None = None,
        memory: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}.")
        _check_model(model)
        _check_budget(memory)
        self.model, self.loss = model, as_loss(loss)
        self.dropout_seed, self.memory = dropout_seed, memory
        self.parameters = _chosen(model, params)
        self.space = _space(model, self.parameters)
        self._dtypes = {name: parameter.dtype for name, parameter in self.parameters.items()}
        self.batches = Batches(batches, self.space.device)
        self._unused: tuple[str, ...] | None = None

    @classmethod
    def from_hf(cls, model: nn.Module, batches: Iterable[Any], **options: Any) -> Objective:
        """Of a Hugging Face model on dict batches with labels; its own loss, with -100 left out and causal shift."""
        return cls(model, batches, hf_loss(model), **options)

    def value(self) -> float:
        """L(w)."""
        total, terms = 0.0, 0.0
        with self.running(), torch.no_grad():
            for each in self.evaluate():
                total, terms = total + each.total.double().item(), terms + each.terms
        return total / self.normaliser(terms)

    def gradient(self) -> Tensor:
        """∇L(w), flat in the order of `space`."""
        parameters, terms, used = list(self.parameters.values()), 0.0, set[str]()
        with self.running():
            out = torch.zeros(self.space.size, dtype=self.space.dtype, device=self.space.device)
            for each in self.evaluate():
                gradients = torch.autograd.grad(self.attached(each), parameters, allow_unused=True)
                self.check_finite(each, gradients)
                used |= {name for name, g in zip(self.parameters, gradients, strict=True) if g is not None}  # pyright: ignore
                self._add_in(out, gradients)
                terms += each.terms
            out.div_(self.normaliser(terms))
        self.note_used(used)
        return out

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of chosen parameters that the loss does not depend on; known after the first derivative."""
        return self._unused or ()

    def __repr__(self) -> str:
        return f"Objective({type(self.model).__name__}, {self.space.size:,} parameters, {self.space.dtype})"

    # ---- for the operators

    @contextmanager
    def running(self) -> Generator[None]:
        """The model's state for the time of a computation."""
        self._check_parameters()
        keep = self.dropout_seed is not None
        with untouched(self.model, self.parameters.values(), keep_training=keep), twice_differentiable():
            yield

    def _check_parameters(self) -> None:
        present, here = dict(self.model.named_parameters()), self.space
        for name, parameter in self.parameters.items():
            same = present.get(name) is parameter and parameter.shape == here.shapes[name]
            if not same or (parameter.dtype, parameter.device) != (self._dtypes[name], here.device):
                raise ModelError(
                    f"'{name}' has been replaced, moved or cast since this objective was made. Make a new one, which "
                    "is cheap: ev.Objective(model, batches, loss)."
                )

    def evaluate(self) -> Generator[Evaluated]:
        """Each batch run forward, its loss checked."""
        for index, batch in self.batches:
            yield self.evaluate_one(index, batch)

    def evaluate_one(self, index: int, batch: Any) -> Evaluated:
        if self.dropout_seed is not None:
            torch.manual_seed(self.dropout_seed + index)
        outputs = self.loss.forward(self.model, batch)
        total, terms = self.judge(outputs, batch)
        with unrecorded():
            if not torch.isfinite(total):
                raise NonFiniteError(f"the loss of batch {index} is {total.item()}{self._which_term(outputs, batch)}.")
        return Evaluated(index, batch, outputs, total, terms)

    def judge(self, outputs: Any, batch: Any) -> tuple[Tensor, float]:
        """(sum, number of terms), checked."""
        result: Any = self.loss.criterion(outputs, batch)
        if not isinstance(result, (tuple, list)) or len(result) != 2:  # pyright: ignore[reportUnknownArgumentType]
            raise LossError(f"expected (sum of loss, number of terms), got {type(result).__name__}. {RECIPE}")
        total, terms = result  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(total, Tensor) or total.ndim != 0 or not total.is_floating_point():
            shape = f"{tuple(total.shape)}, {total.dtype}" if isinstance(total, Tensor) else type(total).__name__  # pyright: ignore
            raise LossError(f"the sum of the loss must be a scalar floating-point tensor, got {shape}. {RECIPE}")
        count = _count(terms)
        if not math.isfinite(count) or count < 0:
            raise LossError(f"the number of terms must be finite and not negative, got {count}. {RECIPE}")
        return total, count

    def attached(self, each: Evaluated) -> Tensor:
        """The loss, if it depends on a parameter at all (a batch with every label masked is a constant zero)."""
        if each.total.requires_grad:
            return each.total
        if each.terms == 0:
            first = next(iter(self.parameters.values()))
            return each.total + 0.0 * first.sum()
        raise LossError(
            f"the loss of batch {each.index} does not depend on any chosen parameter. Is it computed under no_grad, "
            "with .item() or .detach(), or from other parameters?"
        )

    def normaliser(self, terms: float) -> float:
        if not self.loss.mean:
            return 1.0
        if terms == 0:
            raise DataError("no term at all: every label is masked (-100), or the criterion counts none.")
        return terms

    def note_used(self, used: set[str]) -> None:
        """After a full pass: parameters that no batch uses are zero rows; they are named once."""
        first, self._unused = self._unused is None, tuple(name for name in self.parameters if name not in used)
        if first and self._unused:
            named = ", ".join(self._unused[:5]) + (" …" if len(self._unused) > 5 else "")
            message = f"{len(self._unused)} parameters are not used by the loss and count as zero rows: {named}"
            warnings.warn(message, CurvatureWarning, stacklevel=3)

    def check_finite(self, each: Evaluated, gradients: Iterable[Tensor | None]) -> None:
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and not torch.isfinite(gradient.sum()) and not torch.isfinite(gradient).all():
                where = f"the gradient of batch {each.index} with respect to '{name}' is not finite"
                raise NonFiniteError(f"{where} (loss {each.total.item():.4g}).")

    def _add_in(self, out: Tensor, pieces: Iterable[Tensor | None]) -> None:
        for view, piece in zip(self.space.views(out), pieces, strict=True):
            if piece is not None:
                view.add_(piece.detach())

    def _which_term(self, outputs: Any, batch: Any) -> str:
        if self.loss.terms is not None:
            bad = (~torch.isfinite(self.loss.terms(outputs, batch).detach())).nonzero().flatten()
            if len(bad):
                return f": term {int(bad[0])} first, {len(bad)} in all"
        leaves = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor)]
        if any(not torch.isfinite(leaf).all() for leaf in leaves):
            return "; the model's own output is already not finite"
        return ""


def _count(terms: Any) -> float:
    try:
        with unrecorded():
            return float(terms)
    except (TypeError, ValueError, RuntimeError) as error:
        got = tuple(terms.shape) if isinstance(terms, Tensor) else repr(terms)
        raise LossError(f"the number of terms must be a number, got {got}. {RECIPE}") from error


def _check_budget(memory: object) -> None:
    if memory is not None and (not isinstance(memory, int | float) or not memory >= 0):
        raise EvoluteError(f"memory: expected a number of bytes that is not negative, or None, got {memory!r}.")


def _chosen(model: nn.Module, params: Select | None) -> dict[str, nn.Parameter]:
    everything = dict(model.named_parameters())
    if params is None:
        chosen = {name: p for name, p in everything.items() if p.requires_grad}
    else:
        shapes = {name: p.shape for name, p in everything.items()}
        parts = Space(shapes, model_groups(model)).resolve(params).parts
        chosen = {name: p for name, p in everything.items() if name in _whole(parts, shapes)}
    if not chosen:
        why = "all are frozen (requires_grad=False); pass params=… to choose some" if everything else "it has none"
        raise ModelError(f"{type(model).__name__} has no trainable parameter: {why}.")
    for name, parameter in chosen.items():
        if not parameter.is_floating_point():
            raise ModelError(f"'{name}' has dtype {parameter.dtype}: only floating-point parameters have curvature.")
    return chosen


def _whole(parts: Group, shapes: Mapping[str, torch.Size]) -> set[str]:
    """Names of the parameters that the parts cover; a slice alone cannot be differentiated by itself."""
    covered: dict[str, int] = {}
    for part in parts:
        covered[part.name] = covered.get(part.name, 0) + part.shape(shapes[part.name]).numel()
    for name, size in covered.items():
        if size != shapes[name].numel():
            raise ModelError(
                f"params takes whole parameters, got {size:,} of {shapes[name].numel():,} entries of '{name}'; "
                "make the objective on all of it, and take the block: ev.Hessian(objective).restrict(group)."
            )
    return set(covered)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"'{name}' has max_norm={module.max_norm}: its forward pass rewrites its weights, so there is no "
                "point to differentiate at. Renormalise once and set max_norm=None."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ModelError(
                f"'{name}' was made in inference mode, where nothing can be differentiated; build the model outside."
            )


def _space(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Space:
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ModelError(
            f"expected all parameters on one device, got {sorted(map(str, devices))}; use model.to(device)."
        )
    dtype = next(iter(parameters.values())).dtype
    for parameter in parameters.values():
        dtype = torch.promote_types(dtype, parameter.dtype)
    inside = {
        name: tuple(part for part in parts if part.name in parameters) for name, parts in model_groups(model).items()
    }
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    return Space(shapes, {name: parts for name, parts in inside.items() if parts}, dtype, devices.pop())
