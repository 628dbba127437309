"""The engine: programs, forward passes in a fixed piece of memory, directions and updates to the bit."""

from foreseed.engine.errors import BudgetError, ForeseedError, ProgramError, SamplesError, ValuesError
from foreseed.engine.head import ProgramHead
from foreseed.engine.types import SHARED_DEVICE, Directions, Samples

try:
    from foreseed.engine.native import (
        Guard,
        accumulate,
        adam,
        compare,
        direction,
        perturb,
        project,
        quantise,
        rebuild,
        sgd,
    )
    from foreseed.engine.native import NativeEngine as Engine
except ImportError:
    import warnings

    try:
        from foreseed.engine.reference import Guard  # type: ignore[assignment]
        from foreseed.engine.reference import ReferenceEngine as Engine  # type: ignore[assignment]
        from foreseed.engine.reference_rng import (  # type: ignore[assignment]
            accumulate,
            adam,
            compare,
            direction,
            perturb,
            project,
            quantise,
            rebuild,
            sgd,
        )
    except ModuleNotFoundError as missing:
        raise ImportError(
            "foreseed's C engine was not built here, and NumPy, which could stand in for it, is not installed: "
            "install a C compiler and reinstall foreseed, or install numpy"
        ) from missing

    warnings.warn(
        "foreseed's C engine was not built here (no C compiler was found when it was installed): "
        "the NumPy reference serves, with the same results, slowly; install a compiler and reinstall foreseed",
        RuntimeWarning,
        stacklevel=2,
    )

TYPE_CHECKING = False
if TYPE_CHECKING:
    from foreseed.engine.program import Model, Program, load

__all__ = [
    "SHARED_DEVICE",
    "BudgetError",
    "Directions",
    "Engine",
    "ForeseedError",
    "Guard",
    "Model",
    "Program",
    "ProgramError",
    "ProgramHead",
    "Samples",
    "SamplesError",
    "ValuesError",
    "accumulate",
    "adam",
    "compare",
    "direction",
    "load",
    "perturb",
    "project",
    "quantise",
    "rebuild",
    "sgd",
]


def __getattr__(name: str) -> object:
    # Loaded when they are asked for: a device never asks, and saves what they import.
    if name in ("Model", "Program", "load"):
        from foreseed.engine import program

        return getattr(program, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
