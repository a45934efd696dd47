"""ProtoJSON as it may also be written: members by their names in the proto file, and null for what is not said.

Everybody writes camelCase, and that is read directly. A reader of ProtoJSON has to take the other spelling as well, so
a request that has it is brought into the usual form first. What a client keeps in free-form members is left alone.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import Struct, UnsetType

_BY_PROTO_NAME: Final = re.compile(rb'"[a-z]+(?:_[a-z]+)+"\s*:')
_END_OF_ONE: Final = re.compile(rb'_[a-z]+"\s*:')  # found or not much faster, and hardly ever there


class _Member(Struct, frozen=True):
    name: str  # in JSON
    kind: type[Struct] | None  # of what is in it, where that has members of its own
    takes_null: bool


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
        elif value is not None or member.takes_null:
            found.setdefault(member.name, value if member.kind is None else _usual_in(member.kind, value))
    return found


def _usual_in(kind: type[Struct], value: Any) -> Any:
    return [usual(kind, item) for item in value] if isinstance(value, list) else usual(kind, value)


@cache
def _members_of(kind: type[Struct]) -> dict[str, _Member]:
    hints = get_type_hints(kind)
    known: dict[str, _Member] = {}
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        member = _Member(field.encode_name, _struct_in(hint), UnsetType in get_args(hint))
        known[field.name] = known[field.encode_name] = member
    return known


def _struct_in(hint: Any) -> type[Struct] | None:
    if isinstance(hint, type) and issubclass(hint, Struct):
        return hint
    return next((found for inner in get_args(hint) if (found := _struct_in(inner)) is not None), None)
