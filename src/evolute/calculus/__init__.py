"""Second derivatives in closed form."""

from evolute.calculus import published
from evolute.calculus.scalar_attention import scalar_attention

__all__ = ["published", "scalar_attention"]
