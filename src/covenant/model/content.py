"""Content blocks of tasks and results: those of MCP, and `json`.

A block is tagged by its member `type`; an unknown type is malformed. A block is carried whole: a member that has no
field here (one of a later MCP, or a sender's own) comes back as it was sent, and is read in `extra`.

msgspec drops members that a Struct has no field for, and cannot write others beside the fields. So a task or a result
takes its blocks as undecoded JSON, and `read_blocks` decodes them: all at once if every member has a field, as is
usual, else one by one. A block with extra members becomes an instance of a subclass, `TextWithExtra` for a `Text`. Its
last field is the JSON of one member and of the extra members behind it, so every encoder writes them out again:

    {"type":"text","text":"hi","color":"red"}
    TextWithExtra(text="hi", raw_tail=Raw(b'"text","color":"red"'))     # the field `raw_tail` is named `type` in JSON
    {"text":"hi","type":"text","color":"red"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeGuard

from msgspec import Meta, MsgspecError, Raw, Struct, ValidationError, convert, defstruct, field, json, structs


class Block(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Base of the blocks, and of the contents of a resource."""

    @property
    def extra(self) -> dict[str, Any]:
        """The members that have no field, by their names, as a new dict."""
        return {}


class Text(Block, frozen=True, tag="text", tag_field="type", omit_defaults=True, gc=False):
    text: str
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class Json(Block, frozen=True, tag="json", tag_field="type", omit_defaults=True, gc=False):
    value: Any
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class Image(Block, frozen=True, tag="image", tag_field="type", omit_defaults=True, gc=False):
    data: str
    mime_type: str = field(name="mimeType")
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class Audio(Block, frozen=True, tag="audio", tag_field="type", omit_defaults=True, gc=False):
    data: str
    mime_type: str = field(name="mimeType")
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class ResourceContents(Block, frozen=True, omit_defaults=True, gc=False):
    """The embedded resource: `text` or `blob` (base64)."""

    uri: str
    mime_type: str | None = field(default=None, name="mimeType")
    text: str | None = None
    blob: str | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class Resource(Block, frozen=True, tag="resource", tag_field="type", omit_defaults=True, gc=False):
    resource: ResourceContents
    annotations: dict[str, Any] | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


class ResourceLink(Block, frozen=True, tag="resource_link", tag_field="type", omit_defaults=True, gc=False):
    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = field(default=None, name="mimeType")
    size: int | None = None
    annotations: dict[str, Any] | None = None
    icons: list[dict[str, Any]] | None = None
    meta: dict[str, Any] | None = field(default=None, name="_meta")


Content: TypeAlias = Text | Json | Image | Audio | Resource | ResourceLink
BLOCK_TYPES: Final[dict[str, type[Content]]] = {  # by the value of their member `type`
    str(kind.__struct_config__.tag): kind for kind in (Text, Json, Image, Audio, Resource, ResourceLink)
}

if TYPE_CHECKING:
    Blocks: TypeAlias = Sequence[Content]
else:  # msgspec keeps the JSON undecoded, for `read_blocks`
    _SCHEMA: Final = {
        "type": "array",
        "items": {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in BLOCK_TYPES.values()]},
    }
    Blocks = Annotated[Raw, Meta(extra_json_schema=_SCHEMA)]

_decode_without_extra: Final = json.Decoder(tuple[Content, ...]).decode
_decode_members: Final = json.Decoder(tuple[dict[str, Any], ...]).decode


def read_blocks(content: Any) -> Any:
    """Return the content of a task or a result as a tuple of blocks.

    Undecoded JSON comes from the wire or a store: raises msgspec.ValidationError if an element of it is no block. A
    list comes from a program: an element that is no block stays as it is, and is refused when the task or result is
    sent. Anything else is returned unchanged, for the same check.
    """
    if type(content) is Raw:
        try:
            return _decode_without_extra(content)
        except ValidationError:
            return tuple([read_block(members) for members in _decode_members(content)])
    return tuple([_read_if_block(item) for item in content]) if type(content) is list else content


def _read_if_block(item: Any) -> Any:
    if type(item) is not dict:
        return item
    try:
        return read_block(item)
    except MsgspecError:
        return item


def read_block(members: Mapping[str, Any]) -> Content:
    """Read one block from the members of its JSON object. All of them are kept.

    Raises msgspec.ValidationError for an unknown `type`, for a missing member, and for one whose value is of a wrong
    type.
    """
    tag = members.get("type")
    kind = BLOCK_TYPES.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise ValidationError(f"`type` is one of {', '.join(BLOCK_TYPES)}")
    known, extra = _split(members, kind)
    inner = known.get("resource")
    known_inner, extra_inner = _split(inner, ResourceContents) if type(inner) is dict else ({}, {})
    if extra_inner:
        known["resource"] = known_inner
    block = convert(known, kind)
    if isinstance(block, Resource) and extra_inner:
        uri, *others = structs.astuple(block.resource)
        block = structs.replace(block, resource=_CONTENTS_WITH_EXTRA(_tail(uri, extra_inner), *others))
    if extra:
        block = _WITH_EXTRA[kind](*structs.astuple(block), raw_tail=_tail(tag, extra))
    return block


def is_plain_text(block: object) -> TypeGuard[Text]:
    """Return whether this is a text without annotations or other members, as most blocks are."""
    return type(block) is Text and block.annotations is None and block.meta is None


def members_of(block: Block | dict[str, Any]) -> dict[str, Any]:
    """Return the members of a block by their names in JSON, with the extra ones and without its `type`."""
    if isinstance(block, dict):
        return block
    names = zip(block.__struct_encode_fields__, block.__struct_fields__, strict=True)
    members = {name: getattr(block, attribute) for name, attribute in names if attribute != "raw_tail"}
    return {**{name: value for name, value in members.items() if value is not None}, **block.extra}


# --- extra members -----------------------------------------------------------------------------------------

_encode_sorted: Final = json.Encoder(order="sorted").encode


def _split(members: Mapping[str, Any], kind: type[Block]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the members that have a field, and the extra ones."""
    names = {*kind.__struct_encode_fields__, kind.__struct_config__.tag_field}
    known = {name: value for name, value in members.items() if name in names}
    return known, {name: value for name, value in members.items() if name not in names}


def _tail(value: Any, extra: dict[str, Any]) -> Raw:
    """Return the JSON of a member's value and of the extra members, as it stands behind the name of that member."""
    members = _encode_sorted(extra)
    if b"null" in members:
        _check_finite(extra)
    return Raw(_encode_sorted(value) + b"," + members[1:-1])


def _check_finite(value: Any) -> None:
    """Raise ValidationError for an infinity or a not-a-number, which an encoder would make null."""
    if isinstance(value, float) and not isfinite(value):
        raise ValidationError(f"{value} is no number of JSON")
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_finite(inner)


def _members_from(name: str, tail: Raw) -> dict[str, Any]:
    """Return the member of this name and the extra ones from their `_tail`."""
    members: dict[str, Any] = json.decode(b'{"%b":%b}' % (name.encode(), bytes(tail)))
    return members


def _extra_from(name: str, tail: Raw) -> dict[str, Any]:
    members = _members_from(name, tail)
    del members[name]
    return members


def _repr(block: Any) -> str:
    """Show a block under the name of its kind, with its extra members readable."""
    kind: Any = type(block).__base__
    fields = [f"{name}={getattr(block, name)!r}" for name in kind.__struct_fields__]
    return f"{kind.__name__}({', '.join(fields)}, extra={block.extra!r})"


def _unpickled(data: bytes) -> Content:
    return read_block(json.decode(data))


def _unpickled_contents(data: bytes) -> ResourceContents:
    block = _unpickled(data)
    assert isinstance(block, Resource)
    return block.resource


def _with_extra(kind: type[Content]) -> Any:
    """Return the subclass for blocks of this kind with extra members: they follow the member `type`."""
    tail = ("raw_tail", Raw, field(name="type"))
    extra = property(lambda block: _extra_from("type", block.raw_tail))
    return defstruct(
        f"{kind.__name__}WithExtra",
        [tail],
        bases=(kind,),
        namespace={
            "extra": extra,
            "__repr__": _repr,
            "__reduce__": lambda block: (_unpickled, (json.encode(block),)),  # pickle would not find its class
        },
        tag=False,
        tag_field=None,
        kw_only=True,
        frozen=True,
        omit_defaults=True,
        gc=False,
    )


def _contents_with_extra() -> Any:
    """Return the subclass for contents of a resource with extra members.

    Contents have no member `type`, so the extra members follow `uri`: the field holds both as JSON, and the attribute
    `uri` decodes it.
    """
    tail_of: Any = vars(ResourceContents)["uri"].__get__  # reads the field, which the property below hides
    uri = property(lambda contents: _members_from("uri", tail_of(contents))["uri"])
    extra = property(lambda contents: _extra_from("uri", tail_of(contents)))
    return defstruct(
        "ResourceContentsWithExtra",
        [],
        bases=(ResourceContents,),
        namespace={
            "uri": uri,
            "extra": extra,
            "__repr__": _repr,
            "__reduce__": lambda contents: (_unpickled_contents, (json.encode(Resource(contents)),)),
        },
        frozen=True,
        omit_defaults=True,
        gc=False,
    )


_WITH_EXTRA: Final = {kind: _with_extra(kind) for kind in BLOCK_TYPES.values()}
_CONTENTS_WITH_EXTRA: Final = _contents_with_extra()
