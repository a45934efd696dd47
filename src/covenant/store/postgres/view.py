"""What a transaction has loaded, as the rules see it. Asked for more than that, it says what it needs.

Records and the first ones of a shelf are loaded with their locks, and later commands of a batch see what the earlier
ones made of them. A whole listing is a snapshot: it is good for the first command of a batch only. Peers, grants and
cards come from memory, which the engine brings up to date in the same transaction; a grant with a bound on its uses is
a record like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from covenant.model.card import CARD_PREFIX, Card
from covenant.model.event import Event, HeadSigned, Leased, Sent, TakenUp
from covenant.model.peer import GRANT_PREFIX, PEER_PREFIX, Caller, Grant, Peer, grant_key
from covenant.model.push import Push
from covenant.model.record import (
    HORIZON_KEY,
    OF_A_TASK,
    Horizon,
    Key,
    Late,
    Record,
    Slot,
    TaskRecord,
    Tombstone,
    owner_of,
)
from covenant.model.run import SIGNAL_PREFIX, Signal
from covenant.rules.context import Need, Spent, each
from covenant.rules.evolve import CREATING, EVOLVE
from covenant.rules.lease import kind_in
from covenant.store.directory import Directory
from covenant.store.journal.line import Line
from covenant.store.postgres import rows
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.portioned import Cut, Portioned
from covenant.store.postgres.rows import (
    ANSWERS,
    FOLLOWERS,
    HEARD,
    LEASE,
    READY,
    SIGNALS,
    Place,
    places_of,
    standing,
)
from covenant.store.postgres.want import ANYBODY, TAKEN, Depth, First, Listing, ShelfName, Waiting

_NEVER: Final = 2**62
R = TypeVar("R")
_TRUST_PREFIXES: Final = (PEER_PREFIX, CARD_PREFIX)


class Working:
    """Implements the rules' `View`."""

    def __init__(self, trust: Directory, depths: Callable[[str], int | None]) -> None:
        self.trust = trust
        self._depths = depths  # how many tasks are ready for somebody, as far as it is known
        self.order = 0  # the number of the last event
        self.due_ms: int | None = None  # when the first of what was made here is due
        self.records: dict[Key, Record | Tombstone] = {}
        self.absent: set[Key] = set()
        self.were: dict[Key, Record | Tombstone] = {}  # as they were loaded
        self.touched: dict[Key, None] = {}
        self.lists: dict[Listing, Any] = {}
        self.has_sent = False  # something, and so whose children there are may not be what was listed
        self.ending: Key | None = None  # which of those that are due the rules have come to
        self.is_fresh = False  # something was loaded, and so trust is up to date
        self.is_full = False  # not all that was asked for was loaded: it was too much at once
        self.keyed: set[Key] = set()  # what was locked by its key, and not as the first of its shelf
        self._looks: list[tuple[First, Sequence[Key], bool]] = []  # what was, and whether more was than was loaded
        self.is_snapshot = False  # it shows one moment, and locks nothing
        self.is_spent = False  # of a snapshot: no listing is shown any further than it is here already
        self.is_careful = False  # nothing is taken for absent that was not looked for
        self.is_one_by_one = False  # what goes with what is due is asked for only when it is come to
        self.is_recalled = False  # nothing was loaded: it shows what is remembered
        self._put: dict[tuple[bytes, str], dict[Key, None]] = {}  # on shelves that may be remembered later
        self.borrowed: list[Key | tuple[bytes, str]] = []  # what of that
        self.moves: list[tuple[bytes, str | None, str | None, Key]] = []  # from where to where, as they come
        self.strange: dict[tuple[bytes, str], None] = {}  # where something was put, and it is not known what else is
        self._heeds = False
        self.sizes: dict[Key, int] = {}  # of what was saved, in bytes
        self.places: dict[Key, Sequence[Place]] = {}  # of tasks, as far as they were looked for
        self._shelves: dict[tuple[bytes, str], dict[Key, int]] = {}
        self._loaded: set[bytes] = set()  # which of the shelves there are any of
        self._leases: dict[str, Key | None] = {}  # whose they are
        self._fitting: dict[ShelfName, tuple[list[Key], int | None]] = {}  # of some kinds, and how far
        self._reach: dict[tuple[bytes, str], int | None] = {}  # how far a shelf was loaded; None: to its end
        self._waiting: dict[str, int] = {}  # how many signals, by run, before anything was changed here
        self._signaled: dict[str, int] = {}  # how many more, or fewer, by what was

    # --- loading ------------------------------------------------------------------------------------------

    def take_in(self, key: Key, kind: bytes, body: bytes) -> None:
        if key not in self.were and key not in self.touched:
            self.absent.discard(key)
            self.records[key] = self.were[key] = rows.decoded(kind, body)

    def take_absent(self, keys: Iterable[Key]) -> None:
        """Those of the keys that were asked for and not found."""
        records = self.records
        self.absent.update([key for key in keys if key not in records])

    def take_shelf(
        self, first: First, keys: Sequence[Key], is_cut: bool = False, stood: Sequence[int] | None = None
    ) -> None:
        """What stands first on a shelf, and was taken in already; what this transaction has put there comes after.
        `is_cut`: there was no room for more. `stood`: where they were seen; one that has moved before it was locked
        says nothing of what comes before its new place."""
        name = (first.shelf, first.name)
        self.is_full = self.is_full or is_cut
        if first.shelf == LEASE:
            self._leases.setdefault(first.name, keys[0] if keys else None)
            return
        if first.shelf in TAKEN:
            self._looks.append((first, keys, is_cut))
        found: dict[Key, int] = {}
        last = -1
        for at, key in enumerate(keys):
            was = standing(first.shelf, key, self.were.get(key))
            if was is None:
                continue
            if stood is None or was[1] == stood[at]:
                last = max(last, was[1])
            else:
                is_cut = True
        reach = last if is_cut or len(keys) >= first.limit else None
        if first.kinds is not None:
            self._fitting[first.place] = ([*keys], reach)
            return
        for key in (*keys, *self.touched):
            now = standing(first.shelf, key, self.records.get(key))
            if now is not None and first.name in (now[0], ANYBODY):
                found[key] = now[1]
        self._shelves[name] = found
        self._loaded.add(first.shelf)
        self._reach[name] = reach

    def take_waiting(self, task_id: str, count: int) -> None:
        self._waiting[task_id] = count

    def remember(self, key: Key, record: TaskRecord, places: Sequence[Place]) -> None:
        """Instead of loading it."""
        self.records[key] = self.were[key] = record
        self.places[key] = places
        self.borrowed.append(key)

    def remember_shelf(self, name: tuple[bytes, str], there: Mapping[Key, int]) -> None:
        """All that stood there, and was remembered already; what this transaction has put there comes after."""
        found = self._shelves[name] = dict(there)
        for key in self._put.get(name, ()):
            now = standing(name[0], key, self.records.get(key))
            if now is not None and now[0] == name[1]:
                found[key] = now[1]
        self._loaded.add(name[0])
        self._reach[name] = None
        self.borrowed.append(name)

    def has_shelf(self, name: tuple[bytes, str]) -> bool:
        return name in self._shelves

    def whole_shelves(self) -> Iterator[tuple[tuple[bytes, str], Mapping[Key, int]]]:
        """Those that were loaded to their end, as they are now."""
        for name, there in self._shelves.items():
            if self._reach[name] is None:
                yield name, there

    def go_on(self, but: Collection[Key], shelf_max: int, records_max: int) -> Working:
        """One that shows the same, as if it had been loaded: tasks that are open, the newest of them, and shelves that
        are short. What is left out has to be asked for."""
        work = Working(self.trust, self._depths)
        work.order, work.due_ms, work.strange = self.order, self.due_ms, self.strange
        is_open = (
            (key, record)
            for key, record in self.records.items()
            if type(record) is TaskRecord and rows.is_open(record) and key not in but
        )
        kept = list(is_open)[-records_max:]
        work.records = dict(kept)
        work.were = dict(kept)
        for name, there in self.whole_shelves():
            if len(there) <= shelf_max:
                work._shelves[name] = dict(there)
                work._reach[name] = None
        work.heed()
        return work

    def expects(self, name: tuple[bytes, str]) -> bool:
        """Whether there is something on this shelf."""
        return bool(self._shelves.get(name))

    # --- changing -----------------------------------------------------------------------------------------

    def require(self, events: Iterable[Event], is_guess: bool = False) -> None:
        """Everything that the events touch is here, or new. By a guess nothing is taken for that."""
        missing = []
        for event in events:
            key = event.key
            if type(event) is Sent and type(self.records.get(key)) is TaskRecord:
                belongings: Sequence[Key] = self._listed("belongings", key)  # of a former life: they go with it
                missing += [piece for piece in belongings if piece not in self.records and piece not in self.absent]
            if key in self.records or key in self.absent or type(event) is HeadSigned:
                continue
            if key.startswith(_TRUST_PREFIXES) or key == HORIZON_KEY:
                continue
            if key.startswith(GRANT_PREFIX) and not self._is_bounded(key):
                continue
            if type(event) in CREATING and not self.is_careful:
                if not is_guess:
                    self.absent.add(key)
            else:
                missing.append(key)
        if missing:
            raise Need(*missing)

    def orders_before(self, events: Sequence[Event]) -> Sequence[int]:
        orders = []
        found = False
        for event in events:
            record = self._known(event.key)
            if record is None or type(record) is Tombstone or type(event) is Sent:
                orders.append(0)
            else:
                orders.append(record.order)
                found = True
        return orders if found else ()

    def _known(self, key: Key) -> Any:
        record = self.records.get(key)
        if record is None and key not in self.absent:
            return self.trust.get(key)
        return record

    def follow(self, line: Line) -> None:
        """What this line of the log tells has happened; it is the next."""
        if line.events:
            self.apply(line.events, line.at)
        else:
            self.order += 1

    def follow_task(self, event: Event, old: TaskRecord | None, at: int) -> None:
        """The same for a line of one event, where it is asked for most: it makes another of this task, or a task of
        nothing, and belongs to nothing else."""
        order = self.order = self.order + 1
        key, kind = event.key, type(event)
        new: Any = EVOLVE[kind](old, event, order, at)
        self.records[key] = new
        self.touched[key] = None
        if new.due_ms is not None:
            self._heed_due(new.due_ms)
        if kind is Leased:
            self._leases[event.lease_id] = key  # type: ignore[union-attr]  # as its kind has it
        elif kind is Sent:
            self.has_sent = True
        self._shift(key, old, new)

    def _heed_due(self, due_ms: int) -> None:
        if self.due_ms is None or due_ms < self.due_ms:
            self.due_ms = due_ms

    def apply(self, events: Iterable[Event], at: int) -> None:
        order, records = self.order, self.records
        for event in events:
            order += 1
            kind = type(event)
            if kind is HeadSigned:
                continue  # it stands in its lane, and nowhere else
            key = event.key
            old = records.get(key)
            if old is None and key not in self.absent:
                old = self.trust.get(key)
                if old is not None:
                    self.were[key] = old  # one that is trusted: memory has it
            if kind is Sent:
                self.has_sent = True
                if type(old) is TaskRecord:
                    self._end_life(key)
                new = EVOLVE[kind](None, event, order, at)
            else:
                new = EVOLVE[kind](old, event, order, at)
            if new is None:
                records.pop(key, None)
                self.absent.add(key)
            else:
                self.absent.discard(key)
                records[key] = new
                due: int | None = getattr(new, "due_ms", None)
                if due is not None:
                    self._heed_due(due)
            self.touched[key] = None
            if type(event) is Leased or type(event) is TakenUp:
                self._leases[event.lease_id] = key
            if self.is_recalled:
                self._note_place(key, new)
            if self._heeds and type(new) is TaskRecord:
                self._shift(key, old if type(old) is TaskRecord else None, new)
            elif self._loaded:
                self._move(key, old, new)
            if key.startswith(SIGNAL_PREFIX):
                self._count_signal(key, old, new)
        self.order = order

    def _note_place(self, key: Key, new: Record | None) -> None:
        for shelf in TAKEN:
            now = standing(shelf, key, new)
            if now is not None:
                self._put.setdefault((shelf, now[0]), {})[key] = None

    def forget_lists(self, but_children: bool = False) -> None:
        """They were of the moment. `but_children`: whose there are stays as it is until another is sent."""
        kept = but_children and not self.has_sent
        self.lists = {wanted: found for wanted, found in self.lists.items() if kept and wanted.method == "children"}

    def _end_life(self, task_id: Key) -> None:
        """An id that was forgotten is used anew: what belonged to its former life goes with it."""
        found = [(key, record) for key, record in self.records.items() if type(record) in OF_A_TASK]
        for key, record in found:
            if owner_of(key, record) == task_id:
                del self.records[key]
                self.absent.add(key)
                self.touched[key] = None
                self._count_signal(key, record, None)
                self._move(key, record, None)

    def heed(self) -> None:
        """Say from now on who leaves or takes a place on the shelves from which something is taken. None of them is
        everybody's."""
        self._heeds = True
        self._loaded.update(TAKEN)

    def _shift(self, key: Key, old: TaskRecord | None, new: TaskRecord) -> None:
        """The same as `_move` for a task where it is asked for most."""
        was, now = None if old is None else old.ready_for, new.ready_for
        if was != now or (now is not None and old is not None and old.ready_order != new.ready_order):
            self._go(READY, was, now, new.ready_order, key)
        was, now = None if old is None else old.answer_for, new.answer_for
        if was != now or (now is not None and old is not None and old.answer_order != new.answer_order):
            self._go(ANSWERS, was, now, new.answer_order, key)

    def _go(self, shelf: bytes, was: str | None, now: str | None, order: int, key: Key) -> None:
        """On these shelves, from one name to another."""
        shelves = self._shelves
        if was is not None and (there := shelves.get((shelf, was))) is not None:
            there.pop(key, None)
        if now is not None:
            there = shelves.get((shelf, now))
            if there is None:
                self.strange[shelf, now] = None
            else:
                there[key] = order
        self.moves.append((shelf, was, now, key))

    def _move(self, key: Key, old: Record | Tombstone | None, new: Record | None) -> None:
        shelves = self._shelves
        for shelf in self._loaded:
            was, now = standing(shelf, key, old), standing(shelf, key, new)
            if was == now:
                continue
            if self._heeds:
                self.moves.append((shelf, was and was[0], now and now[0], key))
            for place in (was, now):
                if place is None:
                    continue
                for known in ((shelf, place[0]), (shelf, ANYBODY)):
                    if known in shelves:
                        if place is now:
                            shelves[known][key] = place[1]
                        else:
                            shelves[known].pop(key, None)

    def _count_signal(self, key: Key, old: object, new: object) -> None:
        for record, by in ((old, -1), (new, 1)):
            if type(record) is Signal and not record.taken:
                task_id = owner_of(key, record)
                self._signaled[task_id] = self._signaled.get(task_id, 0) + by

    def moved(self) -> Moved:
        moved = Moved()
        self.note_moved(self.touched, moved)
        return moved

    def note_moved(self, keys: Iterable[Key], moved: Moved) -> None:
        """Of these alone."""
        known, records, were = self.places, self.records, self.were
        for key in keys:
            was = known.get(key)
            if was is None:
                was = places_of(key, were[key]) if key in were else ()
            now = known[key] = places_of(key, records.get(key))
            if not was:
                moved.taken += [(place, key) for place in now]
                continue
            if was == now:
                continue
            left = [place for place in was if place not in now]
            taken = [place for place in now if place not in was]
            while left and taken:
                moved.moves.append((left.pop(), taken.pop(), key))
            if left:
                moved.left += [(place, key) for place in left]
            elif taken:
                moved.taken += [(place, key) for place in taken]

    def passed_by(self) -> set[tuple[bytes, str]]:
        """The shelves of what was locked and stays there: who looked meanwhile has not seen it. Who looked and took
        nothing tells nobody: it would wake itself, and look again for ever."""
        found: set[tuple[bytes, str]] = set()
        for first, keys, is_cut in self._looks:
            left = [key for key in keys if key not in self.touched]
            if len(left) == len(keys):
                continue
            if is_cut:
                found.add((first.shelf, first.name))
            places = [standing(first.shelf, key, self.records.get(key)) for key in left]
            found.update((first.shelf, place[0]) for place in places if place is not None)
        for key in self.keyed:
            was, now = self.were.get(key), self.records.get(key)
            for shelf in TAKEN:
                place = standing(shelf, key, now)
                if place is not None and place == standing(shelf, key, was):
                    found.add((shelf, place[0]))
        return found

    # --- the view: records and shelves --------------------------------------------------------------------

    def get(self, key: Key) -> Record | Tombstone | None:
        record = self.records.get(key)
        if record is not None:
            return record
        if key in self.absent or not key:
            return None
        if key.startswith(_TRUST_PREFIXES) or key == HORIZON_KEY:
            return self.trust.get(key)
        if key.startswith(GRANT_PREFIX) and not self._is_bounded(key):
            return self.trust.get(key)
        raise Need(key)

    def _is_bounded(self, key: Key) -> bool:
        grant = self.trust.get(key)
        return isinstance(grant, Grant) and grant.capability.scope.max_uses is not None and grant.revoked_ms is None

    def _first(self, shelf: bytes, name: str | None, limit: int) -> list[Key]:
        name = ANYBODY if name is None else name
        there = self._shelves.get((shelf, name))
        if there is None:
            raise Need(First(shelf, name, limit))
        reach = self._reach[shelf, name]
        if reach is None and len(there) <= 1:
            return list(there)
        found = sorted((order, key) for key, order in there.items() if reach is None or order <= reach)
        is_enough = found and self.is_full and shelf in (READY, ANSWERS)  # who takes is content with fewer
        if len(found) < limit and reach is not None and not is_enough:
            raise Need(First(shelf, name, limit + len(self.touched) + limit))
        return [key for _, key in found[:limit]]

    def _first_of(self, first: First) -> list[Key]:
        """The same among those of some kinds."""
        if first.place not in self._fitting:
            raise Need(first)
        keys, reach = self._fitting[first.place]
        found = []
        for key in dict.fromkeys((*keys, *self.touched)):
            record = self.records.get(key)
            now = standing(first.shelf, key, record)
            if now is None or first.name not in (now[0], ANYBODY) or (reach is not None and now[1] > reach):
                continue
            assert type(record) is TaskRecord and first.kinds is not None
            if kind_in(record.task) in first.kinds:
                found.append((now[1], key))
        if len(found) < first.limit and reach is not None and not (found and self.is_full):
            raise Need(replace(first, limit=first.limit + len(keys) + len(self.touched)))
        return [key for _, key in sorted(found)[: first.limit]]

    def _portioned(self, kind: type[R], method: str, *args: Any) -> Sequence[R]:
        """From a snapshot, in which they are what they were listed as: as they are asked for."""
        if self.is_spent and Listing(method, args) not in self.lists:
            raise Spent
        keys: Sequence[Key] = self._listed(method, *args)
        return Portioned(lambda key: self._record(kind, key), keys) if self.is_snapshot else self._records(kind, keys)

    def _record(self, kind: type[R], key: Key) -> R:
        if self.is_spent and key not in self.records:
            raise Spent
        record = self.get(key)
        assert isinstance(record, kind)
        return record

    def _records(self, kind: type[R], keys: Iterable[Key]) -> list[R]:
        """Those that are still what they were listed as; one that is not here yet is needed."""
        missing = [key for key in keys if key not in self.records and key not in self.absent]
        if missing:
            raise Need(*missing)
        return [record for key in keys if isinstance(record := self.records.get(key), kind)]

    def task_of_lease(self, lease_id: str) -> Key | None:
        if lease_id not in self._leases:
            raise Need(First(LEASE, lease_id, 1))
        key = self._leases[lease_id]
        return key if key is None or key not in self.touched or _has_had(self.records.get(key), lease_id) else None

    def ready(self, recipient: str | None, limit: int) -> Sequence[TaskRecord]:
        keys = self._first(READY, recipient, limit)
        if len(keys) == 1 and type(record := self.records.get(keys[0])) is TaskRecord:  # as it mostly is
            return (record,)
        return self._records(TaskRecord, keys)

    def ready_of(self, recipient: str | None, kinds: frozenset[str], limit: int) -> Sequence[TaskRecord]:
        first = First(READY, ANYBODY if recipient is None else recipient, limit, kinds)
        return self._records(TaskRecord, self._first_of(first))

    def answers(self, peer: str | None, limit: int) -> Sequence[Key]:
        return self._first(ANSWERS, peer, limit)

    def followers(self, slot: Key, limit: int) -> Sequence[TaskRecord]:
        return self._records(TaskRecord, self._first(FOLLOWERS, slot, limit))

    def signals(self, task_id: str, limit: int, taken: bool = False) -> Sequence[Signal]:
        keys = self._first(SIGNALS, task_id, limit)
        if taken and len(keys) < limit:
            keys += self._first(HEARD, task_id, limit - len(keys))
        return self._records(Signal, keys)

    def signal_count(self, task_id: str) -> int:
        if task_id not in self._waiting:
            raise Need(Waiting(task_id))
        return self._waiting[task_id] + self._signaled.get(task_id, 0)

    def heard(self, task_id: str, limit: int) -> Sequence[Signal]:
        return self._records(Signal, self._first(HEARD, task_id, limit))

    def pieces(self, prefix: Key, first: int, last: int) -> Sequence[tuple[int, Record]]:
        numbered = [(number, f"{prefix}{number}") for number in range(first, last + 1)]
        missing = [key for _, key in numbered if key not in self.records and key not in self.absent]
        if missing:
            raise Need(*missing)
        found = ((number, self.records.get(key)) for number, key in numbered)
        return [(n, record) for n, record in found if record is not None and not isinstance(record, Tombstone)]

    # --- the view: listings -------------------------------------------------------------------------------

    def _listed(self, method: str, *args: Any) -> Any:
        listing = Listing(method, args)
        found = self.lists.get(listing)
        if found is None:
            raise Need(listing)
        return found

    def children(self, parent: str, after: int, limit: int, agent: str | None = None) -> Sequence[TaskRecord]:
        return self._portioned(TaskRecord, "children", parent, after, limit, agent)

    def leases(self, after: int, limit: int, agent: str | None = None) -> Sequence[TaskRecord]:
        if agent is None and self.is_snapshot:
            return self._portioned(TaskRecord, "leases", after, limit, agent)
        held: list[TaskRecord] = []
        try:
            while True:
                listed = self._portioned(TaskRecord, "leases", after, limit, agent)
                for record in listed:
                    if record.lease is not None:
                        after = record.lease.seen_order
                        if agent in (None, record.sender, record.recipient):
                            held.append(record)
                # What others carry may look like a task of this agent: so there may be more.
                if not self.is_snapshot or len(listed) < limit or len(held) >= limit:
                    return held[:limit]
        except Spent:
            if held:
                return Cut(held[:limit])
            self.is_spent = False  # nothing of what is here concerns this agent, and a page must show or pass something
            return self.leases(after, limit, agent)

    def due(self, now: int, limit: int) -> Sequence[Key]:
        keys: Sequence[Key] = self._listed("due", now, limit)
        missing = [key for key in keys if key not in self.records and key not in self.absent]
        if missing and not self.is_full:
            raise Need(*missing)
        found = list(islice((key for key in keys if self._due_ms(key) <= now), limit))
        if missing and not found:
            raise Need(*missing)
        self._need_what_goes_with(found)
        return Portioned(self._come_to, found)

    def _need_what_goes_with(self, keys: Iterable[Key]) -> None:
        """Slots, and who is the first to follow in them. At once: asked for one by one, each would have all before it
        decided again. Where somebody holds a follower, that is how it is found out whose it is."""
        slots = {slot for key in keys if (slot := self._slot_of(key)) is not None}
        missing = [slot for slot in slots if slot not in self.records and slot not in self.absent]
        if missing and not self.is_full:
            raise Need(*missing)
        followed = [slot for slot in slots if (FOLLOWERS, slot) not in self._shelves]
        if followed and not self.is_full and not self.is_one_by_one:
            raise Need(*(First(FOLLOWERS, slot, 1) for slot in followed))

    def _slot_of(self, key: Key) -> Key | None:
        record = self.records.get(key)
        slot: Key | None = key if type(record) is Slot else getattr(record, "slot", None)
        return slot

    def _come_to(self, key: Key) -> Key:
        self.ending = key
        return key

    def listed_as_due(self) -> Mapping[Key, Key]:
        """Each with the slot that it goes with, or itself."""
        listed = (key for listing, keys in self.lists.items() if listing.method == "due" for key in keys)
        return {key: getattr(self.records.get(key), "slot", None) or key for key in listed}

    def _due_ms(self, key: Key) -> int:
        due_ms: int | None = getattr(self.records.get(key), "due_ms", None)
        return _NEVER if due_ms is None else due_ms

    def tasks(self, agent: str | None, after: int, limit: int) -> Sequence[TaskRecord]:
        return self._portioned(TaskRecord, "tasks", agent, after, limit)

    def recent(self, agent: str | None, before: int | None, limit: int) -> Sequence[TaskRecord]:
        return self._portioned(TaskRecord, "recent", agent, before, limit)

    def pending(self, agent: str | None, after: int, limit: int) -> Sequence[Key]:
        keys: Sequence[Key] = self._listed("pending", agent, after, limit)
        return keys

    def slots(self, after: int, limit: int, agent: str | None = None) -> Sequence[tuple[Key, Slot]]:
        keys: Sequence[Key] = self._listed("slots", after, limit, agent)
        if self.is_snapshot:
            return Portioned(lambda key: (key, self._record(Slot, key)), keys)
        return list(zip(keys, self._records(Slot, keys), strict=True))

    def late(self, task_id: str) -> Sequence[Late]:
        return self._records(Late, self._listed("late", task_id))

    def dialogs(self, sender: str, recipient: str, before: int, limit: int) -> Sequence[TaskRecord]:
        return self._portioned(TaskRecord, "dialogs", sender, recipient, before, limit)

    def moved_dialogs(self, sender: str, recipient: str, since: int, after: int, limit: int) -> Sequence[TaskRecord]:
        return self._portioned(TaskRecord, "moved_dialogs", sender, recipient, since, after, limit)

    def pushes(self, task_id: str) -> Sequence[Push]:
        return self._records(Push, self._listed("pushes", task_id))

    def dialog_count(self, sender: str, recipient: str) -> int:
        return int(self._listed("dialog_count", sender, recipient))

    def depth(self, recipient: str) -> int:
        known = self._depths(recipient)
        if known is None:
            raise Need(Depth(recipient))
        return known

    def deep(self, over: int) -> Sequence[tuple[TaskRecord, int]]:
        found: Mapping[Key, int] = self._listed("deep", over)
        return list(zip(self._records(TaskRecord, found), found.values(), strict=True))

    # --- the view: trust ----------------------------------------------------------------------------------

    @property
    def trust_order(self) -> int:
        return self.trust.trust_order

    def grants(self, subject: str, action: str) -> Mapping[str, Mapping[str, Grant]]:
        pins = self.trust.grants(subject, action)
        if not any(grant.capability.scope.max_uses for grants in pins.values() for grant in grants.values()):
            return pins
        each(self._fresh, (grant for grants in pins.values() for grant in grants.values()))
        return {pin: {id_: self._fresh(grant) for id_, grant in grants.items()} for pin, grants in pins.items()}

    def _fresh(self, grant: Grant) -> Grant:
        """How often it was used is told by its record."""
        if grant.capability.scope.max_uses is None:
            return grant
        known = self.get(grant_key(grant.capability.id))
        return known if isinstance(known, Grant) else grant

    def peer_named(self, display: str) -> str | None:
        return self.trust.peer_named(display)

    def caller_of(self, digest: str) -> Caller | None:
        return self.trust.caller_of(digest)

    def peers(self, after: int, limit: int) -> Sequence[Peer]:
        return self.trust.peers(after, limit)

    def all_grants(self, subject: str | None, after: int, limit: int) -> Sequence[Grant]:
        found = self.trust.all_grants(subject, after, limit)
        each(self._fresh, found)
        return [self._fresh(grant) for grant in found]

    def cards(self, after: int, limit: int) -> Sequence[Card]:
        return self.trust.cards(after, limit)

    @property
    def compaction(self) -> Horizon | None:
        return self.trust.compaction


def _has_had(record: Record | Tombstone | None, lease_id: str) -> bool:
    """A lease that was given back, and of which nobody ever heard, is not remembered."""
    if type(record) is not TaskRecord:
        return False
    return (record.lease is not None and record.lease.lease_id == lease_id) or lease_id in record.lease_history
