"""Which media types an agent takes, as its card says, and which of them a message brings.

A card lists types (`image/png`), ranges (`image/*`, `*/*`), or only the first half of one (`text`), as older cards do.
Parameters of a type (`; charset=utf-8`) do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec import UNSET

from covenant.model.message import Part

DEFAULT_MODES: Final = ("text/plain", "application/json")  # of a card that lists types for its skills alone
_ALL: Final = "*/*"


def input_modes(card: dict[str, Any]) -> tuple[str, ...]:
    """Return what a published card says that its agent takes: by itself, for one of its skills, or where it is shown to
    known callers. Empty if it says nothing, and then the agent takes everything.
    """
    own: set[str] = set()
    of_skills: set[str] = set()
    for shown in (card, card.get("extended") or {}):
        own.update(shown.get("defaultInputModes") or ())
        for skill in shown.get("skills") or ():
            of_skills.update(skill.get("inputModes") or ())
    if of_skills and not own:
        own.update(DEFAULT_MODES)  # which the card is served with
    return tuple(sorted({_range_of(mode) for mode in own | of_skills}))


def refused_type(modes: tuple[str, ...], parts: Iterable[Part]) -> str | None:
    """Return the first media type among the parts that the agent does not take, or None."""
    if not modes or _ALL in modes:
        return None
    for part in parts:
        given = _type_of(part)
        if given and given not in modes and f"{given.partition('/')[0]}/*" not in modes:
            return given
    return None


def _type_of(part: Part) -> str:
    """Text and data say of what type they are. A file that says nothing may be anything."""
    if part.media_type and (said := _bare(part.media_type)):
        return said
    if part.text is not None:
        return "text/plain"
    return "application/json" if part.data is not UNSET else ""


def _range_of(mode: str) -> str:
    bare = _bare(mode)
    return bare if "/" in bare else f"{bare}/*"


def _bare(media_type: str) -> str:
    return media_type.partition(";")[0].strip().lower()
