"""An engine that fits a device: how much memory a run takes there, and what a budget leaves to the engine.

A device loads this module: see `answer.py`.
"""

from __future__ import annotations

from foreseed.engine import BudgetError, Engine, ForeseedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from foreseed.engine import ProgramHead
    from foreseed.wire import Welcome

# Images at once, where a budget does not make it fewer: as many as the widest vector units take side by side. On
# LeNet-5 with 10 % of its weights that is ten times as fast as one by one, in a process 0.4 MB larger.
_BATCH = 16


def fit(program: ProgramHead, welcome: Welcome, samples: int, budget: int | None) -> Engine:
    """An engine for the run in what the budget leaves it; BudgetError says how many bytes it would take."""
    beside = beside_engine(program.n_live, welcome.vectors)
    if program.n_stats:
        # The statistics are those of batches of this size; elsewhere any batch gives the same bits.
        if not welcome.batch:
            raise ForeseedError("the program has BatchNorm and the server gives no batch size; check its experiment")
        engine = Engine(program, min(welcome.batch, samples))
        if budget is not None and engine.planned_bytes + beside > budget:
            raise over_budget(engine.planned_bytes + beside, budget)
        return engine
    if budget is None:
        return Engine(program, _BATCH)
    try:
        # With room for local steps, which orders ask for or do not.
        room = beside_engine(program.n_live, welcome.vectors, local_steps=True)
        return Engine(program, _BATCH, memory_budget=budget - room)
    except BudgetError:
        pass
    try:
        return Engine(program, _BATCH, memory_budget=budget - beside)
    except BudgetError as error:
        raise over_budget(error.needed + beside, budget) from None


def beside_engine(n_live: int, vectors: int, local_steps: bool = False) -> int:
    """Bytes that a device works in beyond its engine's plan.

    Kept: the optimiser's vectors. For a while: replaying an update takes a gradient and the zeros that it is made of;
    local steps take a copy of the values as well. A state is fetched into the vectors themselves, a program before
    there is an engine. Messages pass through on top, one at a time, as they do through the MQTT client.
    """
    vector = 4 * n_live
    return vectors * vector + (3 if local_steps else 2) * vector


def over_budget(needed: int, budget: int) -> BudgetError:
    """The error for a run that takes more than a device may use."""
    return BudgetError(
        f"the run needs at least {needed} bytes here, the budget is {budget}; raise --memory-budget, or prune further",
        needed,
    )
