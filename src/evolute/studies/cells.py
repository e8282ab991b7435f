"""Finished cells on disk, one small file each: what was measured once is never measured again."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolute.errors import StudyError
from evolute.krylov.provenance import installed_version
from evolute.studies.study import Cell, Row


@dataclass(frozen=True)
class CellStore:
    """A folder of finished cells of one study; none, if nothing is to be kept.

    Another version of evolute may measure otherwise: it finds no cell of this one.
    """

    study: str
    folder: Path | None

    def prepare(self) -> None:
        """Nothing is measured that could not be kept."""
        if self.folder is not None:
            probe = self.folder / f".{uuid.uuid4().hex}"
            write(probe, "")
            probe.unlink()

    def load(self, cell: Cell) -> list[Row] | None:
        path = self._path(cell)
        if path is None or not path.exists():
            return None
        try:
            saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            matches = saved["study"] == self.study and saved["cell"] == cell
            rows = [dict(row) for row in saved["rows"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StudyError(f"'{path}' is no finished cell ({error}); delete it, and it is measured again.") from error
        if not matches:
            raise StudyError(f"'{path}' belongs to another cell or study; give another --out.")
        return rows

    def save(self, cell: Cell, rows: list[Row]) -> None:
        path = self._path(cell)
        if path is not None:
            write(path, json.dumps({"study": self.study, "cell": cell, "rows": rows}, ensure_ascii=False))

    def _path(self, cell: Cell) -> Path | None:
        text = json.dumps([self.study, installed_version(), cell], sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:20]
        return None if self.folder is None else self.folder / "cells" / f"{name}.json"


def write(path: Path, text: str) -> None:
    """All of it, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with temporary.open("x", encoding="utf-8") as file:  # for all whom the umask lets read, unlike mkstemp
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise StudyError(f"cannot write '{path}': {error.strerror or error}.") from error
