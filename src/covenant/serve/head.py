"""The head of a request, and how one is known again.

A client says the same above each of its requests, but for the length of what follows. The same bytes mean the same
whenever they come: so a connection keeps the last head that it has read, together with what was made of it, and reads
the next one only where that differs.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from covenant.exchange.token import digest_of
from covenant.model.error import Malformed
from covenant.rules.header import OWS, headers_fault

Headers: TypeAlias = list[tuple[bytes, bytes]]

KEPT_BYTES_MAX: Final = 2048  # of a head that is kept: each connection may keep one
_OWS: Final = OWS.encode()
_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length"
_DIGITS_MAX: Final = 8
_LENGTH_LINE: Final = re.compile(rb"\r\ncontent-length: ?([0-9]{1,%d})\r\n" % _DIGITS_MAX, re.IGNORECASE)


class Head(Struct, eq=False):
    """What is made of it is made when it is asked for, and kept."""

    method: str
    path: str
    query: bytes
    headers: Headers
    local: str | None = None  # the address of ours at which it came in
    fault: Malformed | None = None  # the refusal, if its headers are ambiguous
    meaning: Any = None  # what a surface has found in it
    token: str | UnsetType | None = UNSET  # the digest of the bearer token, once somebody has read it

    def read_token(self) -> str | None:
        said = bearer(self.headers)
        self.token = None if not said else digest_of(said)
        return self.token


def read_head(
    method: str, path: str, query: bytes, headers: Headers, local: str | None, http_version: str = "1.1"
) -> Head:
    """Return the head with its header values trimmed, and with the reason to refuse it, if there is one.

    The parser leaves white space behind a value, which is no part of it (RFC 9110, 5.5).
    """
    trimmed = [(name, value.strip(_OWS)) for name, value in headers]
    by_name = dict(trimmed)
    fault = None
    if len(by_name) != len(trimmed) or b"host" not in by_name:  # seldom: nothing is decoded for a usual request
        fault = headers_fault([name.decode("latin-1") for name, _ in trimmed], needs_host=http_version == "1.1")
    return Head(method, path, query, trimmed, local, fault)


class Known(Struct, frozen=True, eq=False):
    """A head as it came, around the length of the body; `after` is None where there was no body."""

    head: Head
    before: bytes
    after: bytes | None

    def body_of(self, data: bytes) -> bytes | None:
        """Of one request under this head that came whole and alone; None for anything else."""
        after = self.after
        if after is None:
            return b"" if data == self.before else None
        start = len(self.before)
        end = data.find(b"\r", start, start + _DIGITS_MAX + 1)
        if end < 0 or not data.startswith(self.before) or not data.startswith(after, end):
            return None
        digits, body = data[start:end], data[end + len(after) :]
        return body if digits.isdigit() and int(digits) == len(body) else None


def known(head: Head, data: bytes, body_bytes: int, head_bytes_max: int) -> Known | None:
    """This head, from one request that came whole and alone; None where it could not be told from another one, or is
    not worth the room."""
    end = data.find(_END) + len(_END)
    if not len(_END) <= end == len(data) - body_bytes or end + _DIGITS_MAX > min(head_bytes_max, KEPT_BYTES_MAX):
        return None
    above = data[:end]
    lengths = above.lower().count(_LENGTH)
    if not lengths:
        return Known(head, above, None)
    line = _LENGTH_LINE.search(above)
    if line is None or lengths > 1:
        return None
    head.headers = [header for header in head.headers if header[0] != _LENGTH]  # the next one has another
    return Known(head, above[: line.start(1)], above[line.end(1) :])


def bearer(headers: Headers) -> str | None:
    token = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token_bytes = value.partition(b" ")
            if scheme.lower() == b"bearer":
                token = token_bytes.strip().decode("latin-1")
    return token
