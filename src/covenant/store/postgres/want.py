"""What a transaction may have to load before a command can be decided: a key, or one of these."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from msgspec import Struct

from covenant.model.record import Key
from covenant.store.postgres.rows import ANSWERS, READY

ANYBODY: Final = "*"
ShelfName: TypeAlias = tuple[bytes, str, frozenset[str] | None]
TAKEN: Final = (READY, ANSWERS)  # from these, somebody takes what stands first


class First(Struct, frozen=True):
    """The first ones on a shelf, locked; of some kinds only, if they are named."""

    shelf: bytes
    name: str
    limit: int
    kinds: frozenset[str] | None = None

    @property
    def place(self) -> ShelfName:
        return self.shelf, self.name, self.kinds

    @property
    def is_plain(self) -> bool:
        """What is ready or answered for one peer, of whatever kind."""
        return self.shelf in TAKEN and self.name != ANYBODY and self.kinds is None


class Fresh(Struct, frozen=True):
    """A key under which there is probably nothing."""

    key: Key


class Depth(Struct, frozen=True):
    """How many tasks are ready for somebody."""

    recipient: str


class Waiting(Struct, frozen=True):
    """How many signals wait for a run."""

    task_id: str


class Listing(Struct, frozen=True):
    """What a method of the view tells, at this moment."""

    method: str
    args: tuple[Any, ...]
