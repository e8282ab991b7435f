"""`evolute bench`: what each library takes for the same answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from evolute import __version__
from evolute.cli.bench.libraries import LIBRARIES
from evolute.cli.bench.measure import Row, measure
from evolute.cli.bench.problem import Problem
from evolute.cli.json_output import JsonFile, check_writable, emit
from evolute.cli.peers import PEERS
from evolute.cli.printing import console

SIZES = {True: (32, 1, 32), False: (64, 2, 128)}  # width, layers, sums


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and fewer rounds: some seconds.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Compare with the other libraries that are installed: one product with H, one with G, the largest eigenvalue.

    All times are divided by that of one gradient of the same model. Libraries that need it run with PyTorch's composed
    attention. Every library gets its turn again and again, so that whatever disturbs the machine disturbs all of them.
    Those that are not installed are named, with the line that installs them.

    [bold]evolute bench --quick[/bold]

    [bold]evolute bench --json result.json[/bold]

    Exit code: 0, whoever is faster.
    """
    check_writable(json_file)
    missing = [peer for peer in PEERS if peer.version is None]
    names = [name for name in LIBRARIES if name not in {peer.module for peer in missing}]
    problem = Problem(*SIZES[quick])
    terminal = Console(stderr=True)
    with terminal.status("") if terminal.is_terminal else _Silent() as status:
        unit, rows = measure(problem, names, 5 if quick else 20, status.update)
    if emit(_document(problem, unit, rows), json_file):
        console().print(_table(problem, unit, rows))
        for peer in missing:
            console().print(f"Not installed: {peer.module}. {peer.install}", markup=False)


class _Silent:
    """Where nobody is watching."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, status: str) -> None:
        return None


def _table(problem: Problem, unit: float, rows: list[Row]) -> Table:
    about = f"{problem.size:,} parameters, {len(problem.x)} sums, {torch.get_num_threads()} threads"
    table = Table("library", title=f"In gradients of {unit * 1e3:.2f} ms each ({about})")
    for heading in ("Hessian product", "Gauss-Newton product", "largest eigenvalue", "value"):
        table.add_column(heading, justify="right")
    for row in rows:
        value = row.failure or (f"{row.top_value:.4f}" if row.top_value is not None else "")
        table.add_row(row.library, *map(_ratio, (row.hessian, row.gauss_newton, row.top)), value)
    return table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _document(problem: Problem, unit: float, rows: list[Row]) -> dict[str, Any]:
    return {
        "evolute": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters": problem.size,
        "gradient_seconds": unit,
        "rows": [asdict(row) for row in rows],
        "peers": {peer.module: {"version": peer.version, "install": peer.install} for peer in PEERS},
    }
