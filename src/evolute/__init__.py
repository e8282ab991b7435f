"""evolute: a second-order microscope for Transformers."""

from evolute import calculus, zoo
from evolute.apps.convergence import Convergence, convergence
from evolute.apps.flow import Flow, flow
from evolute.apps.sample_size import SampleSize, sample_size
from evolute.apps.scaling import Prediction, Scaling, ScalingFit, fit_power_law, fit_scaling
from evolute.apps.taylor import Taylor, taylor
from evolute.calculus import closed_form, losses
from evolute.engine.groups import groups
from evolute.engine.loss import Loss
from evolute.engine.objective import Objective
from evolute.engine.operators import EmpiricalFisher, FunctionalHessian, GaussNewton, Hessian
from evolute.errors import (
    CheckpointError,
    CurvatureWarning,
    DataChangedError,
    DataError,
    DecisionError,
    EvoluteError,
    LossError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    ReportError,
    StudyError,
    TooLargeError,
    UnknownGroupError,
    VectorError,
)
from evolute.krylov import block_norms, diagonal, eigsh, solve, spectrum, trace
from evolute.linop import LinearOperator, Part, Space, from_dense, from_matvec, to_dense

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Convergence",
    "CurvatureWarning",
    "DataChangedError",
    "DataError",
    "DecisionError",
    "EmpiricalFisher",
    "EvoluteError",
    "Flow",
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
    "Prediction",
    "ReportError",
    "SampleSize",
    "Scaling",
    "ScalingFit",
    "Space",
    "StudyError",
    "Taylor",
    "TooLargeError",
    "UnknownGroupError",
    "VectorError",
    "block_norms",
    "calculus",
    "closed_form",
    "convergence",
    "diagonal",
    "eigsh",
    "fit_power_law",
    "fit_scaling",
    "flow",
    "from_dense",
    "from_matvec",
    "groups",
    "losses",
    "sample_size",
    "solve",
    "spectrum",
    "taylor",
    "to_dense",
    "trace",
    "zoo",
]
