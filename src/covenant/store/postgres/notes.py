"""What the daemon that leads leaves to the next one, wherever that runs."""

from __future__ import annotations

from typing import Final

from covenant.store.postgres.reader import Reader

_READ: Final = "select body from note where name = $1"
_WRITE: Final = "insert into note values ($1, $2) on conflict (name) do update set body = $2"


class SharedNotes:
    """Implements `Notes`."""

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self._name = name

    def __str__(self) -> str:
        return f"the note of {self._name} in the database"

    async def read(self) -> bytes | None:
        found = await self._reader.fetch(_READ, self._name)
        return bytes(found[0]["body"]) if found else None

    async def write(self, data: bytes) -> None:
        await self._reader.fetch(_WRITE, self._name, data)
