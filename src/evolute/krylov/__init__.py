"""What products with an operator can tell, with error bars."""

from evolute.krylov.block_columns import block_norms
from evolute.krylov.block_table import BlockNorms
from evolute.krylov.eigen_search import eigsh
from evolute.krylov.eigenpairs import Eigenpairs
from evolute.krylov.linear_solve import Solution, solve
from evolute.krylov.one_pass import spectrum
from evolute.krylov.results import Estimate, Estimates, Quantity, Result
from evolute.krylov.sampled_diagonal import diagonal
from evolute.krylov.sketched_trace import trace
from evolute.krylov.spectrum_result import Pooled, Spectra, Spectrum

__all__ = [
    "BlockNorms",
    "Eigenpairs",
    "Estimate",
    "Estimates",
    "Pooled",
    "Quantity",
    "Result",
    "Solution",
    "Spectra",
    "Spectrum",
    "block_norms",
    "diagonal",
    "eigsh",
    "solve",
    "spectrum",
    "trace",
]
