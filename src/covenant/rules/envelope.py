"""What a task and a result must look like, and when two of them are the same.

`seal_task` and `seal_result` are the only way in: what they return is complete and within every limit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from math import isfinite
from typing import Any, Final, TypeVar, get_args

import msgspec
from msgspec import UNSET, structs

from covenant.model.agent import AgentId, check_agent
from covenant.model.content import Block, Content, is_plain_text, members_of, read_block
from covenant.model.error import BadCursor, BadId, BlankText, Malformed, SenderMismatch, TooLarge
from covenant.model.limits import Limits
from covenant.model.message import Artifact, Message, Part, Role
from covenant.model.record import SLOT_PREFIX, CacheKey, Key
from covenant.model.repair import DuplicateRisk
from covenant.model.task import Idempotency, Result, Task
from covenant.rules.content import check_block
from covenant.rules.context import Context
from covenant.rules.portable import alike, canonical_base64, is_portable

_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_ENCODER: Final = msgspec.json.Encoder()
_SPEECH: Final[dict[type, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Message, Artifact)
}
_ROLES: Final = get_args(Role)
_ESCAPED_MAX: Final = 6  # bytes that a character of ASCII has in JSON
_AROUND_TEXT_MAX: Final = 256  # bytes of JSON around a text and the ids of its message
_SORTED: Final = msgspec.json.Encoder(order="sorted")
_TIME_MS_MAX: Final = 2**53 - 1
_BLOCKS: Final = "a list of blocks, such as [Text('…')]"


def seal_task(task: Task, by: AgentId | None, ctx: Context) -> Task:
    """The task as it will be kept: id and sender filled in, every field checked."""
    if type(task) is not Task:
        raise Malformed("a task is needed", field="task")
    limits = ctx.limits
    sender = _sender(task, by)
    check_agent(task.recipient, "recipient")
    check_text(task.intent_text, "intent_text", limits.intent_text_bytes_max)
    if task.task_kind is not None:
        check_text(task.task_kind, "task_kind", limits.task_kind_bytes_max)
    if task.idempotency is not None:
        _check_idempotency(task.idempotency, limits)
    task_id = ctx.ids.task() if type(task.id) is str and not task.id else check_id(task.id, "id")
    context_id = task.context_id
    if context_id is not None:
        check_name(context_id, "context_id", limits)
    elif task.message is not None:
        context_id = task_id  # it begins a conversation
    return Task(
        id=task_id,
        sender=sender,
        recipient=task.recipient,
        intent_text=task.intent_text,
        task_kind=task.task_kind,
        parent=None if task.parent is None else check_id(task.parent, "parent"),
        deadline_ms=None if task.deadline_ms is None else check_time(task.deadline_ms, "deadline_ms"),
        idempotency=task.idempotency,
        content=() if task.content == () else seal_content(task.content, limits),
        not_before_ms=None if task.not_before_ms is None else check_time(task.not_before_ms, "not_before_ms"),
        message=None if task.message is None else seal_spoken(task.message, "ROLE_USER", limits),
        context_id=context_id,
    )


def _sender(task: Task, by: AgentId | None) -> AgentId:
    sender = task.sender
    if sender is None:
        if by is None:
            raise Malformed("a task sent by nobody in particular must name its sender", field="sender")
        return by
    check_agent(sender, "sender")
    if by is not None and sender.pubkey != by.pubkey:
        raise SenderMismatch(f"{by} cannot send as {sender}", caller=by.display, sender=sender.display)
    return sender


def _check_idempotency(idempotency: Idempotency, limits: Limits) -> None:
    if type(idempotency) is not Idempotency:
        raise Malformed("idempotency must be an Idempotency", field="idempotency")
    if idempotency.duplicate_safety not in ("unsafe", "idempotent"):
        raise Malformed("duplicate_safety is `unsafe` or `idempotent`", field="duplicate_safety")
    check_key(idempotency.key, "idempotency.key", limits.key_bytes_max)


def seal_result(result: Result, limits: Limits) -> Result:
    if type(result) is not Result:
        raise Malformed("a result is needed", field="result")
    if result.status not in ("ok", "error", "partial"):
        raise Malformed("status is `ok`, `error` or `partial`", field="status")
    if result.error_message is not None:
        check_size(result.error_message, "error_message", limits.text_bytes_max)
    if result.sequence is not None and (type(result.sequence) is not int or result.sequence < 1):
        raise Malformed("sequence is a number from 1", field="sequence")
    task_id = check_id(result.task_id, "task_id")
    lease_id = None if result.lease_id is None else check_id(result.lease_id, "lease_id")
    content = () if result.content == () else seal_content(result.content, limits)
    message = None if result.message is None else seal_message(result.message, limits)
    if message is None and content is result.content and task_id is result.task_id and lease_id is result.lease_id:
        return result
    return Result(task_id, result.status, content, result.error_message, lease_id, result.sequence, message)


def seal_message(message: Message, limits: Limits) -> Message:
    """The message as it will be kept: complete, and nobody else's."""
    if type(message) is not Message:
        raise Malformed("a message is needed", field="message")
    check_key(message.message_id, "message.messageId", limits.key_bytes_max)
    if message.context_id == "" or message.task_id == "":  # that is how a reader of ProtoJSON is told of none
        message = structs.replace(message, context_id=message.context_id or None, task_id=message.task_id or None)
    return _seal_speech(message, "message", limits)


def seal_spoken(message: Message, role: Role, limits: Limits) -> Message:
    """Who speaks is told by who came in, whatever the message says."""
    sealed = seal_message(message, limits)
    return sealed if sealed.role == role else structs.replace(sealed, role=role)


def seal_artifact(artifact: Artifact, limits: Limits) -> Artifact:
    if type(artifact) is not Artifact:
        raise Malformed("an artifact is needed", field="artifact")
    check_name(artifact.artifact_id, "artifactId", limits)
    return _seal_speech(artifact, "artifact", limits)


S = TypeVar("S", Message, Artifact)


def _seal_speech(speech: S, field: str, limits: Limits) -> S:
    """Parts that each say one thing; values of the protocol's JSON and no others."""
    if _is_bare_text(speech, limits):
        return speech
    if not isinstance(speech.parts, (list, tuple)) or any(type(part) is not Part for part in speech.parts):
        raise Malformed(f"{field}.parts is a list of parts", field=f"{field}.parts")
    if not speech.parts:
        raise Malformed(f"{field}.parts must not be empty", field=f"{field}.parts")
    if len(speech.parts) > limits.content_blocks_max:
        raise TooLarge(f"{field} has too many parts", field=field, limit=limits.content_blocks_max)
    _check_portable(speech.metadata, field, limits)
    parts = tuple(_seal_part(part, field, limits) for part in speech.parts)
    if parts != speech.parts:
        speech = structs.replace(speech, parts=parts)
    try:
        body = _ENCODER.encode(speech)
        sealed: S = _SPEECH[type(speech)].decode(body)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as wrong:
        raise Malformed(f"{field}: {wrong}", field=field) from None
    if len(body) > limits.content_bytes_max:
        raise TooLarge(f"{field} has {len(body)} bytes", field=field, size=len(body), limit=limits.content_bytes_max)
    return sealed


def _is_bare_text(speech: Message | Artifact, limits: Limits) -> bool:
    """A message of one plain text, as most are. It would read back as it is, and nobody can change it."""
    if type(speech) is not Message or type(speech.parts) is not tuple or len(speech.parts) != 1:
        return False
    part, context_id, task_id = speech.parts[0], speech.context_id, speech.task_id
    if type(part) is not Part or limits.content_blocks_max < 1:
        return False
    text = part.text
    return (
        type(text) is str
        and text.isascii()
        and (len(text) + 3 * limits.key_bytes_max) * _ESCAPED_MAX + _AROUND_TEXT_MAX <= limits.content_bytes_max
        and part.raw is None
        and part.url is None
        and _is_plain(part)
        and speech.metadata is None
        and speech.extensions == speech.reference_task_ids == ()
        and (context_id is None or _is_short(context_id, limits))
        and (task_id is None or _is_short(task_id, limits))
        and speech.role in _ROLES
    )


def _is_short(text: object, limits: Limits) -> bool:
    return type(text) is str and text.isascii() and len(text) <= limits.key_bytes_max


def _seal_part(part: Part, field: str, limits: Limits) -> Part:
    kinds = (part.text is not None) + (part.raw is not None) + (part.url is not None) + (part.data is not UNSET)
    if kinds != 1:
        raise Malformed("a part has one of text, raw, url and data", field=f"{field}.parts")
    _check_portable(part.metadata, field, limits)
    if part.data is not UNSET:
        _check_portable(part.data, field, limits)
    if part.raw is None:
        return part
    raw = canonical_base64(part.raw) if isinstance(part.raw, str) else None
    if raw is None:
        raise Malformed("raw is base64", field=f"{field}.parts.raw")
    return part if raw == part.raw else structs.replace(part, raw=raw)


def _check_portable(value: Any, field: str, limits: Limits) -> None:
    if value is None:
        return
    _check_value(value, limits.content_depth_max)
    if not is_portable(value):
        raise Malformed(f"{field} holds a value too deep, or a number too large, to go over gRPC", field=field)


def check_name(value: str, field: str, limits: Limits) -> str:
    """An id that the other side has chosen: any text that says something."""
    check_key(value, field, limits.key_bytes_max)
    return value


def seal_content(content: Sequence[Content], limits: Limits) -> tuple[Content, ...]:
    """Check blocks against MCP and the limits, and return them as they will be kept."""
    if type(content) is tuple and len(content) == 1 and is_plain_text(content[0]):
        check_size(content[0].text, "content", limits.content_bytes_max)
        return content
    if not isinstance(content, (list, tuple)):
        raise Malformed(f"content is {_BLOCKS}", field="content")
    if len(content) > limits.content_blocks_max:
        raise TooLarge(
            f"content has {len(content)} blocks", field="content", size=len(content), limit=limits.content_blocks_max
        )
    try:
        for block in content:
            if not isinstance(block, Block | dict):
                raise TypeError(f"{type(block).__name__} is no block; it is {_BLOCKS}")
            _check_values([*members_of(block).values()], limits.content_depth_max)
        body = msgspec.json.encode(content)
        sealed = tuple([read_block(members) for members in msgspec.json.decode(body)])
        for block in sealed:
            check_block(block)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as wrong:
        raise Malformed(f"content: {wrong}", field="content") from None
    if len(body) > limits.content_bytes_max:
        raise TooLarge(
            f"content has {len(body)} bytes", field="content", size=len(body), limit=limits.content_bytes_max
        )
    return sealed


def _check_value(value: Any, depth_max: int) -> None:
    _check_values([value], depth_max)


def _check_values(level: list[Any], depth_max: int) -> None:
    """JSON has no infinity and no not-a-number, which an encoder would quietly make null; and what is nested too deep
    could not be read back."""
    depth = 0
    while level:
        if depth > depth_max:
            raise Malformed(f"content is nested deeper than {depth_max}", field="content")
        below: list[Any] = []
        for item in level:
            if isinstance(item, float) and not isfinite(item):
                raise Malformed("content holds a number that JSON does not have", field="content")
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, (list, tuple, set, frozenset)):
                below += item
            elif isinstance(item, Block):
                below += members_of(item).values()
        level, depth = below, depth + 1


def check_json(value: Any, limits: Limits, wrappings: int = 0) -> None:
    """Values of JSON, not nested too deep; `wrappings` are our own around it."""
    _check_value(value, limits.content_depth_max + wrappings)


def check_id(value: str, field: str) -> str:
    """A UUID in its canonical form; capital letters are taken and folded."""
    if type(value) is not str:
        raise BadId(f"{field} must be a UUID", field=field)
    if _UUID.fullmatch(value):
        return value
    folded = value.lower()
    if not _UUID.fullmatch(folded):
        raise BadId(f"{field} must be a UUID", field=field)
    return folded


def check_time(value: int, field: str) -> int:
    if type(value) is not int or not 0 <= value <= _TIME_MS_MAX:
        raise Malformed(f"{field} is Unix time in milliseconds", field=field)
    return value


def check_text(value: str, field: str, limit: int) -> None:
    """Text that must say something."""
    if type(value) is not str or not value.isascii() or len(value) > limit:
        check_size(value, field, limit)
    if not value or value.isspace():
        raise BlankText(f"{field} must not be blank", field=field)


def check_key(value: str, field: str, limit: int) -> None:
    """Text by which something is found again."""
    check_text(value, field, limit)
    if "\0" in value:
        raise _not_writable(field)


def check_asked(value: str, field: str, limit: int) -> None:
    """The same where it is only looked for: what could never have been written is refused, not found missing."""
    check_size(value, field, limit)
    if "\0" in value:
        raise _not_writable(field)


def _not_writable(field: str) -> Malformed:
    """Databases have no NUL in a text."""
    return Malformed(f"{field} must be text without a NUL", field=field)


def check_size(value: str, field: str, limit: int) -> None:
    if type(value) is not str:
        raise Malformed(f"{field} must be text", field=field)
    if value.isascii():
        size = len(value)
    else:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise Malformed(f"{field} is not valid Unicode", field=field) from None
    if size > limit:
        raise TooLarge(f"{field} has {size} bytes, at most {limit} are allowed", field=field, size=size, limit=limit)


def check_risk(value: Any) -> None:
    if value not in get_args(DuplicateRisk):
        raise Malformed("duplicate_risk is `idempotent` or `operator_accepted`", field="duplicate_risk")


def check_flag(value: Any, field: str) -> None:
    if type(value) is not bool:
        raise Malformed(f"{field} is true or false", field=field)


def check_count(value: Any, field: str, limit: int) -> int:
    if type(value) is not int or value < 0:
        raise Malformed(f"{field} is a number from 0", field=field)
    if value > limit:
        raise TooLarge(f"{field} is at most {limit}", field=field, size=value, limit=limit)
    return value


def check_batch(limit: Any, limits: Limits) -> int:
    """How many are taken at once."""
    count = check_count(limit, "limit", limits.batch_max)
    if count < 1:
        raise Malformed("limit is a number from 1", field="limit")
    return count


def check_cursor(cursor: str | None, kind: str) -> int:
    """Where a page begins: a place in the listing that the cursor is of."""
    if cursor is None:
        return 0
    prefix, _, number = cursor.partition(":") if isinstance(cursor, str) else ("", "", "")
    if prefix != kind or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise BadCursor("this cursor does not belong to this listing", cursor=cursor)
    return int(number)


def kind_of(task: Task) -> str:
    """What scopes an idempotency key: the typed kind, or the intent where there is none."""
    return task.intent_text if task.task_kind is None else task.task_kind


def digest_of(task: Task) -> str:
    """Stands for the content of a task: intent, kind, blocks, sender and recipient; not parent, times or id."""
    assert task.sender is not None
    parts: tuple[Any, ...] = (
        task.intent_text,
        task.task_kind,
        task.content,
        task.sender.pubkey,
        task.recipient.pubkey,
    )
    if task.message is not None:
        parts = (*parts, _alike(task.message))
    return hashlib.sha256(_SORTED.encode(parts)).hexdigest()


def digest_of_message(message: Message) -> str:
    return hashlib.sha256(_SORTED.encode(_alike(message))).hexdigest()


def _alike(message: Message) -> Message:
    """As it reads by whichever binding it came: who sends it again may take another."""
    if message.metadata is None and all(_is_plain(part) for part in message.parts):
        return message
    parts = tuple([part if _is_plain(part) else _part_alike(part) for part in message.parts])
    return structs.replace(message, parts=parts, metadata=alike(message.metadata))


def _is_plain(part: Part) -> bool:
    """As most are."""
    return part.data is UNSET and part.metadata is None and part.filename is None and part.media_type is None


def _part_alike(part: Part) -> Part:
    return structs.replace(
        part,
        data=alike(part.data),
        metadata=alike(part.metadata),
        filename=part.filename or None,  # protobuf has no name that is empty
        media_type=part.media_type or None,
    )


def cache_key_of(task: Task) -> CacheKey:
    assert task.sender is not None and task.idempotency is not None
    return CacheKey(task.sender.pubkey, task.recipient.pubkey, kind_of(task), task.idempotency.key)


def slot_key(key: CacheKey) -> Key:
    parts = (key.sender, key.recipient, key.kind, key.key)
    return SLOT_PREFIX + hashlib.sha256(_SORTED.encode(parts)).hexdigest()


def same_answer(one: Result, other: Result) -> bool:
    return (
        one.status == other.status
        and one.error_message == other.error_message
        and one.message == other.message
        and _SORTED.encode(one.content) == _SORTED.encode(other.content)
    )
