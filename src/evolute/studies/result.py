"""What a study found: rows, verdict and where they come from; saved as JSON, and drawn from that alone."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from evolute.errors import StudyError
from evolute.krylov.provenance import installed_version
from evolute.studies.cells import write
from evolute.studies.study import Row, Verdict

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """The table of a study with its verdict. `failed`: what went wrong in cells that are not in the table."""

    study: str
    claim: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    verdict: Verdict
    cells: int
    failed: Sequence[str]
    seconds: float
    provenance: Mapping[str, str]

    def save(self, path: str | Path) -> Path:
        """JSON; a folder gets result.json."""
        path = Path(path)
        path = path if path.suffix == ".json" else path / "result.json"
        try:
            text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise StudyError(f"'{self.study}' has numbers that are not finite: its settings go too far.") from error
        write(path, text + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Result:
        """What `save` wrote."""
        path = Path(path)
        path = path / "result.json" if path.is_dir() else path
        try:
            saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if saved.pop("schema") != SCHEMA:
                raise StudyError(f"'{path}' was written by another version of evolute; run the study again.")
            verdict = Verdict(**saved.pop("verdict"))
            return cls(verdict=verdict, **saved)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StudyError(f"'{path}' is no result of a study: {error}.") from error


def provenance() -> dict[str, str]:
    """Versions."""
    return {"evolute": installed_version(), "torch": str(torch.__version__), "python": platform.python_version()}
