"""Times and sizes as people write them: 90s, 5min, 4GB."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from evolute.cli.refusal import refuse

SECONDS = {"": 1, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def size(text: str) -> int:
    """Bytes.

    >>> size("4GB"), size("512 MiB")
    (4000000000, 536870912)
    """
    return int(_quantity(text, BYTES, "--memory: expected a size such as 512MB or 4GB"))


def budget(text: str) -> tuple[float | None, int | None]:
    """(seconds, bytes) of a time, a size, or both.

    >>> budget("90s"), budget("4GB"), budget("5min/4GB")
    ((90.0, None), (None, 4000000000), (300.0, 4000000000))
    """
    time: float | None = None
    memory: int | None = None
    for part in re.split("[/,]", text):
        if _unit(part) in BYTES:
            memory = size(part)
        else:
            time = _quantity(
                part, SECONDS, "--budget: expected a time such as 90s or 5min, a size such as 4GB, or both: 5min/4GB"
            )
    return time, memory


def _unit(text: str) -> str:
    return text.strip().lstrip("0123456789. ").lower()


def _quantity(text: str, units: Mapping[str, int], expected: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    value = float(found[1]) * units.get(found[2], math.nan) if found else math.nan
    if not (value > 0 and math.isfinite(value)):
        refuse(f"{expected}, got {text!r}")
    return value
