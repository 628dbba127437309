"""One colour for each method, the same in every figure, card and table."""

METHODS = {
    "ntk-baffle": ("#0a5cb8", "#3f97d3"),
    "baffle": ("#c23a00", "#e57a38"),
    "fedavg": ("#0b7a46", "#32c194"),
    "ntk-fedavg": ("#a04a90", "#fb95cd"),
    "feddst": ("#b58900", "#e9cd5c"),
    "prunefl": ("#0f9bca", "#a5e4ff"),
    "zerofl": ("#7d7d80", "#8b8c98"),
    "fedtiny": ("#241a70", "#8d80ff"),
    "lotteryfl": ("#7a1045", "#d33f68"),
}
"""Colours on light and on dark paper; they stay apart for the common kinds of colour-blindness (a test measures it)."""

OTHER = ("#4d5866", "#b4bfcc")
"""Of a method that is not in the list."""

SURFACES = {
    "page": ("#f5f7f9", "#0e1319"),
    "paper": ("#ffffff", "#171d25"),
    "ink": ("#1c2430", "#e6eaf0"),
    "muted": ("#5b6675", "#9ca8b6"),
    "line": ("#dfe4ea", "#2c3540"),
    "track": ("#ccd4dd", "#3d4855"),
    "plain": ("#7f8ea3", "#7f8ea4"),
}
"""What is not a method's: page, figure ground, text, lines, the dense bar behind a live one, bars of no method."""

LIGHT = {name: light for name, (light, _) in SURFACES.items()}


def method_colour(method: str) -> str:
    """The colour of a method on light paper."""
    return METHODS.get(method, OTHER)[0]


def variables() -> dict[str, tuple[str, str]]:
    """CSS variables of all colours, each with its light and its dark value."""
    methods = {f"method-{name}": pair for name, pair in METHODS.items()}
    return {**SURFACES, **methods, "method-other": OTHER}


def method_variable(method: str) -> str:
    """The name of a method's CSS variable."""
    return f"method-{method}" if method in METHODS else "method-other"
