"""How much of everything is measured: all of it when there is time, less of it, evenly, when there is not."""

from __future__ import annotations

from dataclasses import dataclass

GAUSS_NEWTON = 0.65  # of a product with H, in time
MOST_GROUPS = 64  # of which all pairs are measured; more are merged by sublayer, then by layer


@dataclass(frozen=True)
class Schedule:
    """k eigenvalues at an end; probes of each group; probes and steps of the spectrum; layers and Adam or not."""

    ends: int = 10
    probes: int = 4
    spectrum_probes: int = 4
    spectrum_steps: int = 60
    layers: bool = True
    adaptive: bool = True

    def products(self, groups: int, layers: int) -> dict[str, int]:
        """Estimated, by measurement."""
        return {
            "top": 4 * self.ends,
            "outer": 4 * self.ends,
            "blocks": 2 * groups * self.probes,
            "spectrum": self.spectrum_probes * self.spectrum_steps,
            "layers": 12 * layers * self.layers,
            "adaptive": 15 * self.adaptive,
        }

    def cost(self, groups: int, layers: int) -> float:
        """In products with H."""
        n = self.products(groups, layers)
        blocks = n["blocks"] / 2 * (1 + GAUSS_NEWTON)
        return blocks + n["top"] + GAUSS_NEWTON * n["outer"] + n["spectrum"] + n["adaptive"] + n["layers"]


FULL = Schedule()
LEVELS = (
    FULL,
    Schedule(8, 4, 4, 40),
    Schedule(5, 4, 4, 30, layers=False),
    Schedule(3, 4, 4, 20, layers=False, adaptive=False),
)


def schedule(affordable: float, groups: int, layers: int) -> Schedule:
    """The richest that so many products pay for; the poorest if none.

    >>> schedule(float("inf"), 20, 2) == FULL, schedule(0.0, 20, 2).ends
    (True, 3)
    """
    return next((each for each in LEVELS if each.cost(groups, layers) <= affordable), LEVELS[-1])
