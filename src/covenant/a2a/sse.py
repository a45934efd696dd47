"""Server-sent events, as they come off the wire in pieces.

An event counts when the empty line behind it has come. What a cut leaves half said was not said.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from covenant.a2a.fault import BAD_AGENT, Fault

EVENT_BYTES_MAX: Final = 64 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"


class Sent(Struct, frozen=True):
    """One event. `id` is the last that was told, with this event or before it."""

    data: bytes
    id: str | None


class Parser:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of a line that has not ended
        self._data: list[bytes] = []
        self._size = 0
        self._id: str | None = None
        self._is_at_start = True
        self._after_return = False

    def feed(self, chunk: bytes) -> list[Sent]:
        """The events that this completes."""
        if self._after_return and chunk:  # the line ended with the return; a newline here belongs to it
            self._after_return = False
            chunk = chunk.removeprefix(b"\n")
        self._after_return = chunk.endswith(b"\r")
        self._size += len(chunk)
        found: list[Sent] = []
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            self._pieces.append(line)
            whole = b"".join(self._pieces)
            self._pieces.clear()
            self._line(whole, found)
        if rest:
            self._pieces.append(rest)
        if self._size > EVENT_BYTES_MAX:
            raise Fault(BAD_AGENT, f"an event of more than {EVENT_BYTES_MAX} bytes", limit=EVENT_BYTES_MAX)
        return found

    def _line(self, line: bytes, found: list[Sent]) -> None:
        if self._is_at_start:
            self._is_at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                found.append(Sent(b"\n".join(self._data), self._id))
            self._data.clear()
            self._size = 0
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")
        elif not self._data:
            self._size = 0  # comments keep a line open for as long as it takes
