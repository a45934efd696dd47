"""What stands for the content of an operation: canonical JSON, and the keys and ids that are hashed from it.

A run that starts again finds the work that it has already given out by what that work is, never by a count of what came
before. So equal content must give equal bytes, in every process, release and language, and other content must give
others, whatever member names, kinds and keys a model makes up. (Contract 19.)

Canonical JSON is RFC 8785: members in the order of their UTF-16 units, numbers as ECMAScript writes them (1.0 is `1`).
It parts from the RFC once: an integer keeps its exact digits, where the RFC would round it beyond 2**53 and two inputs
would share a key. From 10**21 on a float has an exponent, so that 10**30 and 1e30 are two inputs, `1000…` and `1e+30`.

The key of a task is hashed from `run:kind:content`, the run as the 16 bytes of its UUID. A kind may hold any text,
colons too, since this can be read in one way only: the run has a fixed length, and a whole JSON text follows one colon
and no other. (A colon of the content stands in an object or in a string. What follows it there closes a brace that it
has not opened, or has its quotes the wrong way round; neither is a JSON text.)

What this form has no room for is hashed in another: a mark, then its parts as a JSON array, then the content. That is
an explicit key (in place of the content), an instance, or a run whose id is not a UUID, with its text as it is. The
mark has no colon after 16 bytes, so nothing makes one form look like the other.
"""

from __future__ import annotations

import hashlib
import uuid
from math import isfinite
from typing import Any, Final

import msgspec
import rfc8785

from covenant.model.error import BadId, Malformed
from covenant.model.limits import CONTENT_DEPTH_MAX, KEY_BYTES_MAX
from covenant.rules.envelope import check_id, check_key

_HASH_BYTES: Final = 16
_MARK: Final = b"covenant.task-key.v1\n"
_PLAIN: Final = frozenset((str, int, bool, type(None)))
_write_plain: Final = msgspec.json.Encoder(order="sorted").encode


def canonical(value: Any) -> bytes:
    """The one way to write this JSON value. Only JSON's own types: a caller turns others into these first."""
    plain = _check(value, CONTENT_DEPTH_MAX)
    try:
        return _write_plain(value) if plain else _write(value)
    except UnicodeEncodeError:
        raise Malformed("a text is not valid Unicode", field="value") from None
    except ValueError:
        raise Malformed("a number has too many digits", field="value") from None


def task_key(run_id: str, kind: str, value: Any, *, key: str | None = None, instance: str | int | None = None) -> str:
    """Under what a run finds this task again. `key` stands in place of the content; `instance` tells apart tasks that
    are meant to be there twice."""
    check_key(run_id, "run_id", KEY_BYTES_MAX)
    if key is not None:
        check_key(key, "key", KEY_BYTES_MAX)
    if instance is not None and type(instance) not in (str, int):
        raise Malformed("an instance is text or a whole number", field="instance")
    name = _utf8(kind, "kind")
    run = _uuid_of(run_id)
    if run is not None and key is None and instance is None:
        return "task:" + _short_hash(b"%b:%b:%b" % (run.bytes, name, canonical(value)))
    parts = canonical([run_id if run is None else str(run), kind, key, instance])
    return "task:" + _short_hash(_MARK + parts + (canonical(value) if key is None else b""))


def task_id(key: str) -> str:
    """The id of the task with this key: whoever knows the one knows the other."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, key))


def content_hash(operation: str, value: Any) -> str:
    """Stands for an operation with this content among all that a run remembers. A JSON string says itself where it
    ends, so the two need nothing between them."""
    _utf8(operation, "operation")
    return _short_hash(canonical(operation) + canonical(value))


def digest_of_input(value: Any) -> str:
    """Stands for the input alone, so that another input under the same explicit key is seen."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _check(value: Any, depth: int) -> bool:
    """Refuses what is not JSON or nested too deep; tells whether all of it is plain. Depth first, so that a list that
    holds itself is refused at once."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is float:
        if not isfinite(value):
            raise Malformed("JSON has no such number", field="value")
        return False
    plain, items = True, value
    if kind is dict:
        for name in value:
            if type(name) is not str:
                raise Malformed("a member name must be text", field="value")
            if not name.isascii():
                plain = False
        items = value.values()
    elif kind is not list and kind is not tuple:
        raise Malformed(f"{kind.__name__} is not a JSON type", field="value")
    if depth == 0 and value:
        raise Malformed(f"a value is nested deeper than {CONTENT_DEPTH_MAX}", field="value")
    for item in items:
        if type(item) not in _PLAIN and not _check(item, depth - 1):
            plain = False
    return plain


def _write(value: Any) -> bytes:
    """Writes what the encoder would write otherwise than the RFC: floats, and member names that it would sort by code
    point."""
    kind = type(value)
    if kind in _PLAIN:
        return _write_plain(value)
    if kind is dict:
        names = sorted(value, key=None if all(map(str.isascii, value)) else _utf16)
        return b"{%b}" % b",".join([_write_plain(name) + b":" + _write(value[name]) for name in names])
    if kind is list or kind is tuple:
        return b"[%b]" % b",".join([_write(item) for item in value])
    return _number(value)


def _number(value: float) -> bytes:
    """As ECMAScript has it. It differs from Python where a number is whole, or has an exponent in one of the two."""
    text = repr(value)
    return rfc8785.dumps(value) if text.endswith(".0") or "e" in text else text.encode()


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be")


def _utf8(text: str, field: str) -> bytes:
    if type(text) is not str:
        raise Malformed(f"{field} must be text", field=field)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{field} is not valid Unicode", field=field) from None


def _uuid_of(run_id: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(check_id(run_id, "run_id"))
    except BadId:
        return None


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).digest()[:_HASH_BYTES].hex()
