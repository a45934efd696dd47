"""Listings as SQL: what each method of the view tells, in its order, with the records. None of them locks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from covenant.model.record import piece_ranges
from covenant.store.postgres import rows

Statement: TypeAlias = tuple[str, tuple[Any, ...]]

_ROW: Final = "r.key, r.kind, r.ord, r.body"
_FOREVER: Final = 2**62
_EACH_NAME: Final = """
    with recursive each_name as (
        (select name from place where shelf = $1 order by name limit 1)
        union all
        select (select p.name from place p where p.shelf = $1 and p.name > e.name order by p.name limit 1)
        from each_name e where e.name is not null
    )
"""
_EACH_RECIPIENT: Final = """
    with recursive each_name as (
        (select recipient as name from task where open order by recipient limit 1)
        union all
        select (select t.recipient from task t where t.open and t.recipient > e.name order by t.recipient limit 1)
        from each_name e where e.name is not null
    )
"""


def only_keys(statement: Statement) -> Statement:
    """Which ones they are, and nothing of them."""
    sql, values = statement
    return f"select q.key from ({sql}) q", values


def in_portion(statement: Statement, room: int) -> Statement:
    """All of them, with the bodies of the first: as many bytes as there is room for, and at least one."""
    sql, values = statement
    upto = "sum(octet_length(q.body)) over (rows unbounded preceding) - octet_length(q.body)"
    sql = f"select q.key, q.kind, case when {upto} <= ${len(values) + 1} then q.body end as body from ({sql}) q"
    return sql, (*values, room)


def of_shelf(shelf: bytes, name: str, after: int, limit: int) -> Statement:
    sql = f"""select {_ROW} from place p join record r on r.key = p.key
        where p.shelf = $1 and p.name = $2 and p.ord > $3 order by p.ord, p.key limit $4"""
    return sql, (shelf, name, after, limit)


def of_shelves(shelf: bytes, names: Sequence[str], limit: int, room: int) -> Statement:
    """The first ones on each, with their bodies as far as there is room for them; those of the first shelf always."""
    sql = """select u.name, r.key, r.kind, case when u.at = 1 or
            sum(octet_length(r.body)) over (order by u.at, p.ord, p.key rows unbounded preceding) <= $4
            then r.body end as body
        from unnest($2::text[]) with ordinality u(name, at) cross join lateral (
            select q.ord, q.key from place q where q.shelf = $1 and q.name = u.name order by q.ord, q.key limit $3
        ) p join record r on r.key = p.key order by u.at, p.ord, p.key"""
    return sql, (shelf, names, limit, room)


def _of_all(shelf: bytes, after: int, limit: int) -> Statement:
    """Whoever's they are: the first ones of each name, and of those the first."""
    sql = f"""{_EACH_NAME} select {_ROW} from each_name e cross join lateral (
            select q.ord, q.key from place q where q.shelf = $1 and q.name = e.name and q.ord > $2
            order by q.ord limit $3
        ) p join record r on r.key = p.key where e.name is not null order by p.ord limit $3"""
    return sql, (shelf, after, limit)


def children(parents: Sequence[str], after: int, limit: int, agent: str | None, levels: int, most: int) -> Statement:
    """Those of each, and theirs, with their parents: level by level, no more than so many. Links may run in a circle,
    and then they come again."""
    party = "" if agent is None else "and (t.sender = $6 or t.recipient = $6)"
    sql = f"""with recursive below(parent, key, ord, level) as (
            select u.parent collate "C", c.key, c.ord, 1 from unnest($1::text[]) u(parent) cross join lateral (
                select t.key, t.ord from task t where t.parent = u.parent and t.ord > $2 {party}
                order by t.ord limit $3
            ) c
            union all
            select b.key, c.key, c.ord, b.level + 1 from below b cross join lateral (
                select t.key, t.ord from task t where t.parent = b.key {party} order by t.ord limit $3
            ) c where b.level < $4
        ) select parent, key, ord, level from below limit $5"""
    values = (parents, after, limit, levels, most)
    return sql, values if agent is None else (*values, agent)


def leases(after: int, limit: int, agent: str | None) -> Statement:
    if agent is None:
        return of_shelf(rows.HELD, "", after, limit)
    sql = f"""select {_ROW} from place p join record r on r.key = p.key
        where p.shelf = $1 and p.name = '' and p.ord > $2
          and (position($4 in r.body) > 0 or position($5 in r.body) > 0)
        order by p.ord limit $3"""
    sender, recipient = f'"sender":"{agent}"'.encode(), f'"recipient":"{agent}"'.encode()
    return sql, (rows.HELD, after, limit, sender, recipient)  # the view looks closer


def due(now: int, limit: int, left: Sequence[str] = ()) -> Statement:
    """All but those that are left to somebody else."""
    sql = f"""select {_ROW} from place p join record r on r.key = p.key
        where p.shelf = $1 and p.name = '' and p.ord <= $2 and p.key <> all($4::text[])
        order by p.ord, p.key limit $3"""
    return sql, (rows.DUE, now, limit, left)


def tasks(agent: str | None, after: int, limit: int) -> Statement:
    """Those that are open."""
    if agent is None:
        sql = f"""{_EACH_RECIPIENT} select {_ROW} from each_name e cross join lateral (
                select q.ord, q.key from task q where q.open and q.recipient = e.name and q.ord > $1
                order by q.ord limit $2
            ) t join record r on r.key = t.key where e.name is not null order by t.ord limit $2"""
        return sql, (after, limit)
    sql = f"""select {_ROW} from (
            (select ord, key from task where open and sender = $1 and ord > $2 order by ord limit $3)
            union
            (select ord, key from task where open and recipient = $1 and ord > $2 order by ord limit $3)
        ) t join record r on r.key = t.key order by t.ord limit $3"""
    return sql, (agent, after, limit)


def recent(agent: str | None, before: int | None, limit: int) -> Statement:
    end = _FOREVER if before is None else before
    if agent is None:
        sql = f"""select {_ROW} from task t join record r on r.key = t.key where t.ord < $1
            order by t.ord desc limit $2"""
        return sql, (end, limit)
    sql = f"""select {_ROW} from (
            (select ord, key from task where open and sender = $1 and ord < $2 order by ord desc limit $3)
            union
            (select ord, key from task where not open and sender = $1 and ord < $2 order by ord desc limit $3)
            union
            (select ord, key from task where open and recipient = $1 and ord < $2 order by ord desc limit $3)
            union
            (select ord, key from task where not open and recipient = $1 and ord < $2 order by ord desc limit $3)
        ) t join record r on r.key = t.key order by t.ord desc limit $3"""
    return sql, (agent, end, limit)


def pending(agent: str | None, after: int, limit: int) -> Statement:
    return _of_all(rows.ANSWERS, after, limit) if agent is None else of_shelf(rows.ANSWERS, agent, after, limit)


def slots(after: int, limit: int, agent: str | None) -> Statement:
    return of_shelf(rows.SLOTS, agent or "", after, limit)


def late(task_id: str) -> Statement:
    return of_shelf(rows.LATE, task_id, -1, _FOREVER)


def pushes(task_id: str) -> Statement:
    return of_shelf(rows.PUSHES, task_id, -1, _FOREVER)


def dialogs(sender: str, recipient: str, before: int, limit: int) -> Statement:
    sql = f"""select {_ROW} from place p join record r on r.key = p.key
        where p.shelf = $1 and p.name = $2 and p.ord < $3 order by p.ord desc limit $4"""
    return sql, (rows.DIALOGS, f"{sender}/{recipient}", before, limit)


def moved_dialogs(sender: str, recipient: str, since: int, after: int, limit: int) -> Statement:
    sql = f"""select {_ROW} from place p join task t on t.key = p.key join record r on r.key = p.key
        where p.shelf = $1 and p.name = $2 and p.ord > $3 and t.ord > $4 and t.ord <= $3 order by t.ord limit $5"""
    return sql, (rows.DIALOGS, f"{sender}/{recipient}", since, after, limit)


def belongings(task_id: str) -> Statement:
    """Everything that goes with a task."""
    first, end = zip(*piece_ranges(task_id), strict=True)
    sql = f"""select {_ROW} from unnest($1::text[], $2::text[]) u(lo, hi)
        join record r on r.key >= u.lo and r.key < u.hi
        union all
        select {_ROW} from place p join record r on r.key = p.key where p.shelf = $3 and p.name = $4"""
    return sql, (first, end, rows.SEND_KEYS, task_id)


LISTINGS: Final[dict[str, Callable[..., Statement]]] = {
    "leases": leases,
    "due": due,
    "tasks": tasks,
    "recent": recent,
    "pending": pending,
    "slots": slots,
    "late": late,
    "pushes": pushes,
    "dialogs": dialogs,
    "moved_dialogs": moved_dialogs,
    "belongings": belongings,
}

DIALOG_COUNT: Final = "select count(*) from place where shelf = $1 and name = $2"
DEPTH: Final = "select count(*) from place where shelf = $1 and name = $2"
WAITING: Final = "select name, count(*) from place where shelf = $1 and name = any($2) group by name"
DEEP: Final = """
    select p.name, count(*) as depth, min(p.ord) as first,
           (select q.key from place q where q.shelf = $1 and q.name = p.name order by q.ord limit 1) as key
    from place p where p.shelf = $1 group by p.name having count(*) > $2
"""
