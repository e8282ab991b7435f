"""From a model, its data and its loss to one page: measure, keep, draw.

analysis = report.analyse(objective, name="My model")
report.write(analysis, "report")
"""

from evolute.report.analysis import Analysis
from evolute.report.measure import analyse
from evolute.report.summary import summary
from evolute.report.writing import write

__all__ = ["Analysis", "analyse", "summary", "write"]
