"""Trees on a shared store: the same as anywhere, in a few looks, however wide and deep they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from covenant import CovenantError, Idempotency, Limits, Mailbox, Task, Tree
from covenant.rules import query as rules
from covenant.store.postgres import family, listing, reader
from tests.conformance.support import plain, soon, uid
from tests.postgres import store_url
from tests.postgres.support import until

_ROOT = 90_000
_COUNT = 700


def wide(number: int) -> int:
    return _ROOT


def deep(number: int) -> int:
    return number - 1 if number else _ROOT


def bushy(number: int) -> int:
    return (number - 1) // 3 if number else _ROOT


@pytest.mark.parametrize("parent_of", [wide, deep, bushy])
async def test_a_tree_takes_few_looks(parent_of: Callable[[int], int], looks: list[None]) -> None:
    """Asked for one by one, the children of each node had all before them gone over again: a minute for 2,000."""
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n), parent=uid(parent_of(n))) for n in range(_COUNT)])
        looks.clear()
        tree = await soon(alice.task_tree(uid(_ROOT)))
        assert (tree.size, tree.truncated) == (_COUNT + 1, False)
        assert len(looks) <= 20


async def test_others_have_their_turn_while_many_trees_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once: one look answers them all, and each of them takes its time."""
    monkeypatch.setattr(reader, "TURN_S", 0.0)
    answer, turns = rules.answer, [0]
    answered_in: list[int] = []

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    def noted(*args: Any) -> Any:
        tree = answer(*args)
        answered_in.append(turns[0])
        return tree

    monkeypatch.setattr(reader, "answer", noted)
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([plain(bob, id=uid(n), parent=uid(_ROOT)) for n in range(3)])
        turning = asyncio.create_task(others())
        await soon(asyncio.gather(*(alice.task_tree(uid(_ROOT)) for _ in range(8))))
        turning.cancel()
        assert len(answered_in) == len(set(answered_in)) == 8


def keyed(bob: Mailbox, number: int, **more: Any) -> Task:
    return plain(bob, id=uid(number), idempotency=Idempotency("idempotent", key=f"k{number % 1000}"), **more)


async def test_tasks_that_wait_for_others_take_few_looks(looks: list[None]) -> None:
    """Whom each waits for stands in a slot of its own."""
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_tasks([keyed(bob, n) for n in range(300)])
        await alice.send_tasks([keyed(bob, 1000 + n, parent=uid(_ROOT)) for n in range(300)])
        looks.clear()
        tree = await soon(alice.task_tree(uid(_ROOT)))
        assert [node.entry and node.entry.follows for node in tree.root.children] == [uid(n) for n in range(300)]
        page = await soon(alice.task_queue(limit=1000))
        assert [entry.follows for entry in page.tasks] == [None] * 300 + [uid(n) for n in range(300)]
        assert len(looks) <= 25


async def test_a_cascade_over_tasks_that_have_ended_looks_below_all_of_them_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statements: list[int] = []
    of_each = listing.children

    def noted(parents: Any, *how: Any) -> Any:
        statements.append(len(parents))
        return of_each(parents, *how)

    monkeypatch.setattr(family, "children", noted)
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        await alice.send_task(plain(bob, id=uid(_ROOT)))
        await alice.send_tasks([plain(bob, id=uid(n), parent=uid(_ROOT)) for n in range(60)])
        await asyncio.gather(*(alice.cancel_task(uid(n)) for n in range(60)))
        statements.clear()
        await soon(alice.cancel_task(uid(_ROOT), cascade=True))
        await until(lambda: 60 in statements)
        assert len(statements) <= 4


async def shown(asked: Mailbox, root: str) -> Tree | str:
    try:
        tree: Tree = await soon(asked.task_tree(root))
        return tree
    except CovenantError as refusal:
        return refusal.code


async def test_a_ring_is_shown_though_it_is_met_again_behind_the_first_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below it from its beginning was asked for already, and stands on no level of this look."""
    monkeypatch.setattr(rules, "_CHUNK", 2)
    monkeypatch.setattr(reader, "_LEVELS", 5)
    async with Mailbox.open(store_url()) as box:
        alice, bob = box.of("alice@lab"), box.of("bob@lab")
        for number, parent in ((1, 0), (2, 0), (3, 0), (11, 1), (12, 11), (0, 0)):
            await alice.send_task(plain(bob, id=uid(number), parent=uid(parent)))
        tree = await shown(alice, uid(0))
        assert shape(tree)[:2] == (6, False)


@pytest.mark.parametrize("seed", range(12))
async def test_a_tree_is_what_it_is_in_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings, ids that are no tasks, pages that end within a family, looks that end within a level."""
    random = Random(seed)
    monkeypatch.setattr(rules, "_CHUNK", random.choice([1, 2, 3, 7]))
    monkeypatch.setattr(family, "_PARENTS", random.choice([1, 2, 5]))
    monkeypatch.setattr(family, "_BELOW", random.choice([1, 2, 4, 30]))
    monkeypatch.setattr(reader, "_LEVELS", random.choice([1, 2, 5]))
    monkeypatch.setattr(reader, "_AHEAD", random.choice([1, 3, 20]))
    limits = Limits(tree_nodes_max=random.choice([5, 17, 1000]), scan_max=random.choice([4, 25, 1000]))
    count, roots = 40, range(43)
    agents = ["alice@lab", "bob@lab", "carol@lab"]
    drafts = [
        (random.choice(agents), random.choice(agents), n, random.choice([n - 1, n // 2, random.randrange(43), 42]))
        for n in random.sample(range(count), count)
    ]
    shows: list[list[Tree | str]] = []
    for url in (store_url(), "memory:"):
        async with Mailbox.open(url, limits=limits) as box:
            for sender, recipient, n, parent in drafts:
                await box.of(sender).send_task(plain(box.of(recipient), id=uid(n), parent=uid(abs(parent))))
            asking = [box, *map(box.of, agents)]
            shows.append([await shown(by, uid(root)) for by in asking for root in roots])
    postgres, memory = shows
    assert [shape(tree) for tree in postgres] == [shape(tree) for tree in memory]


def shape(tree: Tree | str) -> Any:
    return tree if isinstance(tree, str) else (tree.size, tree.truncated, _ids(tree.root))


def _ids(node: Any) -> Any:
    return node.id, node.entry is None, [_ids(child) for child in node.children]
