"""What a device may be called: in topics, certificates and files."""

from __future__ import annotations

_PUNCTUATION = "._-"


def is_name(name: str) -> bool:
    """Whether it is 1 to 64 letters, digits, dots, dashes and underscores, and a letter or digit first."""
    plain = name.translate(dict.fromkeys(map(ord, _PUNCTUATION)))
    return name.isascii() and 0 < len(name) <= 64 and name[0] not in _PUNCTUATION and plain.isalnum()
