"""Every closed form against automatic differentiation: what `evolute verify` runs."""

from evolute.verify import attention, block, bounds, layernorm, oracle, scalar  # each registers its statements
from evolute.verify.run import Outcome, run, select
from evolute.verify.statement import Sampler, Statement, register, registered

__all__ = [
    "Outcome",
    "Sampler",
    "Statement",
    "attention",
    "block",
    "bounds",
    "layernorm",
    "oracle",
    "register",
    "registered",
    "run",
    "scalar",
    "select",
]
