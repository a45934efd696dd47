"""What a task or a result carries: the content blocks of MCP, and `json`.

A block is tagged by `type`, and is carried whole: a member without a field here (of a later MCP, or of nobody's) comes
back as it was sent, in `extra`. An unknown type is malformed.

msgspec drops members that a Struct does not know, and has no way to write them beside its fields. So an envelope takes
its blocks as undecoded JSON, and reads them here: at once where all members are known, as they mostly are, else one by
one. A block with further members is of a subclass that has the JSON of the member `type`, and of all that follows it,
as its last field: every encoder then writes it as it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeGuard

from msgspec import Meta, MsgspecError, Raw, Struct, ValidationError, convert, defstruct, field, json, structs


class Block(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """What all blocks have in common."""

    @property
    def extra(self) -> dict[str, Any]:
        """The members that have no field, as a new dict."""
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
KINDS: Final[dict[str, type[Content]]] = {
    str(kind.__struct_config__.tag): kind for kind in (Text, Json, Image, Audio, Resource, ResourceLink)
}

if TYPE_CHECKING:
    Blocks: TypeAlias = Sequence[Content]
else:  # for msgspec: undecoded JSON, which `blocks_in` reads
    _LIST: Final = {
        "type": "array",
        "items": {"anyOf": [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in KINDS.values()]},
    }
    Blocks = Annotated[Raw, Meta(extra_json_schema=_LIST)]

_all_known: Final = json.Decoder(tuple[Content, ...]).decode
_any: Final = json.Decoder(tuple[dict[str, Any], ...]).decode


def blocks_in(content: Any) -> Any:
    """Reads the blocks of an envelope: undecoded, or a list of them. Raises ValidationError for what is no block.

    In what a program gives, that which cannot be read is left: it is refused when the envelope is sent.
    """
    if type(content) is Raw:
        try:
            return _all_known(content)
        except ValidationError:
            return tuple([read_block(members) for members in _any(content)])
    return tuple([_read_or_left(item) for item in content]) if type(content) is list else content


def _read_or_left(item: Any) -> Any:
    if type(item) is not dict:
        return item
    try:
        return read_block(item)
    except MsgspecError:
        return item


def read_block(members: Mapping[str, Any]) -> Content:
    """Reads one block from the members of its JSON object, and keeps all of them.

    Raises msgspec.ValidationError for an unknown type, a missing member, or a known one of another type.
    """
    tag = members.get("type")
    kind = KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise ValidationError(f"`type` is one of {', '.join(KINDS)}")
    known, more = _parted(members, kind)
    inner = known.get("resource")
    known_inner, more_inner = _parted(inner, ResourceContents) if type(inner) is dict else ({}, {})
    if more_inner:
        known["resource"] = known_inner
    block = convert(known, kind)
    if isinstance(block, Resource) and more_inner:
        uri, *others = structs.astuple(block.resource)
        block = structs.replace(block, resource=_OPEN_CONTENTS(_rest(uri, more_inner), *others))
    if more:
        block = _OPEN[kind](*structs.astuple(block), rest=_rest(tag, more))
    return block


def is_bare(block: object) -> TypeGuard[Text]:
    """Whether this is a text and nothing else, as most blocks are."""
    return type(block) is Text and block.annotations is None and block.meta is None


def members_of(block: Block | dict[str, Any]) -> dict[str, Any]:
    """Returns the members that a block has, by their names in JSON, also those without a field; not its `type`."""
    if isinstance(block, dict):
        return block
    names = zip(block.__struct_encode_fields__, block.__struct_fields__, strict=True)
    members = {name: getattr(block, attribute) for name, attribute in names if attribute != "rest"}
    return {**{name: value for name, value in members.items() if value is not None}, **block.extra}


# --- further members ---------------------------------------------------------------------------------------

_sorted: Final = json.Encoder(order="sorted").encode


def _parted(members: Mapping[str, Any], kind: type[Block]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the members that have a field, and the others."""
    names = {*kind.__struct_encode_fields__, kind.__struct_config__.tag_field}
    known = {name: value for name, value in members.items() if name in names}
    return known, {name: value for name, value in members.items() if name not in names}


def _rest(first: Any, more: dict[str, Any]) -> Raw:
    """The value of a member and the members behind it, as they are written after its name."""
    members = _sorted(more)
    if b"null" in members:
        _check_finite(more)
    return Raw(_sorted(first) + b"," + members[1:-1])


def _check_finite(value: Any) -> None:
    """An encoder makes null of a number that JSON does not have."""
    if isinstance(value, float) and not isfinite(value):
        raise ValidationError(f"{value} is no number of JSON")
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_finite(inner)


def _members_in(name: str, rest: Raw) -> dict[str, Any]:
    members: dict[str, Any] = json.decode(b'{"%b":%b}' % (name.encode(), bytes(rest)))
    return members


def _extra_in(name: str, rest: Raw) -> dict[str, Any]:
    members = _members_in(name, rest)
    del members[name]
    return members


def _shown(block: Any) -> str:
    kind: Any = type(block).__base__
    fields = [f"{name}={getattr(block, name)!r}" for name in kind.__struct_fields__]
    return f"{kind.__name__}({', '.join(fields)}, extra={block.extra!r})"


def _reopened(data: bytes) -> Content:
    return read_block(json.decode(data))


def _reopened_contents(data: bytes) -> ResourceContents:
    block = _reopened(data)
    assert isinstance(block, Resource)
    return block.resource


def _opened(kind: type[Content]) -> Any:
    """Returns the subclass whose blocks have further members: they follow its `type`, in its last field."""
    rest = ("rest", Raw, field(name="type"))
    extra = property(lambda block: _extra_in("type", block.rest))
    return defstruct(
        f"Open{kind.__name__}",
        [rest],
        bases=(kind,),
        namespace={
            "extra": extra,
            "__repr__": _shown,
            "__reduce__": lambda block: (_reopened, (json.encode(block),)),  # pickle would not find its class
        },
        tag=False,
        tag_field=None,
        kw_only=True,
        frozen=True,
        omit_defaults=True,
        gc=False,
    )


def _opened_contents() -> Any:
    """Returns the subclass of contents with further members. They have no `type`: the members follow the uri, in its
    field, and the attribute reads it from there."""
    json_of: Any = vars(ResourceContents)["uri"].__get__
    uri = property(lambda contents: _members_in("uri", json_of(contents))["uri"])
    extra = property(lambda contents: _extra_in("uri", json_of(contents)))
    return defstruct(
        "OpenResourceContents",
        [],
        bases=(ResourceContents,),
        namespace={
            "uri": uri,
            "extra": extra,
            "__repr__": _shown,
            "__reduce__": lambda contents: (_reopened_contents, (json.encode(Resource(contents)),)),
        },
        frozen=True,
        omit_defaults=True,
        gc=False,
    )


_OPEN: Final = {kind: _opened(kind) for kind in KINDS.values()}
_OPEN_CONTENTS: Final = _opened_contents()
