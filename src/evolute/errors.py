"""Every error that evolute raises on purpose. Each says what was expected, what came, and what to do."""


class EvoluteError(Exception):
    """Base of all errors raised on purpose; nothing of the user's has been changed when one arrives."""


class ModelError(EvoluteError, ValueError):
    """The model cannot be analysed as it is: no trainable parameter, integers, flex_attention."""


class DataError(EvoluteError, ValueError):
    """The batches cannot be used: none, only one pass, or not a batch at all."""


class DataChangedError(DataError):
    """A batch differs from what it was in an earlier pass (shuffling, augmentation): there is no one operator."""


class LossError(EvoluteError, ValueError):
    """The loss is not a pair (scalar sum, number of terms), or it does not depend on the parameters."""


class NonFiniteError(EvoluteError, ArithmeticError):
    """A loss, gradient or product is NaN or infinite; the message names the batch and, where known, the term."""


class VectorError(EvoluteError, ValueError):
    """A vector has the wrong shape, dtype, device or names for the operator."""


class UnknownGroupError(EvoluteError, KeyError):
    """No group or parameter of that name; the message lists near matches."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TooLargeError(EvoluteError, MemoryError):
    """The request needs more memory than there is; the message says how much, and what would fit."""


class CheckpointError(EvoluteError, ValueError):
    """A saved file is damaged, or belongs to other work; the message says in what it differs."""


class MissingExtraError(EvoluteError, ImportError):
    """An optional dependency is needed; the message is the one command that installs it."""


class ReportError(EvoluteError, ValueError):
    """A report cannot be read or written: a foreign or damaged file, output that is there, a folder that is closed."""


class StudyError(EvoluteError, ValueError):
    """A study cannot be run or read: an unknown name or setting, a folder of another study, no cell that worked."""


class DecisionError(EvoluteError, ValueError):
    """A decision cannot be taken from what was given: too few cells to fit, a tolerance that is not positive."""


class CurvatureWarning(UserWarning):
    """Something true but worth knowing: unused parameters, a slower path, an operation that is not smooth."""
