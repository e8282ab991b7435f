"""`evolute plot`: the page and its figures again, from saved reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from evolute.cli.folder import check_output
from evolute.cli.page import FORMATS, check_drawable, write_page
from evolute.cli.refusal import refuse


def plot(
    reports: Annotated[
        list[Path], typer.Argument(metavar="REPORT…", help="report.json of each, or the folder that it is in.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the page goes.")] = Path("evolute-plot"),
    formats: Annotated[str, typer.Option("--format", help=f"Of the figures: {', '.join(FORMATS)}.")] = "svg,png",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page that is there.")] = False,
) -> None:
    """Draw a page from reports that were saved; several are put side by side. Nothing is measured again.

    Side by side shows what changed: before and after training, two models, two data sets.

    [bold]evolute plot evolute-report/report.json --format pdf[/bold]

    [bold]evolute plot before/report.json after/report.json --out comparison[/bold]

    Exit code: 0 if the page is written, 2 if it cannot be (one sentence says why).
    """
    wanted = _formats(formats)
    check_drawable()
    check_output(out, overwrite=overwrite)
    page = write_page([_load(file) for file in reports], out, wanted)
    print(f"The page: {page.html}")


def _formats(text: str) -> tuple[str, ...]:
    given = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if not set(given) <= set(FORMATS):
        refuse(f"--format: expected some of {', '.join(FORMATS)}, separated by commas, got {text!r}")
    return given


def _load(file: Path) -> Any:
    from evolute import report

    if not file.exists():
        refuse(f"there is no '{file}'; expected the report.json of an earlier `evolute report`")
    return report.Analysis.load(file)
