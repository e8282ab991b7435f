"""`evolute verify`: every closed form against automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evolute import __version__
from evolute.cli.json_output import JsonFile, check_writable, emit
from evolute.cli.printing import console, plain
from evolute.verify import Outcome, Statement, registered, run, select
from evolute.zoo.trained import one_thread


def verify(
    seed: Annotated[int, typer.Option(help="Draws the problems; the same seed draws the same ones.", min=0)] = 0,
    trials: Annotated[int, typer.Option(help="Random problems for each statement.", min=1)] = 10,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only statements that contain this text.")] = "",
    as_printed: Annotated[
        bool, typer.Option("--as-printed", help="Also what the papers print and does not hold, at a counterexample.")
    ] = False,
    json_file: JsonFile = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the statements; run none.")] = False,
) -> None:
    """Check every closed form against automatic differentiation, on random sizes, in float64.

    Each line of the table is one statement: what it says, the largest relative error over all trials (for a bound,
    norm/bound − 1: below zero there is room), whether it holds, and the time of one problem either way.

    Exit code: 0 if every statement holds, 1 if one does not, 2 if the command was not understood.

    [bold]evolute verify --only "Theorem 3"[/bold]

    [bold]evolute verify --trials 20 --seed 7[/bold]

    [bold]evolute verify --as-printed --json result.json[/bold]
    """
    chosen = [s for s in select(registered(), only) if as_printed or not s.erratum]
    if not chosen:
        raise typer.BadParameter(f"only errata contain {only!r}; add --as-printed to run them")
    if list_only:
        _list(chosen)
        return
    check_writable(json_file)
    with one_thread():
        outcomes = list(_watched(chosen, seed, trials))
    _report(outcomes, seed, trials, json_file)
    raise typer.Exit(0 if all(outcome.as_expected for outcome in outcomes) else 1)


def _watched(statements: Sequence[Statement[Any]], seed: int, trials: int) -> Iterator[Outcome]:
    """The outcomes, with a bar on the terminal if there is one."""
    terminal = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(statements))
        for statement in statements:
            progress.update(task, description=statement.name)
            yield from run([statement], seed=seed, trials=trials)
            progress.advance(task)


# ---------------------------------------------------------------- what is printed


def _list(statements: Sequence[Statement[Any]]) -> None:
    table = Table("statement", "says", box=None)
    for statement in statements:
        table.add_row(statement.name, statement.says)
    console().print(table)


def _report(outcomes: Sequence[Outcome], seed: int, trials: int, file: Path | None) -> None:
    if emit(_document(outcomes, seed, trials), file):
        console().print(_table(outcomes), _verdict(outcomes), sep="\n")


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("statement", "says", title="Closed forms against automatic differentiation")
    for heading in ("largest error", "", "closed form", "autodiff"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for o in outcomes:
        says = f"{o.says}\n{o.note}" if o.note and not o.erratum else o.says
        times = (_milliseconds(seconds) for seconds in (o.closed_seconds, o.oracle_seconds))
        table.add_row(*(plain(cell) for cell in (o.name, says, _size(o))), _mark(o), *times)
    return table


def _size(outcome: Outcome) -> str:
    """An error that is no number comes from an exception, or from sizes that differ."""
    return f"{outcome.largest_error:.1e}" if math.isfinite(outcome.largest_error) else "cannot be computed"


def _mark(outcome: Outcome) -> str:
    word = "holds" if outcome.holds else "does not hold"
    return f"[{'green' if outcome.as_expected else 'bold red'}]{word}{' (erratum)' if outcome.erratum else ''}[/]"


def _milliseconds(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds * 1e3:.1f} ms"


def _verdict(outcomes: Sequence[Outcome]) -> str:
    failing = [outcome for outcome in outcomes if not outcome.as_expected]
    errata = sum(outcome.erratum for outcome in outcomes)
    if failing:
        names = "; ".join(outcome.name for outcome in failing)
        return f"[bold red]{len(failing)} of {len(outcomes)} not as stated:[/] {plain(names)}."
    shown = f"; {errata} printed statements do not, as listed in the errata" if errata else ""
    return f"[green]All {len(outcomes) - errata} statements hold{shown}.[/]"


def _document(outcomes: Sequence[Outcome], seed: int, trials: int) -> dict[str, Any]:
    """What `--json` writes; null stands for a number that is not finite."""
    return {
        "evolute": __version__,
        "torch": torch.__version__,
        "seed": seed,
        "trials": trials,
        "passed": all(outcome.as_expected for outcome in outcomes),
        "statements": [asdict(outcome) | {"as_expected": outcome.as_expected} for outcome in outcomes],
    }
