"""Curvature on the way through the model: embedding, layers in order, head."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evolute.report.analysis import Analysis, Estimate
from evolute.report.derived import Station, stations
from evolute.report.figures.axes import log_ticks, positive_range
from evolute.report.figures.drawing import Drawing, Runs, Table, head, named, per_run
from evolute.report.figures.style import H_F, H_O, bare, light, run_colour
from evolute.report.naming import in_order
from evolute.report.numbers import short

LINES = (("G", f"{H_O}, Gauss–Newton part", "o", "-"), ("F", f"{H_F}, functional part", "s", "--"))


def _draw(figure: Figure, runs: Runs, narrow: bool) -> None:
    axes = figure.subplots()
    names = in_order(station.name for run in runs for station in _stations(run))
    for index, run in enumerate(runs):
        for matrix, label, marker, dash in LINES:
            name = label if len(runs) == 1 else f"{run.name}: {H_O if matrix == 'G' else H_F}"
            colour = light("blue" if matrix == "G" else "orange") if len(runs) == 1 else run_colour(index)
            _line(axes, run, matrix, names, colour, marker, dash, name)
    axes.set_yscale("log")
    axes.set_ylim(*positive_range([e.value for r in runs for s in _stations(r) for e in (s.G, s.F)], 2.2))
    log_ticks(axes, "y")
    axes.set_xticks(range(len(names)), _thinned(names, narrow))
    axes.set_xlim(-0.35, len(names) - 0.65)
    axes.grid(axis="y")
    axes.set_ylabel("norm of the block")
    bare(axes, "left")
    figure.legend(loc="outside lower left", ncols=1 if narrow else 2)


def _line(
    axes: Axes, run: Analysis, matrix: str, names: tuple[str, ...], colour: str, marker: str, dash: str, label: str
) -> None:
    found = [(names.index(s.name), _of(s, matrix)) for s in _stations(run)]
    places, values = [x for x, _ in found], [e.value for _, e in found]
    axes.errorbar(places, values, [e.error for _, e in found], color=colour, lw=0, elinewidth=1.4, capsize=3)
    axes.plot(places, values, dash, color=colour, marker=marker, ms=7, lw=2, mec=light("surface"), label=label)


def _of(station: Station, matrix: str) -> Estimate:
    return {"H": station.H, "G": station.G, "F": station.F}[matrix]


def _thinned(names: tuple[str, ...], narrow: bool) -> list[str]:
    """Every name, or every so many where there are many layers; 'Layer' once is enough."""
    stride = -(-len(names) // (6 if narrow else 14))
    shorter = [name.replace("Layer ", "") if len(names) > 7 else name for name in names]
    return [name if place % stride == 0 else "" for place, name in enumerate(shorter)]


def _stations(run: Analysis) -> tuple[Station, ...]:
    assert run.blocks is not None
    return stations(run.blocks)


def _height(runs: Runs, narrow: bool) -> float:
    return (3.1 if narrow else 3.2) + 0.2 * len(runs)


def _alt(runs: Runs) -> str:
    def sentence(run: Analysis) -> str:
        return "; ".join(f"{s.name}: H_o {short(s.G.value)}, H_f {short(s.F.value)}" for s in _stations(run)) + "."

    return "Lines of the norm of the diagonal block of each station of the model. " + per_run(runs, sentence)


def _table(runs: Runs) -> Table:
    rows = [
        named(runs, run, s.name, str(s.H), str(s.G), str(s.F), f"{s.size:,}", _sharpness(run, s.name))
        for run in runs
        for s in _stations(run)
    ]
    return Table(head(runs, "Place", "‖H‖", "‖H_o‖", "‖H_f‖", "Parameters", "λ_max alone"), tuple(rows))


def _sharpness(run: Analysis, name: str) -> str:
    from evolute.report.naming import layer_of

    found = {layer_of(layer): value for layer, value in run.sharpness.layers} if run.sharpness else {}
    return short(found[name]) if name in found else "–"


DEPTH = Drawing("depth", "Curvature through depth", _draw, _height, _alt, _table, lambda run: run.blocks is not None)
