"""Those who wait here: for work, for answers, for a task to move on, for the log to grow.

A commit of this process wakes them at once, and knows for which kind of work; the ring of another daemon names only
whom it concerns; and a slow look wakes whoever may have been missed. To be woken in vain costs a look, and loses
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from covenant.model.command import DrainResults, LeaseTasks
from covenant.model.record import Key
from covenant.model.view import Delivery
from covenant.rules.lease import kind_in
from covenant.store.growth import Growth
from covenant.store.postgres.hooks import Hooks
from covenant.store.waiters import ALL, Waiters

_WATCHED_MAX: Final = 20_000


class Waking:
    def __init__(self, waiters_max: int, hooks: Hooks) -> None:
        self.ready = Waiters(waiters_max)
        self.answers = Waiters(waiters_max)
        self.changes = Waiters(waiters_max)
        self.growth = Growth()
        self._hooks = hooks
        self._watched: dict[Key, int] = {}  # tasks that somebody waits for, as the last slow look saw them

    def place_of(self, asked: LeaseTasks | DrainResults) -> tuple[Waiters, str, frozenset[str] | None]:
        """Where who asks for this waits: under which name, and for which kinds of work."""
        if isinstance(asked, LeaseTasks):
            return self.ready, ALL if asked.recipient is None else asked.recipient.pubkey, asked.kinds
        return self.answers, ALL if asked.peer is None else asked.peer.pubkey, None

    # --- waking -------------------------------------------------------------------------------------------

    @property
    def hears_of_changes(self) -> bool:
        """Whether anybody here wants to know which tasks have moved on."""
        return bool(self.changes.count or self._hooks)

    def wake(self, readied: Iterable[tuple[str, str]], answered: Iterable[str], changed: Sequence[Key]) -> None:
        """This process has committed. What is ready comes with its kind."""
        if self.ready.count:
            for name, kind in readied:
                self.ready.wake_one(name, kind)
        if self.answers.count:
            for name in answered:
                self.answers.wake_one(name, "")
        self._wake_for(changed)

    def rung(self, readied: Iterable[str], answered: Iterable[str], changed: Sequence[Key]) -> None:
        """Another daemon has committed; or somebody has let go what those who looked meanwhile have not seen."""
        for name in readied:
            self.ready.wake_some(name)
        for name in answered:
            self.answers.wake_some(name)
        self._wake_for(changed)

    def _wake_for(self, changed: Sequence[Key]) -> None:
        if self.changes.count:
            for key in changed:
                self.changes.wake_all(key)
        if self._hooks:
            self._hooks.moved(changed)
        self.growth.tell()

    def wake_all(self) -> None:
        """Something may have been missed: everybody looks."""
        for waiters in (self.ready, self.answers, self.changes):
            waiters.wake_everyone()
        self.growth.tell()

    # --- the slow look ------------------------------------------------------------------------------------

    def waited_for(self) -> tuple[list[str], list[str], list[Key]]:
        """For whose work and for whose answers somebody waits, and for which tasks."""
        ready, answers = ([name for name in waiters.names() if name != ALL] for waiters in (self.ready, self.answers))
        return ready, answers, self.changes.names()[:_WATCHED_MAX]

    def found(self, readied: Iterable[str], answered: Iterable[str]) -> None:
        """There is something for these; and there may be for those who receive for all."""
        self.rung((*readied, ALL), (*answered, ALL), ())

    def saw(self, orders: dict[Key, int]) -> None:
        """Tasks that somebody waits for, each with the event that touched it last: some have moved on, and nobody
        rang."""
        for key, order in orders.items():
            if self._watched.get(key) != order:
                self.changes.wake_all(key)
        self._watched = orders


def is_dealt_with(woken_by: str | None, taken: Sequence[Any] | None) -> bool:
    """Whether what somebody was woken for is: it was taken, or nothing was there. This process names what it wakes
    somebody for; a ring of others names nothing, and stands for any number of tasks."""
    if not taken:
        return taken is not None
    if woken_by is None:
        return False
    return any(not isinstance(one, Delivery) or kind_in(one.task) == woken_by for one in taken)
