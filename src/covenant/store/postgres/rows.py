"""Records as rows, and the listings in which each of them stands.

The places of a record are those that the embedded engines keep in their ledgers; here each is a row. An engine compares
the places before and after a commit and moves the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any, Final, TypeAlias

import msgspec

from covenant.model.card import Card
from covenant.model.peer import Grant, Peer
from covenant.model.push import Push, pushed_task
from covenant.model.record import (
    LATE_PREFIX,
    Cascade,
    Chunk,
    Horizon,
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
)
from covenant.model.run import Entry, Mark, Run, Signal, Step
from covenant.rules.lease import kind_in
from covenant.rules.sight import is_listed

READY: Final = b"R"  # by recipient, with the kind as a note
ANSWERS: Final = b"A"  # by the peer that drains them
FOLLOWERS: Final = b"W"  # by slot
SIGNALS: Final = b"I"  # that wait, by run
HEARD: Final = b"T"  # signals of which only the key is left, by run
HELD: Final = b"H"  # in flight, by the last sign of life
LEASE: Final = b"L"  # lease ids, each its own name
DUE: Final = b"D"  # by time
DIALOGS: Final = b"G"  # tasks of the A2A protocol by both parties, in the order of their last status
SLOTS: Final = b"S"  # cached results, all and by party
LATE: Final = b"V"  # by task
SEND_KEYS: Final = b"K"  # by task
PUSHES: Final = b"U"  # webhooks, by task
CASCADES: Final = b"C"  # cancels that are on their way down
SWEEPS: Final = b"B"  # runs that have something to forget
PARKED: Final = b"P"  # runs, by whether they were woken
DELAYED: Final = b"Y"
ENDED: Final = b"E"  # results that nobody drains
BURIED: Final = b"Z"  # tombstones, by when their task was resolved
TRUST: Final = b"N"  # peers, grants, cards and the horizon

SHELF_NAMES: Final = {bytes((code,)): chr(code) for code in range(128)}
_KIND_CHARS: Final = 256

Place: TypeAlias = tuple[bytes, str, int]

KINDS: Final[dict[type, bytes]] = {
    TaskRecord: b"t",
    Part: b"p",
    Said: b"s",
    Chunk: b"c",
    Push: b"u",
    Card: b"d",
    Late: b"l",
    Slot: b"o",
    Horizon: b"h",
    Peer: b"e",
    Grant: b"g",
    SignedHead: b"a",
    Run: b"r",
    Step: b"q",
    Entry: b"n",
    Mark: b"m",
    Signal: b"i",
    SendKey: b"k",
    Tombstone: b"z",
}
KIND_NAMES: Final = {kind: name.decode() for kind, name in KINDS.items()}
_encoder: Final = msgspec.json.Encoder()
_DECODERS: Final[dict[bytes, Callable[[bytes], Any]]] = {
    kind: msgspec.json.Decoder(record).decode for record, kind in KINDS.items()
}


def encoded(record: Record | Tombstone) -> bytes:
    return _encoder.encode(record)


def decoded(kind: bytes, body: bytes) -> Any:
    return _DECODERS[kind](body)


def note_of(place: Place, record: Record | Tombstone | None) -> str | None:
    """What is noted beside a place: of what is ready, the kind."""
    return kind_name(kind_in(record.task)) if place[0] == READY and type(record) is TaskRecord else None


def kind_name(kind: str) -> str:
    """A kind may hold a NUL, the texts of a database may not; and it may be longer than what an index holds."""
    if len(kind) > _KIND_CHARS:
        return f"\\#{sha256(kind.encode()).hexdigest()}"
    if "\0" not in kind and "\\" not in kind:
        return kind
    return kind.replace("\\", "\\\\").replace("\0", "\\0")


def places_of(key: Key, record: Record | Tombstone | None) -> list[Place]:
    if type(record) is TaskRecord:
        return _places_of_task(record)
    find = _PLACES.get(type(record))
    return [] if find is None else list(dict.fromkeys(find(key, record)))


def _places_of_task(record: TaskRecord) -> list[Place]:
    """The hottest function of this engine: it is called for every record before and after every commit."""
    sent, ready_for, state = record.sent_order, record.ready_for, record.state
    places: list[Place] = []
    if state is not TaskState.RESOLVED:
        if ready_for is not None:
            places.append((READY, ready_for, record.ready_order))
        lease = record.lease
        if lease is not None:
            places.append((HELD, "", lease.seen_order))
            places.append((LEASE, lease.lease_id, 0))
        if record.waits_on is not None:
            places.append((FOLLOWERS, record.waits_on, record.ready_order))
        if state is TaskState.PARKED:
            places.append((PARKED, "waiting" if ready_for is None else "woken", sent))
        elif state is TaskState.RESULT_PENDING:
            if record.answer_for is None:
                places.append((ENDED, "", sent))
        elif state is TaskState.QUEUED and ready_for is None and record.waits_on is None:
            places.append((DELAYED, "", sent))
    if record.answer_for is not None:
        places.append((ANSWERS, record.answer_for, record.answer_order))
    if record.due_ms is not None:
        places.append((DUE, "", record.due_ms))
    if record.lease_history:
        places += [(LEASE, lease_id, 0) for lease_id in record.lease_history]
    if record.protocol and is_listed(record):
        places.append((DIALOGS, f"{record.sender}/{record.recipient}", record.status_order))
    if record.cascade is Cascade.PENDING:
        places.append((CASCADES, "", sent))
    return places


def task_row(key: Key, record: TaskRecord) -> tuple[int, str, str, str, str | None, bool]:
    return record.sent_order, key, record.sender, record.recipient, record.task.parent, is_open(record)


def is_open(record: TaskRecord) -> bool:
    return record.state is not TaskState.RESOLVED


def standing(shelf: bytes, key: Key, record: Record | Tombstone | None) -> tuple[str, int] | None:
    """Where a record stands on one of the shelves that are loaded from their beginning."""
    if type(record) is TaskRecord:
        if shelf == READY:
            return None if record.ready_for is None else (record.ready_for, record.ready_order)
        if shelf == ANSWERS:
            return None if record.answer_for is None else (record.answer_for, record.answer_order)
        if shelf == FOLLOWERS:
            return None if record.waits_on is None else (record.waits_on, record.ready_order)
        return None
    found = [(name, order) for at, name, order in places_of(key, record) if at == shelf]
    return found[0] if found else None


def _of_part(key: Key, part: Part) -> Iterator[Place]:
    if part.answer_for is not None:
        yield ANSWERS, part.answer_for, part.answer_order


def _of_slot(key: Key, slot: Slot) -> Iterator[Place]:
    if slot.due_ms is not None:
        yield DUE, "", slot.due_ms
    if slot.result is not None:
        for name in ("", slot.cache_key.sender, slot.cache_key.recipient):
            yield SLOTS, name, slot.order


def _of_run(key: Key, run: Run) -> Iterator[Place]:
    if run.swept < run.floor or (run.closed and not run.is_swept):
        yield SWEEPS, "", 0


def _of_signal(key: Key, signal: Signal) -> Iterator[Place]:
    yield HEARD if signal.taken else SIGNALS, key.split(":")[1], signal.order


def _of_late(key: Key, late: Late) -> Iterator[Place]:
    yield LATE, key[len(LATE_PREFIX) :].partition(":")[0], late.order


def _of_send_key(key: Key, send_key: SendKey) -> Iterator[Place]:
    yield SEND_KEYS, send_key.task_id, 0


def _of_push(key: Key, push: Push) -> Iterator[Place]:
    yield PUSHES, pushed_task(key), push.since


def _of_grant(key: Key, grant: Grant) -> Iterator[Place]:
    yield TRUST, "", grant.order
    if grant.due_ms is not None:
        yield DUE, "", grant.due_ms


def _of_trusted(key: Key, record: Peer | Card | Horizon) -> Iterator[Place]:
    yield TRUST, "", record.order


def _of_tombstone(key: Key, stone: Tombstone) -> Iterator[Place]:
    yield BURIED, "", stone.resolved_ms


_PLACES: Final[dict[type, Callable[[Key, Any], Iterator[Place]]]] = {
    Part: _of_part,
    Slot: _of_slot,
    Run: _of_run,
    Signal: _of_signal,
    Late: _of_late,
    Push: _of_push,
    SendKey: _of_send_key,
    Grant: _of_grant,
    Peer: _of_trusted,
    Card: _of_trusted,
    Horizon: _of_trusted,
    Tombstone: _of_tombstone,
}
