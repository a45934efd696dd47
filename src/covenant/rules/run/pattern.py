"""The names of signals, and the patterns that they fit."""

from __future__ import annotations


def matches(pattern: str, name: str) -> bool:
    """Names have segments between dots: `*` is any one, `**` any one or more; all else is itself."""
    if pattern == name:
        return True
    return "*" in pattern and _match(pattern.split("."), name.split("."))


def _match(pattern: list[str], name: list[str]) -> bool:
    """How far each prefix of the pattern reaches, so that no pattern takes longer than its length times the name's."""
    reach = {0}
    for segment in pattern:
        if segment == "**":
            first = min(reach, default=len(name))
            reach = set(range(first + 1, len(name) + 1))
        else:
            reach = {at + 1 for at in reach if at < len(name) and segment in ("*", name[at])}
        if not reach:
            return False
    return len(name) in reach
