"""What is written of one analysis or several, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evolute import __version__
from evolute.cli.folder import filling
from evolute.zoo.extras import extra

FORMATS = ("svg", "png", "pdf")


@dataclass(frozen=True)
class Page:
    """A page that is written, with what it is about."""

    analyses: tuple[Any, ...]
    html: Path
    files: tuple[Path, ...]

    def text(self) -> str:
        from evolute import report

        summaries = [report.summary(analysis).strip() for analysis in self.analyses]
        return "\n\n".join([*summaries, f"The page: {self.html}"])

    def document(self) -> dict[str, Any]:
        """What `--json` writes."""
        reports = [_summary(analysis) for analysis in self.analyses]
        files = [str(file) for file in self.files]
        return {"evolute": __version__, "page": str(self.html), "files": files, "reports": reports}


def write_page(analyses: Sequence[Any], out: Path, formats: Sequence[str]) -> Page:
    """All files of it, or none."""
    from evolute import report

    with filling(out) as folder:
        html = report.write(analyses, folder, overwrite=True, formats=tuple(formats)).relative_to(folder)
        files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return Page(tuple(analyses), out.absolute() / html, tuple(out.absolute() / file for file in files))


def check_drawable() -> None:
    """What draws the page is installed: told before the work, not after it."""
    for package in ("matplotlib", "jinja2"):
        extra(package, package, "Pages")


def was_stopped(analyses: Sequence[Any]) -> bool:
    """By Ctrl-C; what was measured before is on the page."""
    return any("was stopped" in note for analysis in analyses for note in analysis.notes)


def _summary(analysis: Any) -> dict[str, Any]:
    """The numbers that people compare; all others are in report.json."""
    parts = {key: value for key, value in asdict(analysis).items() if key not in ("blocks", "training", "spectrum")}
    spectrum = None if analysis.spectrum is None else asdict(analysis.spectrum)
    if spectrum is not None:
        del spectrum["density"]
    from evolute import report

    return parts | {"spectrum": spectrum, "products": analysis.products, "summary": report.summary(analysis)}
