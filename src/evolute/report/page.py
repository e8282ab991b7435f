"""The page: one file, nothing fetched, made from analyses alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from evolute.report.analysis import Analysis
from evolute.report.facts import Fact
from evolute.report.figures import FIGURES, Drawing, Table
from evolute.report.figures.style import inline, variables
from evolute.report.ornament import ornament
from evolute.report.views import COLOURS, comparison, view
from evolute.report.words import QUESTIONS, Question
from evolute.studies import find

SUBSCRIPT = re.compile(r"([λH])_(max|min|o|f|P)\b")
TEMPLATE = Path(__file__).parent / "template"
PAGE = ("#f7f8fa", "#0d1118")
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif'


@dataclass(frozen=True)
class FigureView:
    """A figure in both widths, and what stands beside it."""

    name: str
    title: str
    alt: str
    wide: str
    narrow: str
    table: Table


def page(runs: Sequence[Analysis]) -> str:
    """The whole HTML text."""
    from evolute import __version__

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["maths"] = maths
    return environment.get_template("page.html.j2").render(
        title=runs[0].name if len(runs) == 1 else ", ".join(run.name for run in runs),
        version=__version__,
        variables=_themes(),
        style=_static("style.css"),
        theme_script=_static("theme.js"),
        button_script=_static("button.js"),
        ornament=ornament(),
        runs=[view(run, place) for place, run in enumerate(runs)],
        sections=[_section(question, runs) for question in QUESTIONS],
        comparison=comparison(runs),
        sources="report.json" if len(runs) == 1 else f"{len(runs)} saved analyses",
    )


def maths(text: str) -> str:
    """λ_max and H_o with true subscripts; all else as it is.

    >>> print(maths("λ_max < 2"))
    λ<sub>max</sub> &lt; 2
    """
    marked = SUBSCRIPT.sub(r"\1<sub>\2</sub>", str(escape(text)))
    return Markup(marked.replace("|λ|", '<span class="whole">|λ|</span>'))


def _static(name: str) -> str:
    return (TEMPLATE / name).read_text(encoding="utf-8").strip()


def _themes() -> str:
    light, dark = (_declared(theme) for theme in (0, 1))
    return (
        f":root {{ color-scheme: light; --font: {FONT}; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) "
        f"{{ color-scheme: dark; {dark} }} }}\n"
        f"@media screen {{ :root[data-theme=dark] {{ color-scheme: dark; {dark} }} }}"
    )


def _declared(theme: int) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in (variables(theme) | {"--page": PAGE[theme]}).items())


def _section(question: Question, runs: Sequence[Analysis]) -> dict[str, Any]:
    told = [
        {
            "name": run.name,
            "colour": COLOURS[i % len(COLOURS)],
            "answer": question.answer(run),
            "facts": question.facts(run),
        }
        for i, run in enumerate(runs)
    ]
    return {
        "key": question.key,
        "short": question.short,
        "asked": question.asked,
        "meaning": question.meaning,
        "studies": [{"name": name, "claim": find(name).claim} for name in question.studies],
        "runs": told,
        "rows": _rows([question.facts(run) for run in runs]),
        "figures": [_figure(drawing, kept) for drawing in _drawings(question) if (kept := _able(drawing, runs))],
    }


def _rows(facts: Sequence[Sequence[Fact]]) -> list[dict[str, Any]]:
    """Facts of all runs under their names."""
    values = [{fact.name: fact.value for fact in each} for each in facts]
    names = dict.fromkeys(name for each in values for name in each)
    return [{"name": name, "cells": [each.get(name, "–") for each in values]} for name in names]


def _drawings(question: Question) -> list[Drawing]:
    named = {drawing.name: drawing for drawing in FIGURES}
    return [named[name] for name in question.figures]


def _able(drawing: Drawing, runs: Sequence[Analysis]) -> list[Analysis]:
    return [run for run in runs if drawing.there(run)]


def _figure(drawing: Drawing, runs: Sequence[Analysis]) -> FigureView:
    wide, narrow = (inline(drawing.figure(runs, narrow=small), f"{drawing.name}-{small:d}") for small in (False, True))
    return FigureView(drawing.name, drawing.title, drawing.alt(runs), wide, narrow, drawing.table(runs))
