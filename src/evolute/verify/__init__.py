"""Every closed form against automatic differentiation: what `evolute verify` runs."""

from evolute.verify import (  # each registers its statements, in the order in which they are listed
    attention,
    block,
    bounds,
    layernorm,
    losses,
    oracle,
    scalar,
    sequences,
    tokenwise,
    whole_block,
)
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
    "losses",
    "oracle",
    "register",
    "registered",
    "run",
    "scalar",
    "select",
    "sequences",
    "tokenwise",
    "whole_block",
]
