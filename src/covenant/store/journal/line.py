"""One line of the journal: one commit, chained to the line before it.

A line is a JSON object whose last member is `hash`: the SHA-256, in hex, of the previous line's hash followed by this
line up to the comma before `"hash"`. The first line of every segment is a header, chained like any other.
docs/journal.md describes the format for readers in other languages.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Struct

from covenant.model.audit import AuditRow, Logged
from covenant.model.error import StoreDamaged, UnsupportedFormat
from covenant.model.event import Event

FORMAT_VERSION: Final = 1
GENESIS: Final = b"0" * 64
_HASH: Final = b',"hash":"'
_END: Final = b'"}\n'
_TAIL: Final = len(_HASH) + 64 + len(b'"}')


class Line(Struct, frozen=True, omit_defaults=True, gc=False):
    """`seq` numbers the first event; a commit without events takes one number all the same. Lines of one `batch` were
    written together, before one sync. `prev` names, for each event, the one that touched its record before."""

    seq: int
    at: int
    batch: int
    events: Sequence[Event]
    by: str = ""
    prev: Sequence[int] = ()
    audit: Sequence[AuditRow] = ()

    @property
    def last(self) -> int:
        return self.seq + max(1, len(self.events)) - 1

    def logged(self) -> Logged:
        return Logged(self.seq, self.at, self.by, self.events, self.prev, self.audit)


class Header(Struct, frozen=True, gc=False):
    """How a segment begins. `prev` is the hash before it; what the previous segment holds beyond
    `prev_bytes` never counted."""

    covenant: str
    version: int
    first: int
    at: int
    batch: int
    prev: str
    prev_file: str | None
    prev_bytes: int


_encoder: Final = msgspec.json.Encoder()
_line_decoder: Final = msgspec.json.Decoder(Line)
_header_decoder: Final = msgspec.json.Decoder(Header)
_version_decoder: Final = msgspec.json.Decoder(dict[str, object])


def encode(line: Line | Header, previous: bytes) -> tuple[bytes, bytes]:
    """The bytes of the line, and its hash."""
    body = _encoder.encode(line)[:-1]
    mark = hexlify(sha256(previous + body).digest())
    return b"".join((body, _HASH, mark, _END)), mark


def chained(raw: bytes, previous: bytes) -> bytes | None:
    """The hash of a line (without its newline) if it is whole and follows `previous`; None if not."""
    if len(raw) <= _TAIL or raw[-_TAIL : -_TAIL + len(_HASH)] != _HASH or raw[-2:] != b'"}':
        return None
    mark = hexlify(sha256(previous + raw[:-_TAIL]).digest())
    return mark if raw[-66:-2] == mark else None


def decode_line(raw: bytes, file: str, number: int) -> Line:
    try:
        return _line_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise StoreDamaged(f"{file}:{number} is not a commit: {wrong}", file=file, line=number) from None


def decode_header(raw: bytes, file: str) -> Header:
    """The version is looked at first: a newer format may have other members."""
    try:
        version = _version_decoder.decode(raw).get("version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{file} has format {version}; this is {FORMAT_VERSION}", file=file, version=version
            )
        return _header_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise StoreDamaged(f"{file}:1 is not a header: {wrong}", file=file, line=1) from None


def batch_of(raw: bytes) -> int | None:
    """The batch of a line that may be damaged or stand after damage; None when it cannot be told."""
    try:
        batch = _version_decoder.decode(raw).get("batch")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return batch if isinstance(batch, int) else None


def split_lines(blocks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each line without its newline, and whether it had one; only the last may lack it."""
    parts: list[bytes] = []  # of the line whose end is not reached yet
    for block in blocks:
        *lines, rest = block.split(b"\n")
        if lines:
            parts.append(lines[0])
            lines[0] = b"".join(parts)
            parts = []
        for line in lines:
            yield line, True
        parts.append(rest)
    if rest := b"".join(parts):
        yield rest, False
