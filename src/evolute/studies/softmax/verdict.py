"""What powers and spreads say of the claim."""

from __future__ import annotations

from collections.abc import Sequence

from evolute.studies.study import Row, Verdict

NEAR = 0.3  # how far a power may be from its theory, beside its interval


COMPARED = {"H_o": "Q,Q, K,K and V,V of H_o", "H": "all blocks of H"}


def judge(table: Sequence[Row]) -> Verdict:
    """Do the powers agree with theory, and is the spread smaller without softmax, before training and after?"""
    powers = [row for row in table if row["quantity"] in ("power", "zero", "lost")]
    wrong = [row for row in powers if not _agrees(row)]
    ratios = [row for row in table if row["quantity"] == "spread ratio" and row["of"] in COMPARED]
    smaller = [_smaller(row) for row in ratios]
    if not ratios:
        answer = "undecided" if not wrong else "does not hold here"
    elif all(smaller):
        answer = "holds in part" if wrong else "holds"
    else:
        answer = "holds in part" if any(smaller) else "does not hold here"
    parts = [_powers_said(powers, wrong), _smaller_said(ratios), *_spreads_said(table)]
    return Verdict(answer, f"{'; '.join(part for part in parts if part) or 'nothing was measured'}.")


def _agrees(row: Row) -> bool:
    if row["quantity"] == "zero":
        return bool(row["value"] == 0)
    if row["quantity"] == "lost":
        return False
    return bool(row["low"] - NEAR <= row["theory"] <= row["high"] + NEAR)


def _powers_said(powers: Sequence[Row], wrong: Sequence[Row]) -> str:
    """How many of the powers, and of the blocks that should be zero, are those of theory."""
    if not powers:
        return ""
    said = f"{len(powers) - len(wrong)} of {len(powers)} powers of σ, zeros among them, are those of theory"
    if not wrong:
        return said
    row = wrong[0]
    came = "lost in rounding" if row["quantity"] == "lost" else f"{row['value']:.3g}"
    came += f", by theory {row.get('theory') or 'no block at all'}"
    return f"{said}; not {row['of']}({row['block']}) of {row['kind']}, {row['wiring']}, depth {row['depth']}: {came}"


def _smaller(ratio: Row) -> bool:
    return bool(ratio["high"] < 1)


def _smaller_said(ratios: Sequence[Row]) -> str:
    """In how many comparisons the blocks are closer to one another."""
    told = list[str]()
    for of, name in COMPARED.items():
        here = [_smaller(row) for row in ratios if row["of"] == of]
        told += [f"{sum(here)} of {len(here)} for {name}"] if here else []
    return f"largest ÷ smallest block is below that with softmax in {', in '.join(told)}" if told else ""


def _spreads_said(table: Sequence[Row]) -> list[str]:
    """Largest ÷ smallest block of H_o for each task, before training and after."""
    rows = [row for row in table if row["quantity"] == "spread" and row["of"] == "H_o"]
    out = list[str]()
    for key in dict.fromkeys((row["task"], row["point"]) for row in rows):
        here = [row for row in rows if (row["task"], row["point"]) == key]
        told = ", ".join(f"{row['kind']} {_number(row)}" for row in here)
        out.append(f"it is, for H_o, {', '.join(key)}: {told}")
    return out


def _number(row: Row) -> str:
    return f"{row['value']:.3g} [{row['low']:.3g}, {row['high']:.3g}]"
