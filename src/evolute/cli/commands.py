"""Which commands there are, in their order in --help. Each is the function of that name in the file of that name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from evolute import __version__

COMMANDS = ("report", "plot", "study", "verify", "bench", "info")

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"evolute {__version__}")
        raise typer.Exit


def evolute(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A second-order microscope for Transformers: exact curvature, in closed form and of any PyTorch model.

    Start with [bold]evolute report[/bold]: it trains a small Transformer and writes a page on its curvature.

    Then try it on a model of yours, [bold]evolute report --model FOLDER --data FILE[/bold], or check the closed forms
    against automatic differentiation, [bold]evolute verify[/bold]. Every command explains itself with --help.
    """


def _help(function: Callable[..., object]) -> str:
    """Its docstring, with paragraphs as long as the terminal is wide."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


app.callback(help=_help(evolute))(evolute)
for _name in COMMANDS:
    _function = getattr(import_module(f"evolute.cli.{_name}"), _name)
    app.command(help=_help(_function))(_function)
