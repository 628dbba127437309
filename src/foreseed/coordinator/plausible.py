"""Whether a reply can be true: by its order, by what its device declared, and by what the last rounds were like.

Nothing here depends on who else has answered so far, so a round comes to the same whatever the order of its replies.
A reason begins with a few words that replies are counted by; behind a colon stand what was said and what was expected.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from foreseed.coordinator import answers
from foreseed.coordinator.robust import median, sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foreseed.coordinator.coordinator import Rules
    from foreseed.wire import Reply

Recent = npt.NDArray[np.float64]
"""Of each of the last rounds, the medians of its devices: size of differences, base loss, samples."""


class Usual(NamedTuple):
    """The medians of the last rounds' medians."""

    size: float
    base_loss: float
    samples: float


ROUNDS = 16
"""That count as recent; one bad round among them decides nothing."""
HOPELESS = 1000.0
"""Times the loss of guessing, ln(classes): no model that is worth training has such a loss."""
WORSE = 20.0
"""Times the recent loss, or that of guessing: a device with images unlike all others' may well be at five times."""
MORE = 1000.0
"""Times the recent number of samples: a shard so much larger than the others would count for little more anyway."""
LARGER = 100.0
"""Times the recent size of differences: honest devices were seen at five times."""


def doubt(reply: Reply, rules: Rules, declared: int | None, usual: Usual | None) -> str | None:
    """Why a reply that is whole and finite cannot be true; `usual` is what the last rounds were like."""
    if declared is not None and reply.samples != declared:
        return f"samples: {reply.samples} said, {declared} declared when it joined"
    if rules.robust == "none":
        return None
    if usual and reply.samples > (most := MORE * usual.samples):
        return f"samples: {reply.samples} said, expected at most {most:.0f}"
    guessing = log(rules.classes)
    highest = HOPELESS * guessing
    if usual:
        highest = min(highest, WORSE * max(guessing, usual.base_loss))
    if not 0 <= reply.base_loss <= highest:
        return f"base loss: {reply.base_loss:.4g} said, expected 0 to {highest:.4g}"
    (found,) = sizes(answers.differences(reply, rules)[None])
    largest = min(HOPELESS * guessing, LARGER * usual.size) if usual else HOPELESS * guessing
    if found > largest:
        return f"differences: of size {found:.4g}, expected at most {largest:.4g}"
    return None


def usual(recent: Recent) -> Usual | None:
    """What the last rounds were like; None before the first."""
    return Usual(*map(median, recent.T)) if len(recent) else None


def remembered(recent: Recent, replies: Sequence[Reply], rules: Rules) -> Recent:
    """The last rounds with this one."""
    found = sizes(np.stack([answers.differences(reply, rules) for reply in replies]))
    losses, samples = [reply.base_loss for reply in replies], [reply.samples for reply in replies]
    return np.concatenate([recent, [[median(found), median(losses), median(samples)]]])[-ROUNDS:]
