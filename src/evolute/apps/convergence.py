"""Whether a training run converges: did the loss fall, how fast does the gradient shrink, when is a target reached.

On a quadratic L − L_∞ = ½ Σ λ_i c_i² (1−ηλ_i)^{2t}: the gradient shrinks as e^(−rt) and L − L_∞ as e^(−2rt), where late
in the run r is that of the slowest direction that is still seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evolute.apps import decay
from evolute.apps.decay import Array, Decay, Interval
from evolute.apps.history import History, read
from evolute.errors import DecisionError
from evolute.krylov.storage import load_result, save_result, saveable

FEWEST = 4  # norms or spectra that have a trend


@saveable
@dataclass(frozen=True)
class Forecast:
    """When the loss is at `target`: "reached" (at the first step of that loss), "will be", "not" or "undecided".

    `step` has its interval; it is None where there is none to tell, and `why` says so.
    """

    target: float
    answer: str
    step: Interval | None
    why: str

    def __str__(self) -> str:
        return f"loss {self.target:g}: {self.answer}; {self.why}"


@saveable
@dataclass(frozen=True)
class Convergence:
    """What a history says, each number with its interval (`level`).

    - `fall`: mean loss of the first eighth minus that of the last; `fell`: True, False, or None where noise hides it.
    - `noise`: standard deviation of a single loss about its trend, at the end of the run.
    - `gradient_rate`: r of ‖g‖ ~ e^(−rt) over the last half, per step; `loss_rate` that of L − L_∞, and `floor` is L_∞.
    - `conditioning`: largest over smallest of the top eigenvalues at last, `conditioning_trend` d log κ/d step.
    """

    records: int
    first: float
    last: float
    level: float
    start: float
    end: float
    best: float
    best_step: float
    noise: float
    fall: Interval
    gradient_rate: Interval | None
    loss_rate: Interval | None
    floor: Interval | None
    conditioning: float | None
    conditioning_trend: Interval | None
    decays: tuple[Decay, ...]
    still: str

    @property
    def fell(self) -> bool | None:
        return True if self.fall.low > 0 else False if self.fall.high <= 0 else None

    def reaches(self, target: float) -> Forecast:
        """When the loss is there, if it goes on as a quadratic model has it."""
        if not isinstance(target, int | float) or not math.isfinite(target):  # pyright: ignore
            raise DecisionError(f"target: expected a loss, got {target!r}.")
        if self.end <= target:
            step = Interval(self.last, self.first, self.last)
            return Forecast(target, "reached", step, f"the mean loss of the last eighth of the run is {self.end:.4g}.")
        if not self.decays:
            return Forecast(target, "not", None, self.still)
        return _forecast(self, target)

    def save(self, path: str | Path) -> Path:
        """JSON."""
        return save_result(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Convergence:
        """What `save` wrote."""
        return load_result(path, cls)

    def __str__(self) -> str:
        fell = {True: "fell", False: "did not fall", None: "may have fallen: the noise hides it"}[self.fell]
        lines = [f"the loss {fell}: {self.start:.4g} → {self.end:.4g}, by {self.fall}; noise {self.noise:.2g}"]
        if self.gradient_rate:
            lines.append(f"the gradient norm {_direction(self.gradient_rate)}: rate {self.gradient_rate} per step")
        if self.floor and self.loss_rate:
            lines.append(f"the loss levels off at {self.floor}, at a rate of {self.loss_rate} per step")
        else:
            lines.append(self.still)
        if self.conditioning is not None and self.conditioning_trend:
            trend = {"shrinks": "falls", "grows": "grows"}.get(_direction(_minus(self.conditioning_trend)), "is steady")
            lines.append(f"the condition number of the top subspace {trend}: {self.conditioning:.4g} at last")
        return "\n".join(lines)


def convergence(history: object, *, level: float = 0.95) -> Convergence:
    """Did the loss fall, how fast does the gradient shrink, does the conditioning change, where does the loss end?

    >>> import math, evolute as ev
    >>> losses = [1 + math.exp(-t / 20) + 0.001 * (-1) ** t for t in range(100)]
    >>> found = ev.convergence(losses)
    >>> found.fell, round(found.floor.value, 2), found.reaches(0.9).answer, found.reaches(1.002).answer
    (True, 1.0, 'not', 'will be')

    Args:
        history: A list of losses; or {"step": […], "loss": […], "grad_norm": […], "eigenvalues": [[…], …]}, of which
            only "loss" has to be there; or a list of records with these keys, such as `trainer.state.log_history` of
            Hugging Face. Steps ascend. None stands for a norm or eigenvalues that were not measured. Losses may be
            noisy, if the noise is independent from record to record: hand in those of the batches, not running means.
        level: Of all intervals.
    """
    if not 0 < level < 1:
        raise DecisionError(f"level: expected a number between 0 and 1, such as 0.95, got {level!r}.")
    run = read(history)
    ends = max(4, len(run.losses) // 8)
    start, end = run.losses[:ends], run.losses[-ends:]
    rate = _gradient_rate(run, level)
    decays, still = _decays(run, rate, level)
    condition, trend = _conditioning(run, level)
    lowest = int(run.losses.argmin())
    return Convergence(
        records=len(run.steps),
        first=float(run.steps[0]),
        last=float(run.steps[-1]),
        level=level,
        start=float(start.mean()),
        end=float(end.mean()),
        best=float(run.losses[lowest]),
        best_step=float(run.steps[lowest]),
        noise=decay.noise(end)[0],
        fall=decay.difference(start, end, level),
        gradient_rate=rate,
        loss_rate=_spread([each.rate for each in decays]),
        floor=_floor(decays),
        conditioning=condition,
        conditioning_trend=trend,
        decays=decays,
        still=still,
    )


# ---------------------------------------------------------------- rates


def _half(steps: Array, values: Array, run: History) -> tuple[Array, Array]:
    """The last half of the run, or all of it where that is too little."""
    late = steps >= (run.steps[0] + run.steps[-1]) / 2
    return (steps[late], values[late]) if late.sum() >= max(FEWEST, len(steps) // 4) else (steps, values)


def _gradient_rate(run: History, level: float) -> Interval | None:
    """−d log‖g‖/d step."""
    if run.gradients is None:
        return None
    steps, norms = _half(*run.gradients, run)
    steps, norms = steps[norms > 0], norms[norms > 0]
    return _minus(decay.slope(steps, np.log(norms), level)) if len(steps) >= FEWEST else None


def _conditioning(run: History, level: float) -> tuple[float | None, Interval | None]:
    if run.conditions is None or not len(run.conditions[0]):
        return None, None
    steps, values = run.conditions
    last = float(values[-1])
    return last, decay.slope(steps, np.log(values), level) if len(steps) >= FEWEST else None


def _decays(run: History, rate: Interval | None, level: float) -> tuple[tuple[Decay, ...], str]:
    """Those that fit the last half of the losses; with gradient norms, at twice their rate. None: a sentence why."""
    steps, losses = _half(run.steps, run.losses, run)
    if rate is None:
        found = decay.decays(steps, losses, level)
        return found, "" if found else "the loss does not bend towards a floor: the run has no rate to go by."
    if rate.low <= 0:
        return (), f"the gradient norm does not shrink for sure: its rate is {rate} per step."
    tried = [rate.value, *(np.linspace(rate.low, rate.high, 9) if rate.high > rate.low else [])]
    return tuple(decay.decay_at(steps, losses, 2 * each, level) for each in tried), ""


def _spread(values: list[float]) -> Interval | None:
    """The first is the best."""
    return Interval(values[0], min(values), max(values)) if values else None


def _floor(decays: tuple[Decay, ...]) -> Interval | None:
    if not decays:
        return None
    low, high = min(each.floor - each.reach for each in decays), max(each.floor + each.reach for each in decays)
    return Interval(decays[0].floor, low, high)


def _minus(rate: Interval) -> Interval:
    return Interval(-rate.value, -rate.high, -rate.low)


def _direction(rate: Interval) -> str:
    return "shrinks" if rate.low > 0 else "grows" if rate.high < 0 else "is steady"


# ---------------------------------------------------------------- when


def _forecast(found: Convergence, target: float) -> Forecast:
    floor = found.floor
    assert floor is not None
    if target <= floor.low:
        return Forecast(target, "not", None, f"the loss levels off at {floor}, above the target.")
    if target <= floor.value or target <= floor.high:
        return Forecast(target, "undecided", None, f"the target is within what is known of the floor, {floor}.")
    times = [
        _time(each, level, target, found.last) for each in found.decays for level in (0.0, -each.reach, each.reach)
    ]
    step = Interval(times[0], min(times), max(times))
    return Forecast(target, "will be", step, f"at step {step}, if the loss goes on as a quadratic model has it.")


def _time(fit: Decay, shift: float, target: float, last: float) -> float:
    """Where floor + height e^(−rate (t − last)) is the target; what the floor is off by, the height is off by, too."""
    floor = fit.floor + shift
    height = max(fit.height - shift, 1e-300)
    return max(last, last + math.log(height / (target - floor)) / fit.rate)
