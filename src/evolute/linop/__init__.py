"""What a linear operator is."""

from evolute.linop.convert import from_dense, from_matvec, to_dense
from evolute.linop.operator import LinearOperator, SymmetricOperator
from evolute.linop.space import Group, Part, Selection, Space

__all__ = [
    "Group",
    "LinearOperator",
    "Part",
    "Selection",
    "Space",
    "SymmetricOperator",
    "from_dense",
    "from_matvec",
    "to_dense",
]
