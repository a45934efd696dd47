"""Listings that are not all here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

from covenant.model.record import Key
from covenant.rules.context import Spent

R = TypeVar("R")


class Portioned(Sequence[R]):
    """A listing of which a part may not be here yet: who gets there asks for more, and who has enough does not."""

    def __init__(self, one: Callable[[Key], R], keys: Sequence[Key]) -> None:
        self._one = one
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, at: int) -> R: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[R]: ...
    def __getitem__(self, at: int | slice) -> R | Sequence[R]:
        if isinstance(at, slice):
            return Portioned(self._one, self._keys[at])
        return self._one(self._keys[at])


class Cut(list[R]):
    """The beginning of a listing of which there is more than is shown at once: who gets there is told."""

    def __iter__(self) -> Iterator[R]:
        yield from super().__iter__()
        raise Spent
