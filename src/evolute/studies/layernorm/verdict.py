"""Whether the law holds, and whether the place of the norm decides; from the table."""

from __future__ import annotations

from collections.abc import Sequence

from evolute.studies.study import Row, Verdict


def judged(table: Sequence[Row]) -> Verdict:
    """The law first: without it there is nothing that the depth could follow from."""
    laws = [row for row in table if row["part"] == "law" and row["theory"] is not None]
    if not laws:
        return Verdict("undecided", "no exponent of the law could be fitted; it takes two sizes σ far from √ε.")
    off = [row for row in laws if not agrees(row)]
    told = f"{len(laws) - len(off)} of {len(laws)} exponents agree with the law"
    if len(off) * 2 > len(laws):
        return Verdict("does not hold here", f"{told}; {_worst(off)}.")
    depths = [sentence for gain in _gains(table) if (sentence := _depth(table, gain))]
    text = "; ".join([told + (f" ({_worst(off)})" if off else ""), *(text for _, text in depths)])
    decided = [decides for decides, _ in depths]
    if not decided:
        return Verdict("undecided", f"{text}; depth was not measured for norms of both kinds.")
    return Verdict("holds" if all(decided) and not off else "holds in part", f"{text}.")


def agrees(row: Row) -> bool:
    """Within its own interval and what is allowed beside it."""
    return bool(row["ci_low"] - row["near"] <= row["theory"] <= row["ci_high"] + row["near"])


def _worst(off: Sequence[Row]) -> str:
    row = max(off, key=lambda row: abs(row["exponent"] - row["theory"]))
    where = f"{row['quantity']} of a {row['source']}, {row['norm']}, {row.get('place', row['range'])}"
    return f"the farthest is {where}: {row['exponent']:.2f} instead of {row['theory']:g}"


def _gains(table: Sequence[Row]) -> list[float]:
    return sorted({row["gain"] for row in table if row["part"] == "training"})


def _depth(table: Sequence[Row], gain: float) -> tuple[bool, str] | None:
    """At the largest depth: do all models with norms before the sublayer learn, and less than half of the others?"""
    runs = [row for row in table if row["part"] == "training" and row["gain"] == gain]
    deepest = max(row["depth"] for row in runs)
    found = {row["norm"]: row for row in runs if row["depth"] == deepest}
    before, others = ([found[n] for n in names if n in found] for names in (("pre", "rms"), ("post", "none")))
    if not before or not others:
        return None
    counts = ", ".join(f"{norm} in {row['learnt']} of {row['seeds']}" for norm, row in found.items())
    decides = all(r["learnt"] == r["seeds"] for r in before) and all(2 * r["learnt"] < r["seeds"] for r in others)
    return decides, f"with gain {gain:g}, depth {deepest} is learnt by {counts} seeds{_sharpness(table, gain, deepest)}"


def _sharpness(table: Sequence[Row], gain: float, depth: int) -> str:
    """Post against pre."""
    for row in table:
        if row["part"] == "ratio" and (row["gain"], row["depth"], row["norm"]) == (gain, depth, "post"):
            between = f"{row['ci_low']:.2g} to {row['ci_high']:.2g}"
            return f", post {row['ratio']:.2g} ({between}) times as sharp as pre before training"
    return ""
