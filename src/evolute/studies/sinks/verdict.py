"""What the means under sinks say of the claim, one finding at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evolute.studies.study import Row, Verdict

EXACT = 1e-9  # relative to the largest eigenvalue
NEAR = 0.1  # how far a rate may be from its theory, beside its own interval: relative to it
EFFECTS = (  # quantity of the table, what it is called, and where it should go
    ("bulk ratio", "bulk of queries and keys", -1),
    ("whole ratio", "bulk of all parameters", -1),
    ("top ratio", "λ_max", 1),
)


@dataclass(frozen=True)
class Finding:
    """One part of the claim, and whether it came out."""

    holds: bool
    text: str


def judge(table: Sequence[Row]) -> Verdict:
    """Every part of the claim for which there are numbers."""
    theory, effects = [*_formula(table), *_rates(table)], _effects(table)
    right = [finding.holds for finding in theory]
    held = [finding.holds for finding in effects]
    if not held:
        answer = "undecided" if all(right) else "does not hold here"
    elif all(right) and all(held):
        answer = "holds"
    else:
        answer = "holds in part" if any(held) else "does not hold here"
    text = "; ".join(finding.text for finding in (*theory, *effects) if finding.text)
    return Verdict(answer, f"{text}." if text else "nothing was measured under a sink.")


def find(table: Sequence[Row], quantity: str) -> list[Row]:
    return [row for row in table if row["quantity"] == quantity]


def _formula(table: Sequence[Row]) -> list[Finding]:
    return [
        Finding(
            row["value"] <= EXACT,
            f"formula and automatic differentiation differ by {row['value']:.0e} of λ_max at most "
            f"({row['points']} spectra)",
        )
        for row in find(table, "formula error")
    ]


def _rates(table: Sequence[Row]) -> list[Finding]:
    """The bulk of random scalar attention, and the condition number at a fixed product, have rates by theory."""
    told = {
        "bulk ∝ e^(a·b) at large b": [row for row in find(table, "bulk rate") if _scalar_at_random(row)],
        "condition number ∝ ‖w‖^a at fixed w_Q·w_K": [row for row in find(table, "condition rate") if row["theory"]],
    }
    return [
        Finding(all(map(_agrees, rows)), f"{name} with a = {' / '.join(map(_number, rows))}, by theory {_theory(rows)}")
        for name, rows in told.items()
        if rows
    ]


def _effects(table: Sequence[Row]) -> list[Finding]:
    """Under the strongest sink: is the bulk smaller, is λ_max larger, beyond the interval? For each subject."""
    out = list[Finding]()
    for quantity, name, sign in EFFECTS:
        judged = [row for row in find(table, quantity) if row["subject"] != "scalar" or _scalar_at_random(row)]
        for subject in dict.fromkeys(row["subject"] for row in judged):
            rows = [row for row in judged if row["subject"] == subject]
            rows = [row for row in rows if row["sink"] == max(each["sink"] for each in rows)]
            out += [Finding(_moved(row, sign), "") for row in rows[:-1]]
            said = "bulk" if subject == "scalar" and name.startswith("bulk") else name
            out.append(Finding(_moved(rows[-1], sign), f"{_title(rows)}: {said} ×{' / '.join(map(_number, rows))}"))
    return out


def _scalar_at_random(row: Row) -> bool:
    """At a minimum scalar attention has no bulk, and what a sink does to it there is another question."""
    return bool(row["subject"] == "scalar" and row["point"] == "random")


def _moved(row: Row, sign: int) -> bool:
    return bool(row["low"] > 1 if sign > 0 else row["high"] < 1)


def _title(rows: Sequence[Row]) -> str:
    """What the numbers belong to, and under which sink."""
    several = [f"{row['first']:g}" if row["first"] is not None else row["point"] for row in rows]
    which = f"|x₁| = {' / '.join(several)}" if rows[0]["first"] is not None else " / ".join(several)
    return f"{rows[0]['subject']} at b = {rows[0]['sink']:g} ({which})"


def _theory(rows: Sequence[Row]) -> str:
    return " / ".join(dict.fromkeys(f"{row['theory']:g}" for row in rows))


def _number(row: Row) -> str:
    return f"{row['value']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"


def _agrees(row: Row) -> bool:
    reach = NEAR * abs(row["theory"])
    return bool(row["low"] - reach <= row["theory"] <= row["high"] + reach)
