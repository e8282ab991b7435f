"""Whether Kronecker factors are nearer to the curvature than diagonals; from the table."""

from __future__ import annotations

from collections.abc import Sequence

from evolute.studies.approximations.table import BETTER, CONTESTS, NAMES, WHOLE
from evolute.studies.study import Row, Verdict

WORDS = {"shape": "nearer", "cosine": "steps closer to the true one", "share": "steps that gain more"}
FEW = 0.05  # of the comparisons may go the other way


def judged(table: Sequence[Row]) -> Verdict:
    """Of the single groups of Transformers against H_o: in how many the Kronecker factors are better, and by what."""
    rows = [r for r in table if r["part"] == "contest" and r["reference"] == "H_o" and r["group"] != WHOLE]
    ours = [row for row in rows if not row["model"].startswith("mlp")]
    if not ours:
        return Verdict("undecided", "no Transformer was measured with two seeds or more.")
    counts = {(of, measure): _count(ours, of, measure) for of, _ in CONTESTS for measure in BETTER}
    text = "; ".join(_told(ours, of) for of, _ in CONTESTS) + _whole(table) + _control(rows)
    better, worse, total = (sum(each) for each in zip(*counts.values(), strict=True))
    if worse <= FEW * total and all(b * 2 > n for b, _, n in counts.values()):
        return Verdict("holds", text)
    if 2 * (better + worse) < total:
        return Verdict("undecided", text)
    return Verdict("holds in part" if better > worse else "does not hold here", text)


def _count(rows: Sequence[Row], of: str, measure: str) -> tuple[int, int, int]:
    """(Better, worse, of how many): the interval of the difference is on one side of zero."""
    here = [row for row in rows if (row["of"], row["measure"]) == (of, measure)]
    sign = BETTER[measure]
    better = sum(min(sign * row["ci_low"], sign * row["ci_high"]) > 0 for row in here)
    worse = sum(max(sign * row["ci_low"], sign * row["ci_high"]) < 0 for row in here)
    return better, worse, len(here)


def _told(rows: Sequence[Row], of: str) -> str:
    each = list[str]()
    for measure, words in WORDS.items():
        better, worse, total = _count(rows, of, measure)
        each.append(f"{words} in {better} of {total} (worse in {worse})")
    return f"{NAMES[of]} against the true diagonal, in single blocks of H_o of Transformers: {', '.join(each)}"


def _whole(table: Sequence[Row]) -> str:
    """What each step gains on all weights at once, at the last stage that was measured."""
    wanted = {"part": "mean", "group": WHOLE, "reference": "H_o", "measure": "share"}
    rows = [row for row in table if all(row.get(key) == value for key, value in wanted.items())]
    if not rows:
        return ""
    stage = rows[-1]["stage"]
    told = [
        f"{row['model']} {NAMES[row['approximation']]} {row['value']:.2f} ({row['ci_low']:.2f} to {row['ci_high']:.2f})"
        for row in rows
        if row["stage"] == stage and row["approximation"] in ("kfac", "diagonal")
    ]
    return f"; of the true step's gain on all weights at once ({stage}): {', '.join(told)}"


def _control(rows: Sequence[Row]) -> str:
    mlp = [row for row in rows if row["model"].startswith("mlp")]
    if not mlp:
        return "."
    better, worse, total = (sum(each) for each in zip(*(_count(mlp, "kfac", m) for m in BETTER), strict=True))
    return f"; in an MLP KFAC is better in {better} of {total} of these comparisons, worse in {worse}."
