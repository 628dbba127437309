"""The engine: programs, forward passes in a fixed piece of memory, directions and updates to the bit."""

from foreseed.engine.errors import BudgetError, ForeseedError, ProgramError, SamplesError, ValuesError
from foreseed.engine.program import Model, Program, load
from foreseed.engine.types import SHARED_DEVICE, Directions, Samples

try:
    from foreseed.engine.native import NativeEngine as Engine
    from foreseed.engine.native import accumulate, adam, direction, perturb, project, sgd
except ImportError:
    import warnings

    from foreseed.engine.reference import ReferenceEngine as Engine  # type: ignore[assignment]
    from foreseed.engine.reference import accumulate, adam, direction, perturb, project, sgd  # type: ignore[assignment]

    warnings.warn(
        "foreseed's C engine was not built here (no C compiler was found when it was installed): "
        "the NumPy reference serves, with the same results, slowly; install a compiler and reinstall foreseed",
        RuntimeWarning,
        stacklevel=2,
    )

__all__ = [
    "SHARED_DEVICE",
    "BudgetError",
    "Directions",
    "Engine",
    "ForeseedError",
    "Model",
    "Program",
    "ProgramError",
    "Samples",
    "SamplesError",
    "ValuesError",
    "accumulate",
    "adam",
    "direction",
    "load",
    "perturb",
    "project",
    "sgd",
]
