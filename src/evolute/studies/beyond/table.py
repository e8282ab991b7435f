"""What the repeats say together of every measure, and which findings hold of which model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evolute.studies.means import Mean, geometric_mean, mean
from evolute.studies.over_training import TITLES, by_place, told
from evolute.studies.study import Row, Verdict

REFERENCES = {  # the Transformer on labels that a model is compared with: same data, as many parameters
    "gpt_english": "gpt_english",
    "ssm_english": "gpt_english",
    "rwkv_english": "gpt_english",
    "vit_digits": "vit_digits",
    "vit_contrastive": "vit_digits",
    "vit_adversarial": "vit_digits",
}
POSITIVE = ("sharpness", "trace", "frobenius", "rank", "functional", "negative", "loss")  # that differ by factors
SHARES = ("outliers", "concentrated", "slope", "lowest")
ERRORS = ("sharpness_residual", "lowest_residual", "trace_error", "rank_error", "negative_error", "functional_error")
FINDINGS = {
    "outliers": "outliers are few",
    "functional": "H_f is small",
    "concentrated": "curvature is in all parts",
}
AT_LEAST = ("outliers",)  # the other measures are to stay below their limits


def summaries(rows: Sequence[Row]) -> list[Row]:
    """One row per model and step: means over seeds, and paired by seed with the reference at that step."""
    places = by_place([row | _derived(row) for row in rows])
    return [_summary(model, step, here, places.get((REFERENCES.get(model, ""), step), [])) for (model, step), here in
            places.items()]  # fmt: skip


def _derived(row: Row) -> Row:
    """Σ of the top eigenvalues squared over ‖H‖², and the share of the part that has most of ‖H‖²."""
    outliers = sum(value**2 for value in row["top"]) / row["frobenius"] ** 2
    return {"outliers": min(outliers, 1.0), "concentrated": max(row["parts"].values())}


def _summary(model: str, step: int, rows: Sequence[Row], reference: Sequence[Row]) -> Row:
    first = rows[0]
    out: Row = {"model": model, "step": step, "parameters": first["parameters"], "count": len(first["top"])}
    for name in POSITIVE:
        values = [row[name] for row in rows]
        out |= told(name, geometric_mean(values) if min(values) > 0 else mean(values))
    for name in SHARES:
        m = mean([row[name] for row in rows])
        out |= told(name, Mean(m.value, max(m.low, 0.0), min(m.high, 1.0)) if name in FINDINGS else m)
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return {
        **out,
        **{name: max(row[name] for row in rows) for name in ERRORS},
        "accuracy": sum(accuracies) / len(accuracies) if accuracies else None,
        "parts": {part: sum(row["parts"][part] for row in rows) / len(rows) for part in first["parts"]},
        "over_reference": {} if rows == reference else _ratios(rows, reference),
        "slopes": [[row["slope"], row["slope_difference"]] for row in rows],
        "changes": [[row["predicted"], row["change"]] for row in rows if row["change"] is not None],
    }


def _ratios(rows: Sequence[Row], reference: Sequence[Row]) -> dict[str, list[float]]:
    """Measure → value, low and high of its ratio to the reference, seed by seed; {} where fewer than two are there."""
    there = {row["seed"]: row for row in reference}
    pairs = [(row, there[row["seed"]]) for row in rows if row["seed"] in there]
    if len(pairs) < 2:
        return {}
    out = dict[str, list[float]]()
    for name in POSITIVE:
        if all(row[name] > 0 for pair in pairs for row in pair):
            m = geometric_mean([one[name] / other[name] for one, other in pairs])
            out[name] = [m.value, m.low, m.high]
    return out


# ---- the verdict


def judged(row: Row, name: str, limit: float) -> bool | None:
    """Whether a finding holds of a model: all of the interval on one side of the limit, or None."""
    inside, outside = row[f"{name}_low"] >= limit, row[f"{name}_high"] < limit
    if name not in AT_LEAST:
        inside, outside = row[f"{name}_high"] <= limit, row[f"{name}_low"] > limit
    return True if inside else False if outside else None


def verdict(table: Sequence[Row], limits: Mapping[str, float]) -> Verdict:
    """By the models after training that are no references; what is not true of a reference is told beside it."""
    last = max((row["step"] for row in table), default=0)
    trained = [row for row in table if row["step"] == last]
    new = [row for row in trained if REFERENCES.get(row["model"]) != row["model"]]
    answers = [judged(row, name, limit) for name, limit in limits.items() for row in new]
    if not answers or not last:
        return Verdict("undecided", "no recurrent model and no other loss was measured after training, with two seeds.")
    if all(answers):
        answer = "holds"
    elif any(answers):
        answer = "holds in part"
    else:
        answer = "does not hold here" if answers.count(False) > len(answers) / 2 else "undecided"
    parts = [_finding(name, limit, trained) for name, limit in limits.items()]
    return Verdict(answer, f"{'; '.join(parts)} (95 % intervals over seeds). {slopes_told(table)}")


def _finding(name: str, limit: float, trained: Sequence[Row]) -> str:
    """A finding, whom it holds of, whom not, and the numbers of those whom not."""
    groups = {True: list[str](), False: list[str](), None: list[str]()}
    for row in trained:
        groups[judged(row, name, limit)].append(f"{_title(row['model'])} {_interval(row, name)}")
    words = {True: "yes of", False: "no of", None: "undecided of"}
    told_ = "; ".join(f"{words[key]} {', '.join(names)}" for key, names in groups.items() if names)
    bound = f"{_measure(name, trained[0]['count'])} {'≥' if name in AT_LEAST else '≤'} {limit:g}"
    return f"{FINDINGS[name]} ({bound}): {told_}"


def _measure(name: str, count: int) -> str:
    measures = {
        "outliers": f"share of ‖H‖² in {count} eigenvalues",
        "functional": "‖H_f‖/‖H‖",
        "concentrated": "share of ‖H‖² in the largest part",
    }
    return measures[name]


def slopes_told(table: Sequence[Row]) -> str:
    """How far the exact slopes are from finite differences, and how well they tell what training does to λ_max."""
    errors = sorted(abs(a - b) / max(abs(a), abs(b), 1e-12) for row in table for a, b in row["slopes"])
    changes = [pair for row in table for pair in row["changes"]]
    right = sum(a * b > 0 for a, b in changes)
    if not errors:
        return "No slope of λ_max was measured."
    signs = f", and gives the sign of what the next steps did to λ_max in {right} of {len(changes)} cases"
    return (
        "The slope of λ_max by third derivatives is that of finite differences to "
        f"{errors[len(errors) // 2]:.0e} in the median and {errors[-1]:.0e} at worst{signs if changes else ''}."
    )


def _title(model: str) -> str:
    return TITLES.get(model, model)


def _interval(row: Row, name: str) -> str:
    m = Mean(row[name], row[f"{name}_low"], row[f"{name}_high"])
    return f"{m.value:.2f} [{m.low:.2f}, {m.high:.2f}]"
