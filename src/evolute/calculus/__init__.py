"""Second derivatives in closed form: of the sublayers, each alone, and of a whole block."""

from evolute.calculus import losses, published
from evolute.calculus.activations import activation
from evolute.calculus.attention import attention
from evolute.calculus.closed_form import ClosedForm, closed_form
from evolute.calculus.ffn import ffn
from evolute.calculus.normalization import layernorm, rmsnorm
from evolute.calculus.scalar_attention import scalar_attention
from evolute.calculus.scores import softmax

__all__ = [
    "ClosedForm",
    "activation",
    "attention",
    "closed_form",
    "ffn",
    "layernorm",
    "losses",
    "published",
    "rmsnorm",
    "scalar_attention",
    "softmax",
]
