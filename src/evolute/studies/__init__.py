"""The claims of the theory as studies: a file or a folder per claim, from configuration to verdict."""

from evolute.studies.figures import look
from evolute.studies.registry import add, all_names, find
from evolute.studies.result import Result
from evolute.studies.run import run
from evolute.studies.settings import configured
from evolute.studies.study import Cell, Config, Row, Study, Verdict

__all__ = [
    "Cell",
    "Config",
    "Result",
    "Row",
    "Study",
    "Verdict",
    "add",
    "all_names",
    "configured",
    "find",
    "look",
    "run",
]
