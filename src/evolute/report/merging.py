"""Tables of blocks with fewer, larger groups: squares of norms add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evolute.report.analysis import Blocks, Estimate, Matrix
from evolute.report.naming import coarse_name, in_order


def merged(blocks: Blocks, most: int) -> Blocks:
    """With no more than about `most` groups: by sublayer, or by layer."""
    for level in range(3):
        names = [coarse_name(group, level) for group in blocks.groups]
        if len(set(names)) <= most or level == 2:
            return _merged(blocks, names) if level else blocks
    raise AssertionError


def _merged(blocks: Blocks, names: Sequence[str]) -> Blocks:
    groups = in_order(names)
    members = [[i for i, name in enumerate(names) if name == group] for group in groups]
    sizes = tuple(sum(blocks.sizes[i] for i in each) for each in members)
    H, G, F = (_matrix(blocks[name], members) for name in "HGF")
    return Blocks(groups, sizes, H, G, F, blocks.inner, blocks.probes)


def _matrix(matrix: Matrix, members: list[list[int]]) -> Matrix:
    cells = [[_cell(matrix, rows, columns) for columns in members] for rows in members]
    norms = tuple(tuple(cell.value for cell in row) for row in cells)
    errors = tuple(tuple(cell.error for cell in row) for row in cells)
    columns = tuple(_sum([matrix.columns[i] for i in each]) for each in members)
    return Matrix(norms, errors, columns, matrix.square, matrix.trace)


def _cell(matrix: Matrix, rows: list[int], columns: list[int]) -> Estimate:
    """√Σ ‖A_ij‖²."""
    pairs = [(matrix.norms[i][j], matrix.errors[i][j]) for i in rows for j in columns]
    norm = math.sqrt(sum(value**2 for value, _ in pairs))
    error = math.sqrt(sum((value * error) ** 2 for value, error in pairs)) / norm if norm else 0.0
    return Estimate(norm, error)


def _sum(estimates: list[Estimate]) -> Estimate:
    return Estimate(sum(e.value for e in estimates), math.sqrt(sum(e.error**2 for e in estimates)))
