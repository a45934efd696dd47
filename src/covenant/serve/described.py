"""Types as they are described: a value that nobody here looks into is any JSON.

Such values are kept as they were written (`msgspec.Raw`), and of those msgspec cannot spell the default. So a struct
that holds some is described by its double, in which they are anything, and may be left out.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

from msgspec import NODEFAULT, UNSET, Raw, Struct, UnsetType, defstruct, field
from msgspec.structs import FieldInfo, fields

from covenant.model.content import Blocks


def described(kind: Any, known: dict[type, type]) -> Any:
    """`known` are those that were asked for before: one struct has one double."""
    if kind is Raw:
        return Any
    if kind is Blocks:  # it brings its own description
        return kind
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _double(kind, known)
    within = get_args(kind)
    told = tuple(described(part, known) for part in within)
    if told == within:
        return kind
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return Any if Any in told else Union[told]  # noqa: UP007  # of parts that are known only here
    return origin[told]


def _double(kind: type[Struct], known: dict[type, type]) -> type:
    if kind not in known:
        known[kind] = kind  # one that holds itself is asked for again before it is answered
        members = fields(kind)
        told = [described(member.type, known) for member in members]
        if any(new is not member.type for new, member in zip(told, members, strict=True)):
            config = kind.__struct_config__
            known[kind] = defstruct(
                kind.__name__,
                [(member.name, new, _default(member)) for new, member in zip(told, members, strict=True)],
                tag=config.tag,
                tag_field=config.tag_field,
                kw_only=True,
                forbid_unknown_fields=config.forbid_unknown_fields,
                namespace={"__doc__": vars(kind).get("__doc__")},
            )
    return known[kind]


def _default(member: FieldInfo) -> Any:
    if member.required:
        return field(name=member.encode_name)
    if isinstance(member.default, (Raw, UnsetType)):
        return field(default_factory=lambda: UNSET, name=member.encode_name)  # it goes without saying
    if member.default is NODEFAULT:
        return field(default_factory=member.default_factory, name=member.encode_name)
    return field(default=member.default, name=member.encode_name)
