"""An analysis in a dozen lines, for a terminal."""

from __future__ import annotations

from evolute.report.advice import advice
from evolute.report.analysis import Analysis
from evolute.report.views import duration
from evolute.report.words import QUESTIONS, UNMEASURED


def summary(analysis: Analysis) -> str:
    """What it is, one line per question, what follows, what it took: plain text."""
    subject = analysis.subject
    lines = [f"{analysis.name}: {subject.model}, {subject.parameters:,} parameters, loss {analysis.point.loss:.3g}"]
    for question in QUESTIONS:
        answer = question.answer(analysis)
        if answer != UNMEASURED:
            lines.append(f"  {question.short + ':':<19}{answer}")
    found = "; ".join(each.title for each in advice(analysis))
    lines.append(f"  {'What follows:':<19}{found or 'nothing that was measured calls for a change'}.")
    lines.append(f"  {'How sure:':<19}{analysis.products:,} products in {duration(analysis.provenance.seconds)}.")
    return "\n".join([*lines, *(f"  Note: {note}" for note in analysis.notes)])
