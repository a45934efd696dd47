"""The live state of an embedded engine: the records that are in memory, and their places.

It folds events with `rules.evolve` and moves records between ledgers by comparing their places before and after. It
decides nothing. Records that are at rest may move to a `Base` (the journal's archive); a record in memory hides what
the base holds under its key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Final, Protocol

from msgspec import Struct

from covenant.model.card import Card
from covenant.model.event import Event, Sent
from covenant.model.limits import LEASES_REMEMBERED_MAX
from covenant.model.peer import Grant
from covenant.model.push import Push, pushed_task
from covenant.model.record import (
    LATE_PREFIX,
    OF_A_TASK,
    PIECE_PREFIXES,
    CacheKey,
    Cascade,
    Chunk,
    Key,
    Late,
    Part,
    Record,
    Said,
    SendKey,
    SignedHead,
    Slot,
    TaskRecord,
    TaskState,
    Tombstone,
    owner_of,
)
from covenant.model.run import Entry, Mark, Run, Signal
from covenant.rules.context import Context
from covenant.rules.evolve import CREATING, EVOLVE
from covenant.rules.lease import kind_in
from covenant.rules.retention import at_rest, is_forgotten, is_retained, tombstone_of
from covenant.rules.sight import is_listed
from covenant.store.directory import Directory
from covenant.store.ledger import DueTimes, LazyLedger, Ledger, Shelf

# Members that every task meets, at hand: an enum takes its time to look one up.
_RESULT_PENDING: Final = TaskState.RESULT_PENDING
_PARKED: Final = TaskState.PARKED
_CASCADING: Final = Cascade.PENDING

_RESTING = (Said, Chunk, SendKey, Entry, Mark)  # from the start
_UNLISTED_MAX = 8_192  # a listing puts so many in their places at most
_LIST_AT_ONCE = 1024
_SHARE_WORTH_LISTING = 8  # an eighth of what is numbered: then one listing costs less than a look for each


class Base(Protocol):
    """Where records at rest go. Listings are lazy: the caller stops when it has enough."""

    def get(self, key: Key) -> Record | Tombstone | None: ...
    def recent(self, agent: str | None, before: int | None) -> Iterator[TaskRecord]: ...
    def children(self, parent: str, after: int, agent: str | None) -> Iterator[TaskRecord]: ...
    def slots(self, after: int, agent: str | None) -> Iterator[tuple[Key, Slot]]: ...
    def late(self, task_id: str) -> Iterator[tuple[Key, Late]]: ...
    def pieces(self, prefix: Key, numbers: Set[int]) -> Iterator[tuple[int, Record]]: ...
    def pieces_of(self, task_id: str) -> list[Key]: ...
    def dialogs(self, sender: str, recipient: str, before: int) -> Iterator[TaskRecord]: ...
    def moved_dialogs(self, sender: str, recipient: str, since: int, after: int) -> Iterator[TaskRecord]: ...
    def dialog_count(self, sender: str, recipient: str) -> int: ...
    def task_of_lease(self, lease_id: str) -> Key | None: ...


class Counts(Struct, frozen=True):
    """How many open tasks there are, by where they stand."""

    queued: int  # among them those that are:
    ready: int
    following: int
    in_flight: int
    result_pending: int
    answers: int  # results that wait to be drained, partial ones too
    parked: int = 0  # among them those that are:
    woken: int = 0


class Tally(Struct, frozen=True):
    """What is open now."""

    counts: Counts
    leases: Sequence[TaskRecord]  # the longest without a sign of life first


class State(Directory):
    """Implements the rules' `View`. Every command goes by it, and it has more members than an interpreter finds
    quickly in the table of an instance: so they are slots."""

    __slots__ = (
        "_answer_count",
        "_answers",
        "_answers_all",
        "_children",
        "_children_of",
        "_dialogs",
        "_dialogs_sent",
        "_following_count",
        "_late",
        "_lease_tasks",
        "_leases",
        "_leases_of",
        "_parked_count",
        "_pending_count",
        "_pieces",
        "_pushes",
        "_ready",
        "_ready_all",
        "_ready_count",
        "_ready_of",
        "_sent",
        "_sent_all",
        "_signals",
        "_slots",
        "_slots_of",
        "_taken",
        "_unfinished_count",
        "_unlisted",
        "_waits",
        "_woken_count",
        "answered",
        "at",
        "base",
        "cascades",
        "changed",
        "due_times",
        "going",
        "gone",
        "on_push",
        "order",
        "readied",
        "rested",
        "signed_head",
        "sweeps",
        "watched",
    )

    def __init__(self, base: Base | None = None) -> None:
        super().__init__()
        self.gone: set[Key] = set()  # closed since the base last heard of them
        self.going: set[Key] = set()  # the base is being told of these
        self.base = base
        self.order = 0  # the number of the last event
        self.at = 0  # the time of the last commit
        self.rested: deque[Key] = deque()  # at rest and still in memory, oldest first
        self.cascades: set[Key] = set()
        self._ready = Shelf(Ledger)
        self._ready_all: LazyLedger | None = None  # made when somebody first receives for all
        self._ready_of: dict[str | None, dict[str, LazyLedger]] = {}  # by recipient, or for all, and by kind
        self._waits = Shelf(Ledger)
        self._answers = Shelf(Ledger)
        self._answers_all: LazyLedger | None = None  # made when somebody first drains for all
        self._leases = Ledger()
        self._unfinished_count = 0
        self._ready_count = 0
        self._following_count = 0
        self._parked_count = 0
        self._woken_count = 0
        self._pending_count = 0
        self._answer_count = 0
        self._leases_of: dict[str, Ledger] = {}  # by party, made when it first lists them
        self._lease_tasks: dict[str, Key] = {}
        self._unlisted: dict[Key, bool] = {}  # tasks that do not stand in these two yet: most leave before anybody asks
        self._sent_all = LazyLedger(self._is_sent)
        self._sent = Shelf(lambda: LazyLedger(self._is_sent))
        self._children = Shelf(Ledger)
        self._children_of = Shelf(Ledger)  # by parent and party
        self._dialogs = Shelf(lambda: LazyLedger(self._is_status))  # by sender and recipient, newest status last
        self._dialogs_sent = Shelf(lambda: LazyLedger(self._is_sent))
        self._slots = Ledger()
        self._slots_of = Shelf(Ledger)
        self._pieces: dict[str, dict[Key, None]] = {}  # what is in memory of all that belongs to a task
        self._late: dict[str, list[Key]] = {}
        self._pushes: dict[str, list[Key]] = {}  # by task
        self.sweeps: set[str] = set()  # runs that have something to forget
        self._signals = Shelf(Ledger)  # that wait, by run
        self._taken = Shelf(Ledger)  # of which only the key is left
        self.signed_head: SignedHead | None = None
        self.due_times = DueTimes()
        self.watched = False  # whether anybody waits for one of these:
        self.readied: list[tuple[str, str]] = []  # recipients with new work, and its kind
        self.answered: list[str] = []
        self.changed: list[Key] = []
        self.on_push: Callable[[str], None] | None = None  # told of tasks whose webhooks have something to hear

    # --- changing -----------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event], at: int, fresh: Key | None = None) -> None:
        """Fold the events of one commit. Nothing is known under a `fresh` key."""
        order = self.order
        records = self.records
        for event in events:
            order += 1
            key = event.key
            kind = type(event)
            old = placed = records.get(key)
            if kind is Sent:
                if placed is not None or (key != fresh and self.get(key) is not None):
                    self._end_life(key)
                    old = placed = None
            elif placed is None:
                old = self.get(key)
            new = EVOLVE[kind](old, event, order, at)
            if new is None:
                self._remove(key)
                continue
            records[key] = new
            if type(placed) is TaskRecord:
                self._move_task(key, placed, new)  # type: ignore[arg-type]  # a task stays a task
            elif kind is Sent:
                self._add_task(key, new)  # type: ignore[arg-type]
            else:
                self._place(key, placed, new)
        self.order = order
        self.at = at

    def _end_life(self, key: Key) -> None:
        """An id that was forgotten is used anew: what belonged to its former life goes with it, wherever it lies."""
        resting = [] if self.base is None else self.base.pieces_of(key)
        for piece in (*self._pieces.get(key, ()), *resting):
            self._remove(piece)
        self._remove(key)

    def replay(self, events: Iterable[Event], at: int, first: int) -> None:
        """Fold a commit read from disk. A record that is newer than an event has seen it already. Of records that are
        gone, the events are passed over: the beginning of their story may have been dropped, and the base may have let
        go of them since."""
        order = first
        for event in events:
            old = self.get(event.key)
            seen = old is not None and type(old) is not Tombstone and old.order >= order
            if not seen and not self._is_unknown(event, old) and not self._is_over(event, order):
                self.order = order - 1
                self.apply((event,), at, event.key if old is None else None)
            order += 1
        self.order = max(order - 1, first)
        self.at = at

    def _is_over(self, event: Event, order: int) -> bool:
        """Whether it tells of what belonged to a task that is gone, or to a former life of its id."""
        if not event.key.startswith(PIECE_PREFIXES):
            return False
        owner = self.get(owner_of(event.key, event))
        return type(owner) is not TaskRecord or owner.sent_order > order

    def _is_unknown(self, event: Event, old: Record | Tombstone | None) -> bool:
        """Whether it goes on with a story whose beginning was dropped."""
        return type(event) not in CREATING and (old is None or type(old) is Tombstone)

    def restore(self, key: Key, record: Record) -> None:
        """Take a record as it was saved, in any order: ledgers find its place."""
        self.gone.discard(key)
        self.records[key] = record
        self._place(key, None, record)

    def _place(self, key: Key, old: Record | Tombstone | None, new: Record) -> None:
        if type(old) is SendKey:
            self._forget_piece(key, old)  # one that is free again may lead to another task
            old = None
        if old is None and type(new) in OF_A_TASK:
            self._pieces.setdefault(owner_of(key, new), {})[key] = None
        if type(new) is TaskRecord:
            if type(old) is TaskRecord:
                self._move_task(key, old, new)
            else:
                self._add_task(key, new)
        elif type(new) is Part:
            self._move_answer(key, old if type(old) is Part else None, new)
            if new.answer_for is None:
                self.rested.append(key)
        elif type(new) is Slot:
            self._move_slot(key, old if type(old) is Slot else None, new)
        elif type(new) is Late:
            if old is None:
                self._late.setdefault(_late_task(key), []).append(key)
            self.rested.append(key)
        elif type(new) in _RESTING:
            self.rested.append(key)
        elif type(new) is Run:
            self._place_run(key, new)
        elif type(new) is Signal:
            self._move_signal(key, old if type(old) is Signal else None, new)
        elif type(new) is Push:
            self._move_push(key, old if type(old) is Push else None, new)
        elif type(new) is SignedHead:
            self.signed_head = new
        else:
            super()._place(key, old, new)

    def _add_task(self, key: Key, new: TaskRecord) -> None:
        order = new.sent_order
        self._unlisted[key] = True
        if len(self._unlisted) > _UNLISTED_MAX:
            self._list_sent(_LIST_AT_ONCE)
        if new.task.parent is not None:
            self._children.add(new.task.parent, order, key)
            for party in _parties(new):
                self._children_of.add(_branch(new.task.parent, party), order, key)
        if new.ready_for is not None:
            self._add_ready(key, new.ready_for, new.ready_order, kind_in(new.task))
        if new.protocol:
            self._dialogs_sent.add(_names(new.sender, new.recipient), order, key)
            if is_listed(new):
                self._dialogs.add(_names(new.sender, new.recipient), new.status_order, key)
        if new.due_ms is not None:
            self.due_times.set(key, new.due_ms)
        if new.outcome is None:
            self._unfinished_count += 1
            if new.is_run:
                self._count_parked(None, new)
        elif new.state is _RESULT_PENDING:
            self._pending_count += 1
        if new.waits_on is not None:
            self._following_count += 1
            self._waits.add(new.waits_on, new.ready_order, key)
        if new.outcome is not None or new.lease is not None or new.lease_history:
            self._restore_task(key, new)
        if self.watched:
            self.changed.append(key)

    def _list_sent(self, limit: int | None = None) -> None:
        """Let the first of those that are not listed yet be, or all."""
        for key in list(islice(self._unlisted, limit)):
            del self._unlisted[key]
            record = self.records[key]
            assert type(record) is TaskRecord
            self._sent_all.add(record.sent_order, key)
            for party in _parties(record):
                self._sent.add(party, record.sent_order, key)

    def _sent_by(self, agent: str | None) -> LazyLedger:
        """What an agent sent or received, or all that was sent, as far as it is in memory."""
        if self._unlisted:
            self._list_sent()
        return self._sent_all if agent is None else self._sent.get(agent)

    def _count_parked(self, old: TaskRecord | None, new: TaskRecord) -> None:
        for record, by in ((old, -1), (new, 1)):
            if record is not None and record.state is _PARKED:
                self._parked_count += by
                self._woken_count += by if record.ready_for is not None else 0

    def _add_ready(self, key: Key, recipient: str, order: int, kind: str) -> None:
        self._ready_count += 1
        self._ready.add(recipient, order, key)
        if self._ready_all is not None:
            self._ready_all.add(order, key)
        if self._ready_of:
            for queues in (self._ready_of.get(recipient), self._ready_of.get(None)):
                if queues is not None:
                    self._queue(queues, key, order, kind)
        if self.watched:
            self.readied.append((recipient, kind))

    def _is_status(self, key: Key, order: int) -> bool:
        record = self.records.get(key)
        return type(record) is TaskRecord and record.status_order == order and is_listed(record)

    def _restore_task(self, key: Key, new: TaskRecord) -> None:
        """What a task that comes back from disk has beyond a fresh one."""
        for lease_id in new.lease_history:
            self._lease_tasks[lease_id] = key
        if new.lease is not None:
            self._lease_tasks[new.lease.lease_id] = key
            self._add_lease(key, new, new.lease.seen_order)
        self._move_answer(key, None, new)
        self._rest_task(key, new)

    def _is_ready(self, key: Key, order: int) -> bool:
        record = self.records.get(key)
        return type(record) is TaskRecord and record.ready_for is not None and record.ready_order == order

    def _is_pending(self, key: Key, order: int) -> bool:
        record = self.records.get(key)
        return isinstance(record, (TaskRecord, Part)) and record.answer_for is not None and record.answer_order == order

    def _is_sent(self, key: Key, order: int) -> bool:
        record = self.records.get(key)
        return type(record) is TaskRecord and record.sent_order == order

    def _rest_task(self, key: Key, new: TaskRecord) -> None:
        if new.cascade is _CASCADING:
            self.cascades.add(key)
        elif self.cascades:
            self.cascades.discard(key)
        if at_rest(new):
            self.rested.append(key)

    def _move_task(self, key: Key, old: TaskRecord, new: TaskRecord) -> None:
        if old.ready_for is not None:
            if new.ready_for is None:
                self._ready_count -= 1
                self._ready.ledgers[old.ready_for].remove(old.ready_order)
                if self._ready_all is not None:
                    self._ready_all.lose()
                if self._ready_of:
                    self._unqueue(old.ready_for, kind_in(old.task))
        elif new.ready_for is not None:
            self._add_ready(key, new.ready_for, new.ready_order, kind_in(new.task))
        if old.waits_on is not None and new.waits_on is None:
            self._following_count -= 1
            self._waits.ledgers[old.waits_on].remove(old.ready_order)
        if old.lease is not new.lease:
            self._move_lease(key, old, new)
        if old.is_run:
            self._count_parked(old, new)
        if new.protocol:
            self._move_dialog(key, old, new)
        if old.due_ms != new.due_ms:
            self.due_times.set(key, new.due_ms)
        if new.outcome is not None:
            if old.outcome is None:
                self._unfinished_count -= 1
            self._pending_count += (new.state is _RESULT_PENDING) - (old.state is _RESULT_PENDING)
            self._move_answer(key, old, new)
            self._rest_task(key, new)
        if self.watched and (old.generation != new.generation or old.cancel_reason != new.cancel_reason):
            self.changed.append(key)
        if key in self._pushes and (old.generation != new.generation or old.shown != new.shown):
            self._tell_pushes(key)

    def _move_dialog(self, key: Key, old: TaskRecord, new: TaskRecord) -> None:
        was, now = is_listed(old), is_listed(new)
        if was and now and old.status_order == new.status_order:
            return
        if now:
            self._dialogs.add(_names(new.sender, new.recipient), new.status_order, key)
        if was:
            self._dialogs.ledgers[_names(new.sender, new.recipient)].lose()

    def _move_lease(self, key: Key, old: TaskRecord, new: TaskRecord) -> None:
        if old.lease is not None:
            self._leases.remove(old.lease.seen_order)
            for ledger in self._listed_by(old) if self._leases_of else ():
                ledger.remove(old.lease.seen_order)
            if old.lease_history and old.lease_history[0] != new.lease_history[0]:
                self._lease_tasks.pop(old.lease_history[0], None)
            if new.lease is None and len(old.lease_history) == len(new.lease_history) < LEASES_REMEMBERED_MAX:
                self._lease_tasks.pop(old.lease.lease_id, None)  # given back: nobody ever heard of it
        if new.lease is not None:
            self._add_lease(key, new, new.lease.seen_order)
            self._lease_tasks[new.lease.lease_id] = key

    def _add_lease(self, key: Key, record: TaskRecord, order: int) -> None:
        self._leases.add(order, key)
        for ledger in self._listed_by(record) if self._leases_of else ():
            ledger.add(order, key)

    def _listed_by(self, record: TaskRecord) -> list[Ledger]:
        return [self._leases_of[party] for party in _parties(record) if party in self._leases_of]

    def _leases_for(self, agent: str) -> Ledger:
        """Made from what the agent itself sent and received: what others hold costs it nothing."""
        ledger = self._leases_of.get(agent)
        if ledger is None:
            ledger = self._leases_of[agent] = Ledger()
            tasks = self._tasks(self._sent_by(agent).after(0), len(self.records))
            for order, key in sorted((task.lease.seen_order, task.task.id) for task in tasks if task.lease is not None):
                ledger.add(order, key)
        return ledger

    def _move_answer(self, key: Key, old: TaskRecord | Part | None, new: TaskRecord | Part) -> None:
        was = None if old is None else old.answer_for
        if was is None:
            if new.answer_for is not None:
                self._answer_count += 1
                self._answers.add(new.answer_for, new.answer_order, key)
                if self._answers_all is not None:
                    self._answers_all.add(new.answer_order, key)
                if self.watched:
                    self.answered.append(new.answer_for)
        elif new.answer_for is None:
            self._answer_count -= 1
            self._answers.ledgers[was].remove(new.answer_order)
            if self._answers_all is not None:
                self._answers_all.lose()

    def _move_slot(self, key: Key, old: Slot | None, new: Slot) -> None:
        if old is not None and old.result is not None:
            self._remove_slot(old)
        if new.result is not None:
            self._slots.add(new.order, key)
            for party in _parties(new.cache_key):
                self._slots_of.add(party, new.order, key)
        if (None if old is None else old.due_ms) != new.due_ms:
            self.due_times.set(key, new.due_ms)
        if at_rest(new):
            self.rested.append(key)

    def _remove_slot(self, slot: Slot) -> None:
        self._slots.remove(slot.order)
        for party in _parties(slot.cache_key):
            self._slots_of.ledgers[party].remove(slot.order)

    def _place_run(self, key: Key, new: Run) -> None:
        if new.swept < new.floor or (new.closed and not new.is_swept):
            self.sweeps.add(new.task_id)
        else:
            self.sweeps.discard(new.task_id)
        if at_rest(new):
            self.rested.append(key)

    def _move_signal(self, key: Key, old: Signal | None, new: Signal) -> None:
        task_id = key.split(":")[1]
        if old is not None and not old.taken:
            self._signals.ledgers[task_id].remove(old.order)
        if new.taken:
            self._taken.add(task_id, new.order, key)
        else:
            self._signals.add(task_id, new.order, key)

    def _forget_signal(self, key: Key, signal: Signal) -> None:
        task_id = key.split(":")[1]
        shelf = self._taken if signal.taken else self._signals
        shelf.ledgers[task_id].remove(signal.order)

    def _move_push(self, key: Key, old: Push | None, new: Push) -> None:
        task_id = pushed_task(key)
        if old is None:
            self._pushes.setdefault(task_id, []).append(key)
        if old is None or old.since != new.since:
            self._tell_pushes(task_id)

    def _remove_push(self, key: Key) -> None:
        task_id = pushed_task(key)
        self._pushes[task_id].remove(key)
        if not self._pushes[task_id]:
            del self._pushes[task_id]
        self._tell_pushes(task_id)

    def _tell_pushes(self, task_id: str) -> None:
        if self.on_push is not None:
            self.on_push(task_id)

    def _move_grant(self, key: Key, old: Grant | None, new: Grant) -> None:
        super()._move_grant(key, old, new)
        if new.revoked_ms is not None:
            self.rested.append(key)
        if (None if old is None else old.due_ms) != new.due_ms:
            self.due_times.set(key, new.due_ms)

    def _remove(self, key: Key) -> None:
        """A slot was closed, a webhook dropped or a card withdrawn: what ends by an event."""
        self.due_times.set(key, None)
        self.forget(key)
        if self.base is not None:
            self.gone.add(key)

    def quiet(self) -> None:
        """Nobody is to be woken by what was applied so far."""
        self.readied.clear()
        self.answered.clear()
        self.changed.clear()

    # --- letting go ---------------------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        """Take a record at rest out of memory and out of every listing."""
        record = self.records.pop(key, None)
        if type(record) is TaskRecord:
            self._forget_task(key, record)
            return
        if type(record) in OF_A_TASK:
            self._forget_piece(key, record)
        if type(record) is Slot and record.result is not None:
            self._remove_slot(record)
        elif type(record) is Push:
            self._remove_push(key)
        elif type(record) is Signal:
            self._forget_signal(key, record)
        elif type(record) is Run:
            self.sweeps.discard(record.task_id)
        elif type(record) is Part:
            self._forget_answer(record)
        elif type(record) is Card:
            self._drop_card(record)
        elif type(record) is Late:
            task_id = _late_task(key)
            keys = self._late[task_id]
            keys.remove(key)
            if not keys:
                del self._late[task_id]

    def _forget_task(self, key: Key, record: TaskRecord) -> None:
        if self.cascades:
            self.cascades.discard(key)
        if not self._unlisted.pop(key, False):
            self._sent_all.lose()
            for party in _parties(record):
                self._sent.ledgers[party].lose()
        if record.protocol:
            self._dialogs_sent.ledgers[_names(record.sender, record.recipient)].lose()
            if is_listed(record):
                self._dialogs.ledgers[_names(record.sender, record.recipient)].lose()
        if record.task.parent is not None:
            self._children.ledgers[record.task.parent].remove(record.sent_order)
            for party in _parties(record):
                self._children_of.ledgers[_branch(record.task.parent, party)].remove(record.sent_order)
        for lease_id in record.lease_history:
            self._lease_tasks.pop(lease_id, None)

    def _forget_piece(self, key: Key, record: object) -> None:
        owner = owner_of(key, record)
        keys = self._pieces[owner]
        del keys[key]
        if not keys:
            del self._pieces[owner]

    def _forget_answer(self, part: Part) -> None:
        if part.answer_for is not None:
            self._answer_count -= 1
            self._answers.ledgers[part.answer_for].remove(part.answer_order)
            if self._answers_all is not None:
                self._answers_all.lose()

    def bury(self, ctx: Context) -> tuple[int, int]:
        """For an engine without a base: turn what is past retention into tombstones, and drop what is past those."""
        buried = 0
        for key in self.rested:
            record = self.records.get(key)
            if type(record) is TaskRecord and at_rest(record) and not is_retained(record, ctx):
                buried += 1
                self.forget(key)
                self.records[key] = tombstone_of(record)
        self.forget_orphans()
        stones = {key: record for key, record in self.records.items() if type(record) is Tombstone}
        self.rested = deque(key for key in self.rested if key in self.records and key not in stones)
        forgotten = [key for key, stone in stones.items() if is_forgotten(stone, ctx)]
        for key in forgotten:
            del self.records[key]
        return buried, len(forgotten)

    def forget_orphans(self) -> None:
        """What belongs to a task goes with it, also what never rests; and nothing of a former life stays."""
        for task_id, keys in list(self._pieces.items()):
            owner = self.get(task_id)
            since = owner.sent_order if type(owner) is TaskRecord else self.order + 1
            for key in [key for key in keys if self.records[key].order < since]:
                self.forget(key)

    # --- the view -----------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        in_flight = len(self._leases)
        return Counts(
            queued=self._unfinished_count - in_flight - self._parked_count,
            ready=self._ready_count - self._woken_count,
            following=self._following_count,
            in_flight=in_flight,
            result_pending=self._pending_count,
            answers=self._answer_count,
            parked=self._parked_count,
            woken=self._woken_count,
        )

    def depth(self, recipient: str) -> int:
        return len(self._ready.get(recipient))

    def deep(self, over: int) -> Sequence[tuple[TaskRecord, int]]:
        return [
            (self.ready(recipient, 1)[0], len(ledger))
            for recipient, ledger in self._ready.ledgers.items()
            if len(ledger) > max(over, 0)
        ]

    def orders_before(self, events: Sequence[Event]) -> Sequence[int]:
        """For each event, which one last touched its record: 0 if none did. Nothing at all when that goes for all. A
        task begins with its sending, whoever had its id before."""
        records = self.records
        if len(events) == 1:
            event = events[0]
            if type(event) is Sent:
                return ()
            record = records.get(event.key)
            if type(record) is TaskRecord:
                return (record.order,)
        orders = []
        found = False
        for event in events:
            record = records.get(event.key)
            if record is None and type(event) not in CREATING:
                record = self.get(event.key)
            if record is None or type(record) is Tombstone or type(event) is Sent:
                orders.append(0)
            else:
                orders.append(record.order)
                found = True
        return orders if found else ()

    def get(self, key: Key) -> Record | Tombstone | None:
        record = self.records.get(key)
        if record is None and self.base is not None and not self._is_gone(key):
            return self.base.get(key)
        return record

    def _is_gone(self, key: Key) -> bool:
        """Whatever the base says."""
        return key in self.gone or key in self.going

    def _tasks(self, keys: Iterable[Key], limit: int) -> list[TaskRecord]:
        found: list[TaskRecord] = []
        for key in keys:
            if len(found) >= limit:
                break
            record = self.records[key]
            assert type(record) is TaskRecord
            found.append(record)
        return found

    def task_of_lease(self, lease_id: str) -> Key | None:
        key = self._lease_tasks.get(lease_id)
        if key is None and self.base is not None:
            resting = self.base.task_of_lease(lease_id)
            return None if resting in self.records else resting  # of one in memory, all leases are known
        return key

    def ready(self, recipient: str | None, limit: int) -> Sequence[TaskRecord]:
        ledger = self._all_ready() if recipient is None else self._ready.get(recipient)
        return [self.records[key] for key in ledger.oldest(limit)]  # type: ignore[misc]  # only tasks are ready

    def ready_of(self, recipient: str | None, kinds: frozenset[str], limit: int) -> Sequence[TaskRecord]:
        queues = self._queues_of(recipient)
        found = [task for kind in kinds if kind in queues for task in self._tasks(queues[kind].oldest(limit), limit)]
        return sorted(found, key=_ready_order)[:limit]

    def _queues_of(self, recipient: str | None) -> dict[str, LazyLedger]:
        """What is ready, by its kind: kept from the first time on that somebody receives some kinds only."""
        queues = self._ready_of.get(recipient)
        if queues is None:
            queues = self._ready_of[recipient] = {}
            ledger = self._all_ready() if recipient is None else self._ready.get(recipient)
            for record in self._tasks(ledger.after(0), len(self.records)):
                self._queue(queues, record.task.id, record.ready_order, kind_in(record.task))
        return queues

    def _queue(self, queues: dict[str, LazyLedger], key: Key, order: int, kind: str) -> None:
        if kind not in queues:
            queues[kind] = LazyLedger(self._is_ready)
        queues[kind].add(order, key)

    def _unqueue(self, recipient: str, kind: str) -> None:
        for queues in (self._ready_of.get(recipient), self._ready_of.get(None)):
            if queues is not None:
                queues[kind].lose()
                if not len(queues[kind]):
                    del queues[kind]

    def _all_ready(self) -> LazyLedger:
        if self._ready_all is None:
            self._ready_all = LazyLedger(self._is_ready)
            tasks = (record for record in self.records.values() if type(record) is TaskRecord)
            for record in sorted((r for r in tasks if r.ready_for is not None), key=lambda r: r.ready_order):
                self._ready_all.add(record.ready_order, record.task.id)
        return self._ready_all

    def _all_answers(self) -> LazyLedger:
        if self._answers_all is None:
            self._answers_all = LazyLedger(self._is_pending)
            items = ((key, record) for key, record in self.records.items() if isinstance(record, (TaskRecord, Part)))
            waiting = [(r.answer_order, key) for key, r in items if r.answer_for is not None]
            for order, key in sorted(waiting):
                self._answers_all.add(order, key)
        return self._answers_all

    def answers(self, peer: str | None, limit: int) -> Sequence[Key]:
        return (self._all_answers() if peer is None else self._answers.get(peer)).oldest(limit)

    def followers(self, slot: Key, limit: int) -> Sequence[TaskRecord]:
        return self._tasks(self._waits.get(slot).after(0), limit)

    def children(self, parent: str, after: int, limit: int, agent: str | None = None) -> Sequence[TaskRecord]:
        ledger = self._children.get(parent) if agent is None else self._children_of.get(_branch(parent, agent))
        found = self._tasks(ledger.after(after), limit)
        if self.base is None:
            return found
        resting = (child for child in self.base.children(parent, after, agent) if child.task.id not in self.records)
        return sorted([*found, *islice(resting, limit)], key=_sent_order)[:limit]

    def leases(self, after: int, limit: int, agent: str | None = None) -> Sequence[TaskRecord]:
        ledger = self._leases if agent is None else self._leases_for(agent)
        return self._tasks(ledger.after(after), limit)

    def due(self, now: int, limit: int) -> Sequence[Key]:
        return self.due_times.until(now, limit)

    def tasks(self, agent: str | None, after: int, limit: int) -> Sequence[TaskRecord]:
        return self._tasks(self._sent_by(agent).after(after), limit)

    def recent(self, agent: str | None, before: int | None, limit: int) -> Sequence[TaskRecord]:
        found = self._tasks(self._sent_by(agent).newest(before), limit)
        if self.base is None:
            return found
        resting = (record for record in self.base.recent(agent, before) if record.task.id not in self.records)
        return sorted([*found, *islice(resting, limit)], key=_sent_order, reverse=True)[:limit]

    def pending(self, agent: str | None, after: int, limit: int) -> Sequence[Key]:
        ledger = self._all_answers() if agent is None else self._answers.get(agent)
        return list(islice(ledger.after(after), limit))

    def slots(self, after: int, limit: int, agent: str | None = None) -> Sequence[tuple[Key, Slot]]:
        found: list[tuple[Key, Slot]] = []
        for key in (self._slots if agent is None else self._slots_of.get(agent)).after(after):
            if len(found) >= limit:
                break
            slot = self.records[key]
            assert type(slot) is Slot
            found.append((key, slot))
        if self.base is None:
            return found
        resting = ((k, s) for k, s in self.base.slots(after, agent) if k not in self.records and not self._is_gone(k))
        return sorted([*found, *islice(resting, limit)], key=lambda pair: pair[1].order)[:limit]

    def late(self, task_id: str) -> Sequence[Late]:
        found = [record for key in self._late.get(task_id, ()) if type(record := self.records[key]) is Late]
        if self.base is None:
            return found
        resting = self.base.late(task_id)
        return [*(late for key, late in resting if key not in self.records and not self._is_gone(key)), *found]

    def pieces(self, prefix: Key, first: int, last: int) -> Sequence[tuple[int, Record]]:
        records = self.records
        found: dict[int, Record] = {}
        missing: list[int] = []
        for number in range(first, last + 1):
            key = f"{prefix}{number}"
            record = records.get(key)
            if record is None:
                if not self._is_gone(key):
                    missing.append(number)
            elif not isinstance(record, Tombstone):
                found[number] = record
        if missing and self.base is not None:
            whole = len(missing) * _SHARE_WORTH_LISTING >= last
            resting = self.base.pieces(prefix, frozenset(missing)) if whole else self._each(prefix, missing)
            found.update(resting)
        return sorted(found.items())

    def _each(self, prefix: Key, numbers: Iterable[int]) -> Iterator[tuple[int, Record]]:
        for number in numbers:
            record = self.get(f"{prefix}{number}")
            if record is not None and not isinstance(record, Tombstone):
                yield number, record

    def dialogs(self, sender: str, recipient: str, before: int, limit: int) -> Sequence[TaskRecord]:
        found = self._tasks(self._dialogs.get(_names(sender, recipient)).newest(before), limit)
        if self.base is None:
            return found
        resting = self.base.dialogs(sender, recipient, before)
        unseen = islice((record for record in resting if record.task.id not in self.records), limit)
        return sorted([*found, *unseen], key=_status_order, reverse=True)[:limit]

    def moved_dialogs(self, sender: str, recipient: str, since: int, after: int, limit: int) -> Sequence[TaskRecord]:
        found = self._tasks(self._moved(self._dialogs_sent.get(_names(sender, recipient)), since, after), limit)
        if self.base is None:
            return found
        resting = self.base.moved_dialogs(sender, recipient, since, after)
        unseen = islice((record for record in resting if record.task.id not in self.records), limit)
        return sorted([*found, *unseen], key=_sent_order)[:limit]

    def _moved(self, sent: LazyLedger, since: int, after: int) -> Iterator[Key]:
        for key in sent.after(after):
            record = self.records[key]
            assert type(record) is TaskRecord
            if record.sent_order > since:
                return
            if record.status_order > since and is_listed(record):
                yield key

    def signals(self, task_id: str, limit: int, taken: bool = False) -> Sequence[Signal]:
        keys = list(islice(self._signals.get(task_id).after(0), limit))
        if taken:
            keys += islice(self._taken.get(task_id).after(0), limit - len(keys))
        return self._kept(Signal, keys)

    def signal_count(self, task_id: str) -> int:
        return len(self._signals.get(task_id))

    def heard(self, task_id: str, limit: int) -> Sequence[Signal]:
        return self._kept(Signal, islice(self._taken.get(task_id).after(0), limit))

    def pushes(self, task_id: str) -> Sequence[Push]:
        return sorted(self._kept(Push, self._pushes.get(task_id, ())), key=_since)

    def pushed_tasks(self) -> list[str]:
        """Those with webhooks."""
        return list(self._pushes)

    def dialog_count(self, sender: str, recipient: str) -> int:
        count = len(self._dialogs.get(_names(sender, recipient)))
        return count if self.base is None else count + self.base.dialog_count(sender, recipient)

    def unsettled(self) -> list[Key]:
        """Slots whose result has not reached all their followers: work that a crash left behind."""
        return [key for key in self._waits.names() if type(slot := self.get(key)) is Slot and slot.result is not None]


def _parties(of: TaskRecord | CacheKey) -> tuple[str, ...]:
    return (of.sender,) if of.sender == of.recipient else (of.sender, of.recipient)


def _branch(parent: str, party: str) -> str:
    return f"{parent}/{party}"


def _ready_order(record: TaskRecord) -> int:
    return record.ready_order


def _sent_order(record: TaskRecord) -> int:
    return record.sent_order


def _status_order(record: TaskRecord) -> int:
    return record.status_order


def _since(push: Push) -> int:
    return push.since


def _names(sender: str, recipient: str) -> str:
    return f"{sender}/{recipient}"


def _late_task(key: Key) -> str:
    return key[len(LATE_PREFIX) :].partition(":")[0]
