"""What this daemon has committed and still remembers: tasks that are open, and who stands on which shelf.

A command that wants nothing else is decided on memory, and the database is asked once: it saves what was decided if the
store is as it was remembered, and otherwise says no. Then memory lets go of it, and the command is decided on what is
loaded, as any other. So memory may be wrong, and costs time then; it is never the truth.

What one transaction has borrowed is not lent to another until the first is done: both would count on the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from covenant.model import command as c
from covenant.model.record import Key, TaskRecord
from covenant.rules.context import Commit
from covenant.store.postgres.entry import Entry
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.numbers import Numbers
from covenant.store.postgres.rows import Place, is_open, places_of
from covenant.store.postgres.rows import standing as stands_at
from covenant.store.postgres.trust import TRUST_EVENTS
from covenant.store.postgres.view import Working
from covenant.store.postgres.want import ANYBODY, TAKEN, First, Fresh

RECORDS_MAX: Final = 8192
RECORD_BYTES_MAX: Final = 8192  # one that is larger is not worth its room
SHELVES_MAX: Final = 8192
STANDING_MAX: Final = 64  # on one shelf: a longer queue is loaded from its beginning

ShelfKey: TypeAlias = tuple[bytes, str]
K = TypeVar("K")
V = TypeVar("V")


class Recall:
    def __init__(self) -> None:
        self._records: dict[Key, tuple[TaskRecord, Sequence[Place]]] = {}
        self._shelves: dict[ShelfKey, dict[Key, int]] = {}  # all that stands there, as far as is known
        self._unknown: dict[ShelfKey, None] = {}  # shelves on which there was something else, too
        self._noticed: dict[ShelfKey, None] = {}  # shelves that somebody will want to know of
        self._lent: set[Key | ShelfKey] = set()
        self.numbers = Numbers()

    def lend(self, work: Working, wanted: Iterable[Any]) -> bool:
        """Put this into the view of a transaction, or say that it is not all here."""
        for want in wanted:
            if type(want) is First:
                if not self._lend_shelf(work, (want.shelf, want.name)):
                    return False
            elif type(want) is Fresh:
                if want.key in self._records:
                    return False
                if want.key not in work.records:
                    work.absent.add(want.key)  # if it is not so, the save will say it
            elif not self._lend_record(work, want):
                return False
        return True

    def _lend_record(self, work: Working, key: Key) -> bool:
        if key in work.were:
            return True
        known = self._records.get(key)
        if known is None or key in self._lent or known[0].order > self.numbers.last:
            return False
        work.remember(key, *known)
        self._lent.add(key)
        return True

    def _lend_shelf(self, work: Working, name: ShelfKey) -> bool:
        if work.has_shelf(name):
            return True
        standing = self._shelves.get(name)
        if not standing or name in self._lent:  # whether it is still empty has to be looked for
            return False
        if not all(self._lend_record(work, key) for key in standing):
            return False
        # One may have left the shelf unseen, and been seen elsewhere since: it would be taken where it is not.
        if any(stands_at(name[0], key, work.records.get(key)) != (name[1], order) for key, order in standing.items()):
            del self._shelves[name]
            return False
        work.remember_shelf(name, standing)
        self._lent.add(name)
        return True

    def expects(self, shelf: bytes, name: str) -> bool:
        """Whether there should be something."""
        return bool(self._shelves.get((shelf, name)))

    def give_back(self, work: Working) -> None:
        self._lent.difference_update(work.borrowed)

    def lose(self, work: Working) -> None:
        """What was lent to this transaction may not be so."""
        self.give_back(work)
        for what in work.borrowed:
            self._records.pop(what, None)  # type: ignore[arg-type]  # it is a key of one of them
            self._shelves.pop(what, None)  # type: ignore[arg-type]

    def was_wrong(self, names: Iterable[ShelfKey]) -> None:
        """There is more on these shelves than was put there of late: nothing is thought of them until one that looks
        comes to their end."""
        for name in names:
            self._shelves.pop(name, None)
            self._unknown[name] = None
        _trim(self._unknown, SHELVES_MAX)

    def learn(self, work: Working, moved: Moved) -> None:
        """It is committed. Of a shelf that nothing is known of, it is thought that what was put there is alone."""
        records = self._records
        for key in work.touched:
            now = work.records.get(key)
            records.pop(key, None)
            if type(now) is TaskRecord and is_open(now) and work.sizes.get(key, RECORD_BYTES_MAX) < RECORD_BYTES_MAX:
                records[key] = (now, work.places[key])
        shelves = self._shelves
        for (shelf, name, _), key in moved.all_left():
            if shelf in TAKEN and (standing := shelves.get((shelf, name))) is not None:
                standing.pop(key, None)
        for (shelf, name, order), key in moved.all_taken():
            if shelf in TAKEN and (at := (shelf, name)) not in self._unknown:
                standing = shelves.setdefault(at, {})
                standing[key] = order
                if len(standing) > STANDING_MAX:
                    self.was_wrong([at])
        if not work.is_recalled:
            for at, there in work.whole_shelves():
                if len(there) <= STANDING_MAX and at[0] in TAKEN and at[1] != ANYBODY:
                    shelves[at] = dict(there)
                    self._unknown.pop(at, None)
        _trim(records, RECORDS_MAX)
        _trim(shelves, SHELVES_MAX)

    def known(self) -> tuple[list[ShelfKey], list[Key]]:
        """Which shelves and which records there is something to tell of, the newest last."""
        return [*dict.fromkeys((*self._noticed, *self._unknown, *self._shelves))], [*self._records]

    def notice(self, names: Iterable[ShelfKey]) -> None:
        """Something was put on these, or looked for, and nobody knew what else is there."""
        self._noticed.update(dict.fromkeys(names))
        _trim(self._noticed, SHELVES_MAX)

    def take_over(self, work: Working) -> None:
        """What has been decided on it is in the tables: all that it shows is so."""
        for key, record in work.records.items():
            if type(record) is TaskRecord:
                self._records[key] = (record, places_of(key, record))
        for at, there in work.whole_shelves():
            self._shelves[at] = dict(there)
            self._unknown.pop(at, None)
        _trim(self._records, RECORDS_MAX)
        _trim(self._shelves, SHELVES_MAX)

    def forget(self) -> None:
        """All of it; what is lent is still lent."""
        self._records.clear()
        self._shelves.clear()
        self._unknown.clear()
        self._noticed.clear()
        self.numbers.lose(self.numbers.block)

    def begin_anew(self) -> None:
        """The store is not what it was: numbers may come again."""
        self.forget()
        self.numbers.forget()


def _trim(known: dict[K, V], most: int) -> None:
    """Let the oldest go."""
    while len(known) > most:
        del known[next(iter(known))]


def in_order_with(entry: Entry) -> tuple[Any, ...]:
    """What it has its place in: among those of one call, and among what is sent to one recipient."""
    command = entry.command.command if type(entry.command) is c.Call else entry.command
    sent_to: tuple[Any, ...] = ()
    if type(command) is c.SendTask:
        sent_to = (getattr(getattr(command.task, "recipient", None), "pubkey", None),)
    return sent_to if entry.group is None else (*sent_to, id(entry.group))


def is_borne(commit: Commit, wanted: Sequence[Any], work: Working) -> bool:
    """Whether the save will show that what was decided on is so: every record that was borrowed for it is changed, and
    what was taken from a shelf stood there before this transaction."""
    keys = [event.key for event in commit.events if type(event) not in TRUST_EVENTS]
    if not keys or len(keys) != len(commit.events):
        return False
    for want in wanted:
        if type(want) is First:
            if not work.were.keys() >= set(keys):
                return False
        elif (want.key if type(want) is Fresh else want) not in keys:
            return False
    return True
