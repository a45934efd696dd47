"""The places on the shelves that a transaction has changed."""

from __future__ import annotations

from collections.abc import Iterator

from covenant.model.record import Key
from covenant.store.postgres.rows import Place


class Moved:
    """Who has left a place, who has taken one, and who has gone from one to another: that is one row, written once."""

    __slots__ = ("left", "moves", "taken")

    def __init__(self) -> None:
        self.left: list[tuple[Place, Key]] = []
        self.taken: list[tuple[Place, Key]] = []
        self.moves: list[tuple[Place, Place, Key]] = []

    def all_left(self) -> Iterator[tuple[Place, Key]]:
        yield from self.left
        for was, _, key in self.moves:
            yield was, key

    def all_taken(self) -> Iterator[tuple[Place, Key]]:
        yield from self.taken
        for _, now, key in self.moves:
            yield now, key
