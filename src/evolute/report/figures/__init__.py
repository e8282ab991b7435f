"""The figures of the page, each from saved results only."""

from evolute.report import extra as _needed
from evolute.report.figures.density import DENSITY
from evolute.report.figures.depth import DEPTH
from evolute.report.figures.drawing import Drawing, Table
from evolute.report.figures.ends import ENDS
from evolute.report.figures.heatmap import HEATMAP
from evolute.report.figures.history import HISTORY
from evolute.report.figures.ruler import RULER
from evolute.report.figures.shares import SHARES
from evolute.report.figures.spread import SPREAD
from evolute.report.figures.triangle import TRIANGLE

FIGURES = (RULER, ENDS, HEATMAP, SHARES, SPREAD, DENSITY, DEPTH, TRIANGLE, HISTORY)

assert not _needed.MISSING

__all__ = ["FIGURES", "Drawing", "Table"]
