"""From arguments to an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from itertools import zip_longest

import typer
from typer.exceptions import TyperException

from evolute.cli.commands import app
from evolute.cli.refusal import sentence
from evolute.cli.theirs import traceback_wanted
from evolute.errors import EvoluteError

STOPPED = 130  # what a shell reports after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what it cannot do is told in one sentence, with exit code 2. A bug of ours keeps its traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=_with_json_file(given) or ["--help"], prog_name="evolute", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = STOPPED
    except (EvoluteError, TyperException) as error:
        if traceback_wanted():
            traceback.print_exc()
        print(f"evolute: {sentence(error)}", file=sys.stderr)
        code = 2
    if code == STOPPED:
        print("evolute: stopped.", file=sys.stderr)
    raise SystemExit(code if isinstance(code, int) else 0)


def _with_json_file(arguments: list[str]) -> list[str]:
    """`--json` alone writes to standard output, as `--json -` does."""
    out: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:]):
        alone = argument == "--json" and (following is None or _is_option(following))
        out += ["--json", "-"] if alone else [argument]
    return out


def _is_option(argument: str) -> bool:
    return argument.startswith("-") and argument != "-"
