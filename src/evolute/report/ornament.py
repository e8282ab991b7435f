"""An ellipse, its normals, and what they envelop: its evolute, after which the library is called."""

from __future__ import annotations

import math

A, B = 160.0, 112.0  # half axes
NORMALS = 72
LENGTH = 1.9  # of a normal, in radii of curvature: it ends beyond the evolute


def ornament() -> str:
    """As SVG, for decoration only."""
    evolute = _path([_evolute(t) for t in _angles(240)])
    lines = "".join(_normal(t) for t in _angles(NORMALS))
    return (
        '<svg class="ornament" viewBox="-200 -185 400 370" fill="none" stroke="currentColor" aria-hidden="true" '
        f'focusable="false"><g stroke-width=".55" opacity=".26">{lines}</g>'
        f'<ellipse rx="{A:g}" ry="{B:g}" stroke-width="1.2" opacity=".45"/>'
        f'<path d="{evolute}" stroke-width="2.4" opacity=".9"/></svg>'
    )


def _angles(count: int) -> list[float]:
    return [2 * math.pi * i / count for i in range(count)]


def _evolute(t: float) -> tuple[float, float]:
    """The centre of curvature at (a cos t, b sin t)."""
    return (A * A - B * B) / A * math.cos(t) ** 3, (B * B - A * A) / B * math.sin(t) ** 3


def _normal(t: float) -> str:
    x, y = A * math.cos(t), B * math.sin(t)
    u, v = _evolute(t)
    reach = min(1.0 + 34.0 / math.hypot(u - x, v - y), LENGTH)
    return f'<path d="M{x:.1f} {y:.1f}L{x + reach * (u - x):.1f} {y + reach * (v - y):.1f}"/>'


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"
