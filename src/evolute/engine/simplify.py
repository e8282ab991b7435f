"""A tape in fewer passes over memory: the rewrites in the order in which each makes the next one effective."""

from __future__ import annotations

from evolute.engine.diagonals import collapse_diagonals
from evolute.engine.rewriting import drop_dead, drop_noops
from evolute.engine.sums import gather_sums
from evolute.engine.tape import Tape


def simplify(tape: Tape) -> Tape:
    """The same linear map in fewer passes over memory."""
    tape = drop_noops(tape)
    tape = drop_dead(tape)
    tape = collapse_diagonals(tape)
    tape = drop_dead(tape)
    tape = gather_sums(tape)
    return drop_dead(tape)
