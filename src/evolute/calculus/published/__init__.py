"""The theorems as the papers print them, in dense float64 matrices: for comparison, not for speed."""

from evolute.calculus.published import algebra, attention, block, bounds, derivatives, layernorm

__all__ = ["algebra", "attention", "block", "bounds", "derivatives", "layernorm"]
