"""The same first message from many processes at once, under one key, most of them killed on the way: one task.
(Contract 17.)"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, NamedTuple

import pytest
from msgspec import structs

from covenant.a2a.interface import JSONRPC
from tests.a2a.cutter import cutting
from tests.a2a.house import House, housed
from tests.a2a.senders import BINDINGS, OTHER_CONTENT, Sending, send, send_when_told
from tests.beings import Being

SENDERS: Final = 8
KILLED: Final = -9
ASKED_MAX: Final = 1_000  # some bytes more than the request has: then it is whole, and the answer is waited for
ANSWERED_MAX: Final = 250


class Fate(NamedTuple):
    """Where a sender dies: before it connects, or when so many bytes have gone one way or the other."""

    connects: bool = True
    asked: int | None = None
    answered: int | None = None

    @staticmethod
    def of(chance: random.Random) -> Fate:
        return chance.choice(
            [
                Fate(connects=False),
                Fate(asked=chance.randrange(ASKED_MAX), answered=0),
                Fate(asked=chance.randrange(ASKED_MAX), answered=0),
                Fate(answered=0),
                Fate(answered=chance.randrange(ANSWERED_MAX)),
                Fate(),
            ]
        )


async def send_at_once(house: House, sending: Sending, chance: random.Random) -> tuple[list[int], set[str]]:
    """How each of the processes ended, and which tasks they were told of."""
    async with AsyncExitStack() as stack:
        beings: list[tuple[Being, Fate]] = []
        for number in range(SENDERS):
            binding, fate = BINDINGS[number % len(BINDINGS)], Fate.of(chance)
            cutter, url = await stack.enter_async_context(cutting(partial(house.place, binding)))
            being = Being(send_when_told, structs.replace(sending, binding=binding, url=url))
            cutter.on_cut = being.kill
            cutter.asking_limits = iter([] if fate.asked is None else [fate.asked])
            cutter.limits = iter([] if fate.answered is None else [fate.answered])
            beings.append((being, fate))
        for being, _ in beings:
            await being.hear()
        chance.shuffle(beings)
        for being, fate in beings:
            if fate.connects:
                being.line.send("go")
            else:
                being.kill()
        codes = [await being.end() for being, _ in beings]
        told = {await being.hear() for (being, _), code in zip(beings, codes, strict=True) if code == 0}
    return codes, told


@pytest.mark.parametrize("rounds", [pytest.param(4, id="some"), pytest.param(100, id="many", marks=pytest.mark.soak)])
async def test_many_who_send_the_same_first_message_and_are_killed_make_one_task(rounds: int) -> None:
    made: set[str] = set()
    ends: Counter[int] = Counter()
    async with housed() as house:
        for seed in range(rounds):
            sending = Sending(house.card, JSONRPC, house.url, house.tokens["alice"], f"key {seed}", f"brief {seed}")
            async with asyncio.timeout(60):
                codes, told = await send_at_once(house, sending, random.Random(seed))
            ends.update(codes)
            async with house.client(JSONRPC, house.url) as client:
                new = {task.id async for task in client.list()} - made
            assert len(new) <= 1
            assert told <= new
            for binding in BINDINGS:
                again = structs.replace(sending, binding=binding, url=house.place(binding))
                new.add(await send(again))
                assert await send(structs.replace(again, text="another brief")) == OTHER_CONTENT
            assert len(new) == 1
            made |= new
        async with house.box("writer") as writer:
            leased = await writer.recv_tasks(rounds + 1, wait_ms=0)
    assert {delivery.task.id for delivery in leased} == made
    assert len(leased) == rounds
    assert set(ends) == {0, KILLED}
