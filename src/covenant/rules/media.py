"""Media types: those that an agent's card says it takes, compared with those of a message's parts.

A card lists types (`image/png`), ranges (`image/*`, `*/*`), or only the first half of a type (`text`), as older cards
do. Parameters of a type (`; charset=utf-8`) do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from msgspec import UNSET

from covenant.model.message import Part

DEFAULT_MODES: Final = ("text/plain", "application/json")  # served in a card that lists none for the agent itself
_ALL: Final = "*/*"
_TOKEN: Final = r"[!#$&^_.+\w-]+"
_MODE: Final = re.compile(  # of a range, or of a type by its kind alone: one of those that are registered
    rf"\*(?:/\*)?|{_TOKEN}/(?:\*|{_TOKEN})|application|audio|example|font|haptics|image|message|model|multipart|text|video",
    re.ASCII,
)


def input_modes(card: dict[str, Any]) -> tuple[str, ...]:
    """Return the types and ranges that a published card lists, for the agent, for a skill, or in its `extended` part.

    Empty if it lists none: then the agent takes every type.
    """
    own: set[str] = set()
    of_skills: set[str] = set()
    for mode, is_of_skill in _modes_in(card):
        (of_skills if is_of_skill else own).add(_range_of(mode))
    if of_skills and not own:
        own.update(DEFAULT_MODES)  # the served card has them
    return tuple(sorted(own | of_skills))


def impossible_mode(card: dict[str, Any]) -> str | None:
    """Return the first of the card's input modes that no part of a message can have, or None."""
    return next((mode for mode, _ in _modes_in(card) if _MODE.fullmatch(_without_parameters(mode)) is None), None)


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
    """Return the type of a part, or an empty string for a file without one, which may be of any type."""
    if part.media_type and (said := _without_parameters(part.media_type)):
        return said
    if part.text is not None:
        return "text/plain"
    return "application/json" if part.data is not UNSET else ""


def _range_of(mode: str) -> str:
    media_type = _without_parameters(mode)
    return media_type if "/" in media_type else f"{media_type}/*"


def _without_parameters(media_type: str) -> str:
    return media_type.partition(";")[0].strip().lower()
