"""What a transaction has decided, as the arguments of the functions that save it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from covenant.model.record import Key, TaskRecord, Tombstone
from covenant.store.postgres.array import flags, numbers, texts
from covenant.store.postgres.chain import Chain
from covenant.store.postgres.line import marked
from covenant.store.postgres.moved import Moved
from covenant.store.postgres.rows import KIND_NAMES, READY, SHELF_NAMES, Place, encoded, is_open, note_of, task_row
from covenant.store.postgres.view import Working
from covenant.store.postgres.want import TAKEN

# Arrays go out as text, which the server reads faster than the driver writes its own form of them; bodies do not.
_ROWS: Final = """$6::text::text[], $7::text::"char"[], $8::text::bigint[], $9,
    $10::text::text[], $11::text::"char"[], $12::text::bigint[], $13, $14::text::bigint[], $15::text::text[],
    $16::text::"char"[], $17::text::text[], $18::text::bigint[], $19::text::text[], $20::text::text[],
    $21::text::"char"[], $22::text::text[], $23::text::bigint[], $24::text::text[],
    $25::text::"char"[], $26::text::text[], $27::text::bigint[], $28::text::text[],
    $29::text::"char"[], $30::text::text[], $31::text::bigint[], $32::text::text[],
    $33::text::bigint[], $34::text::text[], $35::text::text[], $36::text::text[], $37::text::text[],
    $38::text::boolean[], $39::text::bigint[], $40::text::bigint[], $41::text::boolean[]"""
_FIRST_ROWS: Final = re.sub(r"\$(\d+)", lambda found: f"${int(found[1]) - 5}", _ROWS)
SAVE: Final = f"""select save($47, $48, $49,
    $50::text::"char"[], $51::text::text[], $52::text::bigint[], $53::text::integer[], $1, $2, $3, $4, $5,
    {_ROWS}, $42, $43::text::bigint[], $44::text::bigint[], $45::text::text[], $46)"""
APPEND: Final = "select append($1, $2, $3, $4, $5, $6::text::text[], $7, $8, $9, $10, $11)"
PUT: Final = f"select put({_FIRST_ROWS})"
SETTLE: Final = f"select settle($1, $2, $3, $4, $5, {_ROWS})"


ON_BLOCK: Final = 46  # where among the values of `save` it says on which block it counts, or 0
APPEND_ON_BLOCK: Final = 4  # likewise for `append`


def saved(work: Working, moved: Moved, chain: Chain, trust: int) -> Sequence[Any]:
    """All but the lane and the hash that it builds on."""
    return chain.mark.decode(), chain.lines[-1].last, trust, *put(work, moved), *_logged(chain)


def put(work: Working, moved: Moved) -> Sequence[Any]:
    """What the tables are to show."""
    rows = Rows(moved)
    rows.add(work, sorted(work.touched))
    return rows.values(work)


def appended(chain: Chain, block: int, fresh: Sequence[Key]) -> Sequence[Any]:
    """The same for what is in the log alone: nobody has drawn numbers since, so there is no gap in them."""
    (row,) = chain.rows
    lines = b"".join(row.raws)
    return chain.mark.decode(), block, texts(fresh), row.first, row.last, chain.lines[-1].at, marked(row.marks), lines


def _logged(chain: Chain) -> Sequence[Any]:
    """What the log is to tell."""
    rows = chain.rows
    return (
        chain.lines[-1].at,
        numbers([row.first for row in rows]),
        numbers([row.last for row in rows]),
        texts([marked(row.marks) for row in rows]),
        [b"".join(row.raws) for row in rows],
    )


def on_loaded() -> Sequence[Any]:
    """What a transaction counts on that has loaded what it decided on."""
    return 0, 0, 0, "{}", "{}", "{}", "{}"


def on_remembered(block: int, space: int, trust: int, moved: Moved) -> Sequence[Any]:
    """What one counts on that has not: what it took from a shelf stood there before all others."""
    heads: dict[tuple[bytes, str], tuple[int, int]] = {}
    for (shelf, name, order), _ in moved.all_left():
        if shelf in TAKEN:
            last, count = heads.get((shelf, name), (0, 0))
            heads[shelf, name] = (max(last, order), count + 1)
    return (
        block,
        space,
        trust,
        texts([shelf.decode() for shelf, _ in heads]),
        texts([name for _, name in heads]),
        numbers([last for last, _ in heads.values()]),
        numbers([count for _, count in heads.values()]),
    )


class Rows:
    """What the tables are to show, column by column: it may be put together little by little."""

    def __init__(self, moved: Moved) -> None:
        self.moved = moved
        self._new = _Records()
        self._old = _Records()
        self._were_ords: list[int] = []  # what those that have changed have to be
        self._gone: list[Key] = []
        self._tasks: list[tuple[int, str, str, str, str | None, bool]] = []
        self._past_tasks: list[int] = []  # of a former life
        self._turned: list[tuple[int, bool]] = []  # closed, or opened again

    def add(self, work: Working, keys: Iterable[Key]) -> None:
        """What has become of these, without their places: who has made `moved` of all of them has noted those."""
        were, records, sizes = work.were, work.records, work.sizes
        for key in keys:
            was, now = were.get(key), records.get(key)
            if now is None:
                if was is not None:
                    self._gone.append(key)
                continue
            kind = type(now)
            if kind is TaskRecord:
                self._add_task(key, was, now)
            if was is None:
                rows = self._new
            else:
                rows = self._old
                self._were_ords.append(was.order)
            body = encoded(now)
            sizes[key] = len(body)
            rows.keys.append(key)
            rows.kinds.append(KIND_NAMES[kind])
            rows.ords.append(now.order)
            rows.bodies.append(body)

    def add_with_places(self, work: Working, keys: Sequence[Key]) -> None:
        self.add(work, keys)
        work.note_moved(keys, self.moved)

    def _add_task(self, key: Key, was: Any, now: Any) -> None:
        if type(was) is TaskRecord and was.sent_order == now.sent_order:
            if was.state is not now.state and is_open(was) is not is_open(now):
                self._turned.append((now.sent_order, is_open(now)))
            return
        self._tasks.append(task_row(key, now))
        if isinstance(was, (TaskRecord, Tombstone)):
            self._past_tasks.append(was.sent_order if isinstance(was, TaskRecord) else was.order)

    def values(self, work: Working) -> Sequence[Any]:
        moved = self.moved
        return (
            *self._new.values(),
            *self._old.values(),
            numbers(self._were_ords),
            texts(self._gone),
            *_places(moved.taken),
            _notes(moved.taken, work),
            *_places(moved.left),
            *_places([(was, key) for was, _, key in moved.moves]),
            *_moved_to([(now, key) for _, now, key in moved.moves], work),
            *self._task_values(),
        )

    def _task_values(self) -> Sequence[str]:
        orders, keys, senders, recipients, parents, opens = zip(*self._tasks, strict=True) if self._tasks else ((),) * 6
        return (
            numbers(orders),
            texts(keys),
            texts(senders),
            texts(recipients),
            texts(parents),
            flags(opens),
            numbers(self._past_tasks),
            numbers([order for order, _ in self._turned]),
            flags([is_so for _, is_so in self._turned]),
        )


class _Records:
    __slots__ = ("bodies", "keys", "kinds", "ords")

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.kinds: list[str] = []
        self.ords: list[int] = []
        self.bodies: list[bytes] = []

    def values(self) -> Sequence[Any]:
        return texts(self.keys), texts(self.kinds), numbers(self.ords), self.bodies


def _places(moved: Sequence[tuple[Place, Key]]) -> Sequence[str]:
    return (
        texts([SHELF_NAMES[place[0]] for place, _ in moved]),
        texts([place[1] for place, _ in moved]),
        numbers([place[2] for place, _ in moved]),
        texts([key for _, key in moved]),
    )


def _moved_to(moved: Sequence[tuple[Place, Key]], work: Working) -> Sequence[str]:
    return (*_places(moved)[:3], _notes(moved, work))


def _notes(taken: Sequence[tuple[Place, Key]], work: Working) -> str:
    return texts([note_of(place, work.records.get(key)) if place[0] == READY else None for place, key in taken])
