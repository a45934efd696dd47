"""Which media types an agent takes, as its card says, and which of them a message brings.

A card lists types (`image/png`), ranges (`image/*`, `*/*`), or only the first half of one (`text`), as older cards do.
Parameters of a type (`; charset=utf-8`) do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from msgspec import UNSET

from covenant.model.message import Part

DEFAULT_MODES: Final = ("text/plain", "application/json")  # of a card that lists types for its skills alone
_ALL: Final = "*/*"
_TOKEN: Final = r"[!#$&^_.+\w-]+"
_MODE: Final = re.compile(  # of a range, or of a type by its kind alone: one of those that are registered
    rf"\*(?:/\*)?|{_TOKEN}/(?:\*|{_TOKEN})|application|audio|example|font|haptics|image|message|model|multipart|text|video",
    re.ASCII,
)


def input_modes(card: dict[str, Any]) -> tuple[str, ...]:
    """Return what a published card says that its agent takes: by itself, for one of its skills, or where it is shown to
    known callers. Empty if it says nothing, and then the agent takes everything.
    """
    own: set[str] = set()
    of_skills: set[str] = set()
    for mode, is_of_skill in _modes_in(card):
        (of_skills if is_of_skill else own).add(_range_of(mode))
    if of_skills and not own:
        own.update(DEFAULT_MODES)  # which the card is served with
    return tuple(sorted(own | of_skills))


def impossible_mode(card: dict[str, Any]) -> str | None:
    """Return the first of the card's input modes that no part of a message can have, or None."""
    return next((mode for mode, _ in _modes_in(card) if _MODE.fullmatch(_bare(mode)) is None), None)


def _modes_in(card: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the input modes, each with whether it is that of a skill."""
    for shown in (card, card.get("extended") or {}):
        yield from ((mode, False) for mode in shown.get("defaultInputModes") or ())
        for skill in shown.get("skills") or ():
            yield from ((mode, True) for mode in skill.get("inputModes") or ())


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
