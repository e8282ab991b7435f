"""`evolute study`: a claim of the theory, measured."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from evolute import studies
from evolute.cli.json_output import JsonFile, emit, only_json
from evolute.cli.printing import console, plain
from evolute.cli.refusal import refuse
from evolute.errors import StudyError
from evolute.studies import Result

FORMATS = ("svg", "png")


def study(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which one; --list shows them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the studies, a line each, and leave.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; as often as you like.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results go. [default: evolute-study-NAME]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes; 0: in this one. [default: a core each]")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure a claim of the theory on real data, and give a verdict with its uncertainty.

    A study is cut into cells. Each one that is finished is kept in --out: after an interruption, the same command goes
    on where it stopped. The folder gets result.json and the figure.

    [bold]evolute study --list[/bold]

    [bold]evolute study growth --set depths=1,2 --set width=32[/bold]

    Exit code: 0 if the study is finished, whatever its verdict; 2 if it cannot be run (one sentence says why).
    """
    if listed or name is None:
        _list()
        return
    found, folder = studies.find(name), out or Path(f"evolute-study-{name}")
    config = studies.configured(found.config, settings or ())
    _check_free(folder, name)
    with only_json(json_file):
        result = _measured(name, config, folder, workers)
        result.save(folder)
        figures = _draw(result, folder)
    if emit(asdict(result), json_file):
        _print(result, folder, figures)


def _check_free(folder: Path, name: str) -> None:
    """Another result of the same study is replaced, since its cells are kept; nothing else is."""
    path = folder / "result.json"
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["study"]
    except (OSError, ValueError, KeyError, TypeError):
        raise StudyError(f"'{path}' is no result of a study and is left as it is; give another --out.") from None
    if found != name:
        raise StudyError(f"'{path}' is of the study '{found}', not of '{name}'; give another --out.")


def _list() -> None:
    table = Table("study", "claim", "settings", box=None)
    for name in studies.all_names():
        found = studies.find(name)
        table.add_row(name, plain(found.claim), ", ".join(field.name for field in fields(found.config)))
    console().print(table)


def _measured(name: str, config: Any, folder: Path, workers: int | None) -> Result:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        task = progress.add_task(f"{name}: cells")

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        try:
            return studies.run(name, config, out=folder, workers=workers, report=report)
        except KeyboardInterrupt:
            progress.console.print(f"Stopped. The same command goes on where it was; finished cells are in '{folder}'.")
            raise


def _draw(result: Result, folder: Path) -> list[Path]:
    paths = [folder / f"{result.study}.{kind}" for kind in FORMATS]
    with studies.look():
        picture = studies.find(result.study).figure(result.rows, result.settings)
        try:
            for path in paths:
                picture.savefig(path, dpi=160)
        except OSError as problem:
            refuse(f"cannot write to '{folder}': {problem.strerror or problem}")
    return paths


def _print(result: Result, folder: Path, figures: list[Path]) -> None:
    screen = console()
    screen.print(f"[bold]{plain(result.claim)}[/bold]", f"[bold]{result.verdict.answer}[/bold]: ", sep="\n", end="")
    screen.print(plain(result.verdict.sentence))
    for failure in result.failed[:3]:
        screen.print(f"[red]failed[/red] {plain(failure)}")
    screen.print(f"{result.cells - len(result.failed)} of {result.cells} cells, {result.seconds:.0f} s")
    screen.print(f"Table: {folder / 'result.json'}", f"Figure: {figures[0]}", sep="\n")
