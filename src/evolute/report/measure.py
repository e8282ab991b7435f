"""From an objective to its analysis: one measurement after the other, each of which may be cut short by the budget."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evolute.engine.objective import Objective
from evolute.engine.operators import GaussNewton, Hessian
from evolute.errors import ReportError
from evolute.krylov.randomness import signs
from evolute.report import solvers
from evolute.report.adaptive import FEWEST, adaptive
from evolute.report.analysis import Adaptive, Analysis, Blocks, Provenance
from evolute.report.clock import Clock, Stage, bar, timed
from evolute.report.naming import coarser, in_order, prefix_of
from evolute.report.parts import Pairs, Parts
from evolute.report.probing import Known, probe
from evolute.report.samples import Batchwise, batchwise
from evolute.report.schedule import FULL, MOST_GROUPS, Schedule, schedule
from evolute.report.subject import checked, subject_of, training_of


def analyse(
    objective: Objective,
    *,
    name: str,
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
    budget: float | None = None,
    training: object = None,
    progress: bool = True,
) -> Analysis:
    """Everything that the page shows, measured: both ends of H, G, all blocks, the spectrum, step sizes.

    `about` names the subject where you know better: model, data, fingerprint, dtype, device. `training` has any of
    optimizer, lr, momentum, batch, steps, accuracy and losses, as a mapping or as the result of `zoo.train`. Within
    `budget` seconds less is measured, and the analysis says what. Ctrl-C ends the measurement under way and all that
    follow; what was known is returned.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)), torch.eye(3)
    >>> objective = Objective(model, [(x, torch.ones(3, 1))], torch.nn.MSELoss())
    >>> analysis = analyse(objective, name="three points", progress=False)
    >>> analysis.subject.parameters, analysis.sharpness.largest.values[0] > 0
    (21, True)
    """
    if budget is not None and not budget > 0:
        raise ReportError(f"budget: expected a number of seconds above 0, got {budget!r}.")
    return _Work(objective, name, checked(about or {}), seed, budget, training, progress).done()


class _Work:
    """The state of one analysis."""

    def __init__(
        self,
        objective: Objective,
        name: str,
        about: dict[str, Any],
        seed: int,
        budget: float | None,
        training: object,
        progress: bool,
    ) -> None:
        self.objective, self.name, self.about, self.seed = objective, name, about, seed
        self.H, self.G = Hessian(objective), GaussNewton(objective)
        self.training = training_of(training)
        self.generator = torch.Generator().manual_seed(seed)
        self.groups = coarser(objective.space.groups, MOST_GROUPS)
        self.layers = in_order(prefix for group in objective.space.groups if (prefix := prefix_of(group)))
        self.clock = Clock(budget, bar(progress, 1))

    def done(self) -> Analysis:
        loss = self.objective.value()
        with self.clock.progress:
            plan = self._planned()
            parts = self._measured(plan)
        return self._analysis(loss, parts)

    def _planned(self) -> Schedule:
        """A product is timed, and what the rest of the budget affords is planned."""
        plan, counts = FULL, (len(self.groups), len(self.layers))
        if self.clock.budget is not None:
            seconds = timed(lambda: self.H @ torch.ones(self.H.shape[1], dtype=self.H.dtype, device=self.H.device))
            plan = schedule((self.clock.budget - self.clock.elapsed) / max(seconds, 1e-9), *counts)
        self.products = plan.products(*counts)
        self.clock.progress.update(self.clock.progress.task_ids[0], total=sum(self.products.values()))
        if plan != FULL:
            self.clock.notes.append("To keep within the time that was given, fewer probes and eigenvalues were taken.")
        return plan

    def _measured(self, plan: Schedule) -> Parts:
        top = self._measure("the largest eigenvalues of H", "top", lambda s: self._top(s, plan.ends))
        self._refuse_zero(top)
        outer = self._measure("the largest eigenvalues of G", "outer", lambda s: self._outer(s, plan.ends))
        batches = self._measure("gradients batch by batch", None, lambda s: self._batchwise(s, top))
        found = self._measure("the whole spectrum, and its lower end", "spectrum", lambda s: self._spectrum(s, plan))
        blocks = self._measure("the norms of all blocks", "blocks", lambda s: self._blocks(s, plan.probes, top, outer))
        layers = self._measure("the layers by themselves", "layers", self._layers) if plan.layers else None
        seen = None
        if plan.adaptive and batches and len(batches.terms) >= FEWEST:
            seen = self._measure("curvature as Adam sees it", "adaptive", lambda s: self._adaptive(s, batches))
        spectrum, smallest = (found.spectrum, found.smallest) if found else (None, None)
        return Parts(top, outer, batches, blocks, spectrum, smallest, layers or (), seen)

    def _measure(self, what: str, key: str | None, run: Callable[[Stage], Any]) -> Any:
        return self.clock.measure(what, self.products[key] if key else 0, run)

    def _refuse_zero(self, top: Pairs | None) -> None:
        """Of the zero matrix there is nothing to tell: no share, no ratio, no scale to draw it on."""
        if top is None or top.values.any():
            return
        rows = signs(1, self.H.shape[1], torch.Generator().manual_seed(self.seed), torch.ones((), dtype=self.H.dtype))
        if not (self.H @ rows[0].to(self.H.device)).any():
            raise ReportError(
                "the Hessian is zero here, so there is no curvature to report: no parameter changes the gradient. Are "
                "all activations dead, or is the loss linear in the parameters?"
            )

    # ---------------------------------------------------------------- the measurements

    def _top(self, stage: Stage, k: int) -> Pairs:
        return solvers.eigenvalues(stage.watched(self.H), k, "largest", self.generator)

    def _outer(self, stage: Stage, k: int) -> Pairs:
        return solvers.eigenvalues(stage.watched(self.G), k, "largest", self.generator)

    def _batchwise(self, stage: Stage, top: Pairs | None) -> Batchwise:
        direction = top.vectors[:, -1].to(self.H.dtype) if top else torch.zeros(self.H.shape[0], dtype=self.H.dtype)
        return batchwise(self.objective, direction.to(self.H.device))

    def _blocks(self, stage: Stage, probes: int, top: Pairs | None, outer: Pairs | None) -> Blocks | None:
        def known(places: tuple[Tensor, ...]) -> Known:
            return Known.of(self._pairs(top), self._pairs(outer), places)

        return probe(self.H, self.G, self.groups, known, probes, self.generator, stage)

    def _pairs(self, found: Pairs | None) -> tuple[Tensor, Tensor]:
        none = torch.zeros(self.H.shape[0], 0, dtype=torch.float64, device=self.H.device)
        return (found.vectors.to(none), found.values.to(none)) if found else (none, none[0])

    def _spectrum(self, stage: Stage, plan: Schedule) -> solvers.Pass:
        probes, steps = plan.spectrum_probes, plan.spectrum_steps
        return solvers.spectrum(stage.watched(self.H), probes, steps, plan.ends, self.generator)

    def _layers(self, stage: Stage) -> tuple[tuple[str, float], ...]:
        blocks = {layer: stage.watched(self.H.restrict(layer)) for layer in self.layers}
        return tuple((layer, solvers.top(block, self.generator)[0]) for layer, block in blocks.items())

    def _adaptive(self, stage: Stage, batches: Batchwise) -> Adaptive:
        batch = (self.training.batch if self.training else None) or batches.samples
        return adaptive(self.H, self.objective, batches, batch, self.generator, stage)

    # ---------------------------------------------------------------- together

    def _analysis(self, loss: float, parts: Parts) -> Analysis:
        return Analysis(
            self.name,
            subject_of(self.objective, self.about, parts.terms),
            self.training,
            parts.point(loss, self.objective, self.H),
            parts.sharpness(),
            parts.adaptive,
            parts.spectrum,
            parts.blocks,
            tuple(self.clock.costs),
            tuple(self.clock.notes),
            self._provenance(),
        )

    def _provenance(self) -> Provenance:
        from evolute import __version__

        versions = {"evolute": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
        versions["python"] = platform.python_version()
        return Provenance(self.seed, tuple(versions.items()), torch.get_num_threads(), self.clock.elapsed)
