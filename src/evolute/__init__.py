"""evolute: a second-order microscope for Transformers."""

from evolute import calculus, zoo
from evolute.calculus import closed_form, losses
from evolute.engine.groups import groups
from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import EmpiricalFisher, FunctionalHessian, GaussNewton, Hessian
from evolute.errors import (
    CurvatureWarning,
    DataChangedError,
    DataError,
    EvoluteError,
    LossError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    TooLargeError,
    UnknownGroupError,
    VectorError,
)
from evolute.linop import LinearOperator, Part, Space, from_dense, from_matvec, to_dense

__version__ = "0.1.0"

__all__ = [
    "CurvatureWarning",
    "DataChangedError",
    "DataError",
    "EmpiricalFisher",
    "EvoluteError",
    "FunctionalHessian",
    "GaussNewton",
    "Hessian",
    "LinearOperator",
    "Loss",
    "LossError",
    "MissingExtraError",
    "ModelError",
    "NonFiniteError",
    "Objective",
    "Part",
    "Space",
    "TooLargeError",
    "UnknownGroupError",
    "VectorError",
    "calculus",
    "closed_form",
    "from_dense",
    "from_matvec",
    "groups",
    "losses",
    "to_dense",
    "zoo",
]
