"""Children of many tasks at once, and theirs: asked for one by one, a tree would take as many statements as it has
nodes."""

from __future__ import annotations

from collections.abc import Iterable
from sys import maxsize
from typing import Any, Final, TypeAlias

import asyncpg

from covenant.model.record import Key
from covenant.store.postgres.listing import children
from covenant.store.postgres.want import Listing

Family: TypeAlias = list[tuple[int, Key]]  # in the order in which they were sent
_PARENTS: Final = 64  # in one statement
_BELOW: Final = 1000  # of all that is further down, in one statement


def is_of_children(want: Any) -> bool:
    return type(want) is Listing and want.method == "children"


def keys_of(family: Family) -> list[Key]:
    return [key for _, key in family]


async def children_of_each(
    connection: asyncpg.Connection[Any], wanted: Iterable[Listing], levels: int = 1, room: int = maxsize
) -> dict[Listing, Family]:
    """Each listing that is wanted, as far as there is room for so many children, but at least one of them; and those
    of the children that were found, some levels down."""
    alike: dict[tuple[int, int, str | None], list[str]] = {}
    for want in dict.fromkeys(wanted):
        parent, *how = want.args
        alike.setdefault((*how,), []).append(parent)
    found: dict[Listing, Family] = {}
    for (after, limit, agent), left in alike.items():
        while left and room > 0:
            parents, left = left[:_PARENTS], left[_PARENTS:]
            families = await _families(connection, parents, after, limit, agent, levels)
            room -= sum(map(len, families.values()))
            for parent in parents:
                found[Listing("children", (parent, after, limit, agent))] = families.pop(parent)
            for parent, family in families.items():
                found[Listing("children", (parent, 0, limit, agent))] = family
    return found


async def _families(
    connection: asyncpg.Connection[Any], parents: list[str], after: int, limit: int, agent: str | None, levels: int
) -> dict[str, Family]:
    most = len(parents) * limit + _BELOW
    sql, values = children(parents, after, limit, agent, levels, most)
    rows = await connection.fetch(sql, *values)
    if len(rows) == most:
        levels = rows[-1]["level"] - 1  # the last one is not whole
    level_of = dict.fromkeys(parents, 1)  # where their children stand
    found: dict[str, Family] = {parent: [] for parent in parents}
    for parent, key, order, level in rows:
        if level > levels or level_of.get(parent) != level:
            continue  # in a circle they come again
        found[parent].append((order, key))
        if level < levels and key not in level_of:
            level_of[key] = level + 1
            found[key] = []
    for family in found.values():
        family.sort()
    return found
