"""A tape in fewer passes over memory: the rewrites in the order in which each makes the next one effective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from evolute.engine.diagonals import collapse_diagonals
from evolute.engine.rewriting import drop_dead, drop_noops
from evolute.engine.sums import broadcast_terms, gather_sums
from evolute.engine.tape import Tape


def simplify(tape: Tape, fixed: Callable[[Tensor], bool] = lambda _: True) -> Tape:
    """The same linear map in fewer passes over memory; `fixed` says of which constants the numbers may be looked at."""
    tape = drop_noops(tape, fixed)
    tape = drop_dead(tape)
    tape = collapse_diagonals(tape)
    tape = drop_dead(tape)
    tape = gather_sums(tape)
    tape = broadcast_terms(drop_noops(tape, fixed))
    return drop_dead(tape)
