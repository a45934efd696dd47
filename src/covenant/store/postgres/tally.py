"""How much is open: counted in the listings, as many rows as are open and no more."""

from __future__ import annotations

from typing import Final

from covenant.store.postgres.reader import Reader
from covenant.store.postgres.rows import ANSWERS, DELAYED, ENDED, FOLLOWERS, HELD, PARKED, READY, decoded
from covenant.store.state import Counts, Tally

_COUNTED: Final = (READY, FOLLOWERS, HELD, ANSWERS, PARKED, DELAYED, ENDED)
_COUNT: Final = "select shelf, name, count(*) from place where shelf = any($1) group by shelf, name"
_PARTS: Final = "select count(*) as n from place where shelf = $1 and key like 'part:%'"
_SILENT: Final = """
    select r.kind, r.body from place p join record r on r.key = p.key
    where p.shelf = $1 and p.name = '' order by p.ord limit $2
"""


async def tallied(reader: Reader, leases_max: int) -> Tally:
    """With the leases whose holders have been silent for the longest."""
    counted: dict[bytes, int] = {}
    woken = 0
    for shelf, name, count in await reader.fetch(_COUNT, _COUNTED):
        counted[shelf] = counted.get(shelf, 0) + count
        woken += count if shelf == PARKED and name == "woken" else 0
    (parts,) = await reader.fetch(_PARTS, ANSWERS)
    held = await reader.fetch(_SILENT, HELD, leases_max)
    ready = counted.get(READY, 0) - woken
    following, delayed = counted.get(FOLLOWERS, 0), counted.get(DELAYED, 0)
    answers = counted.get(ANSWERS, 0)
    counts = Counts(
        queued=ready + following + delayed,
        ready=ready,
        following=following,
        in_flight=counted.get(HELD, 0),
        result_pending=answers - parts["n"] + counted.get(ENDED, 0),
        answers=answers,
        parked=counted.get(PARKED, 0),
        woken=woken,
    )
    return Tally(counts, [decoded(row["kind"], row["body"]) for row in held])
