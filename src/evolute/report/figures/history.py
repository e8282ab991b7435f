"""The loss while the model was trained."""

from __future__ import annotations

from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Training
from evolute.report.figures.axes import log_ticks, positive_range
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import bare, light, run_colour
from evolute.report.numbers import short


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    axes = figure.subplots()
    for index, run in enumerate(runs):
        training = _training(run)
        count, steps = len(training.losses), training.steps or len(training.losses)
        places = [(place + 0.5) * steps / count for place in range(count)]
        axes.plot(places, training.losses, color=run_colour(index), lw=1.6, label=run.name)
        axes.plot(places[-1], training.losses[-1], "o", color=run_colour(index), ms=6, mec=light("surface"))
    axes.set_yscale("log")
    axes.set_ylim(*positive_range([loss for run in runs for loss in _training(run).losses], 1.3))
    log_ticks(axes, "y")
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(axis="y")
    bare(axes, "left")
    if len(runs) > 1:
        figure.legend(loc="outside lower left", ncols=3)


def _training(run: Analysis) -> Training:
    assert run.training is not None
    return run.training


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        losses = _training(run).losses
        return f"from {short(losses[0])} to {short(losses[-1])}."

    return "The loss while training, " + per_run(runs, sentence)


def _table(runs: Runs) -> Table:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        training = _training(run)
        count, steps = len(training.losses), training.steps or len(training.losses)
        for place in range(0, count, max(1, count // 24)):
            step = f"{round((place + 0.5) * steps / count):,}"
            rows.append(named(runs, run, step, short(training.losses[place])))
    return Table(head(runs, "Step", "Loss"), tuple(rows))


def _there(run: Analysis) -> bool:
    return run.training is not None and len(run.training.losses) > 1


HISTORY = Drawing("training", "Loss while training", _draw, lambda runs, narrow: 2.3, _alt, _table, _there)
