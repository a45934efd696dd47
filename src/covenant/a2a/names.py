"""ProtoJSON as it may also be written: members by their names in the proto file, null for what is not said, numbers in
strings, enumerations by their numbers.

Everybody writes camelCase, and that is read directly. A reader of ProtoJSON has to take the other spellings as well, so
a request that has them is brought into the usual form first. What a client keeps in free-form members is left alone.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, UnsetType

INT32: Final = 32
INT64: Final = 64
_NUMBER: Final = re.compile(
    r"(-?(?:0|[1-9][0-9]{0,39}))(?:\.([0-9]{1,40}))?(?:[eE]([+-]?[0-9]{1,4}))?"
)  # as JSON has it
_BY_PROTO_NAME: Final = re.compile(rb'"[a-z]+(?:_[a-z]+)+"\s*:')
_END_OF_ONE: Final = re.compile(rb'_[a-z]+"\s*:')  # found or not much faster, and hardly ever there


def whole(value: float | str, bits: int) -> int:
    """Return the integer that ProtoJSON means: a number, or a number in a string, also with a fraction of nothing or an
    exponent. Raise ValueError if it is none, or does not fit."""
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value)
        if found is None:
            raise ValueError("this is no number")
        number = _exactly(found[1], found[2] or "", int(found[3] or 0))
    elif isinstance(value, float):
        if not value.is_integer():
            raise ValueError("this is no whole number")
        number = int(value)
    else:
        number = value
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise ValueError(f"this is no number of {bits} bits")
    return number


def _exactly(digits: str, fraction: str, exponent: int) -> int:
    """Return the value of a decimal, if it has no fraction."""
    fraction = fraction.rstrip("0")
    places = exponent - len(fraction)
    significant = f"{digits}{fraction}"
    if int(significant) == 0:
        return 0
    if places < 0:
        cut = significant[places:]
        if len(cut) < -places or cut.strip("0"):
            raise ValueError("this is no whole number")
        return int(significant[:places] or "0")
    if places > 40:
        raise ValueError("this number is too large")
    return int(significant + "0" * places)


class _Member(Struct, frozen=True):
    name: str  # in JSON
    kind: type[Struct] | None  # of what is in it, where that has members of its own
    takes_null: bool
    is_whole: bool  # a number without a fraction
    names: tuple[str, ...]  # of an enumeration, by their numbers from 1


def has_proto_names(data: bytes | memoryview) -> bool:
    return _END_OF_ONE.search(data) is not None and _BY_PROTO_NAME.search(data) is not None


def usual(kind: type[Struct], members: Any) -> Any:
    """The same request with the usual names, without what says nothing."""
    if not isinstance(members, dict):
        return members
    known = _members_of(kind)
    found: dict[str, Any] = {}
    for name, value in members.items():
        member = known.get(name)
        if member is None:
            found[name] = value
            continue
        told = _usual_in(member, value)
        if told is not None or member.takes_null:
            found.setdefault(member.name, told)
    return found


def _usual_in(member: _Member, value: Any) -> Any:
    kind = member.kind
    if kind is not None:
        return [usual(kind, item) for item in value] if isinstance(value, list) else usual(kind, value)
    if (member.is_whole or member.names) and isinstance(value, str | float):
        with suppress(ValueError):  # else it is left as it is, and refused with its place
            value = whole(value, INT32)
    if member.names and type(value) is int and 0 <= value <= len(member.names):
        return member.names[value - 1] if value else None
    return value


@cache
def _members_of(kind: type[Struct]) -> dict[str, _Member]:
    hints = get_type_hints(kind, include_extras=True)
    known: dict[str, _Member] = {}
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        kinds = get_args(hint)
        is_whole = str not in kinds and any(int in (inner, *get_args(inner)) for inner in kinds)
        member = _Member(field.encode_name, _struct_in(hint), UnsetType in kinds, is_whole, _names_in(hint))
        known[field.name] = known[field.encode_name] = member
    return known


def _names_in(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    for inner in get_args(hint):
        if isinstance(inner, Meta) and inner.extra:
            return tuple(inner.extra.get("names", ()))
        if found := _names_in(inner):
            return found
    return ()


def _struct_in(hint: Any) -> type[Struct] | None:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for inner in get_args(hint) if (found := _struct_in(inner)) is not None), None)
