"""Numbers as a reader wants them: three digits, a unit, and the spread where there is one.

The spaces inside a number do not break, so that it never ends one line and begins the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from foreseed.report.arms import Stat

NONE = "–"
"""Stands for a number that was not measured."""

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def percent(stat: Stat | None) -> str:
    """A fraction as `93.4 ± 0.5 %`."""
    if stat is None:
        return NONE
    return f"{_plus_minus(stat, 100, 1)}\u00a0%"


def amount(stat: Stat | None, unit: str = "") -> str:
    """A large number with its prefix, such as `1.24 ± 0.03 TFLOP` or `412 kB`."""
    if stat is None:
        return NONE
    step = 0
    while step + 1 < len(_PREFIXES) and abs(stat.mean) >= 999.5 * 1000**step:
        step += 1
    scaled = abs(stat.mean) / 1000**step
    whole = step == 0 and stat.mean == round(stat.mean)
    digits = 0 if whole or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{_plus_minus(stat, 1000.0**-step, digits)}\u00a0{_PREFIXES[step]}{unit}".rstrip()


def count(stat: Stat | None) -> str:
    """A count with its thousands apart, such as `6,425`."""
    return NONE if stat is None else _plus_minus(stat, 1, 0)


def ratio(stat: Stat | None) -> str:
    """A ratio with two digits that count, such as `0.0123`, `0.14` or `3.2`."""
    if stat is None:
        return NONE
    digits = 1 - floor(log10(abs(stat.mean))) if stat.mean else 0
    return _plus_minus(stat, 1, min(max(digits, 0), 4))


def duration(stat: Stat | None) -> str:
    """Seconds as `12.3 ms`, `4.2 s`, `3.4 min` or `1.5 h`."""
    if stat is None:
        return NONE
    if stat.mean < 0.1:
        return f"{_plus_minus(stat, 1000, 1)}\u00a0ms"
    for size, unit in ((3600, "h"), (60, "min")):
        if stat.mean >= size:
            return f"{_plus_minus(stat, 1 / size, 1)}\u00a0{unit}"
    return f"{_plus_minus(stat, 1, 1)}\u00a0s"


def listed(names: Sequence[str]) -> str:
    """Names as `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plus_minus(stat: Stat, scale: float, digits: int) -> str:
    text = f"{stat.mean * scale:,.{digits}f}"
    return text if not stat.std else f"{text}\u00a0±\u00a0{stat.std * scale:,.{digits}f}"
