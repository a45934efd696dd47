"""Following a task: everything that happened to it since a generation, in order, each once. (Contract 15, 17.)

What happened is told from the log, so it is the same for whoever asks, from any daemon and after any restart. Who is
further back than the log reaches is told that, and begins anew from the task as it is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct

from covenant.exchange.exchange import Exchange
from covenant.model.peer import Caller
from covenant.model.protocol import Update
from covenant.model.query import GetPlace
from covenant.model.view import Place
from covenant.rules.protocol import steps_in, updates_of

_COMMITS_AT_ONCE: Final = 500
_UPDATES_MAX: Final = 20_000  # that one look back gathers; who is further behind begins anew
_STEPS_MAX: Final = 200_000


class Trail(Struct, frozen=True):
    """`is_whole`: nothing is missing between the generation that was asked for and the first of these."""

    updates: list[Update]
    is_whole: bool


async def trail(exchange: Exchange, caller: Caller, task_id: str, after: int) -> Trail:
    place: Place = await exchange.ask(caller, GetPlace(exchange.by(caller), task_id))
    generation, seq = place.generation, place.order
    steps: list[list[Update]] = []
    gathered = 0
    while generation > after and seq > 0 and gathered <= _UPDATES_MAX:
        commits = await exchange.store.log_trail(seq, place.task_id, _COMMITS_AT_ONCE)
        if not commits:
            break
        for logged in commits:
            seq = logged.previous(place.task_id)
            moved = steps_in(logged, place.task_id)
            if moved:
                generation -= moved
                gathered += moved
                steps.append(updates_of(logged, place.task_id, place.context_id, generation))
            if generation <= after:
                break
    updates = [update for step in reversed(steps) for update in step if update.generation > after]
    return Trail(updates, generation <= after)


class Step(Struct, frozen=True, gc=False):
    """A commit that moved a task: where it is in the log, and the generation before it."""

    seq: int
    before: int


class Steps(Struct, frozen=True):
    """What happened to a task by where it is told, for who takes long over each of them. The newest first."""

    place: Place
    steps: list[Step]
    is_whole: bool


async def steps_since(exchange: Exchange, caller: Caller, task_id: str, after: int) -> Steps:
    place: Place = await exchange.ask(caller, GetPlace(exchange.by(caller), task_id))
    generation, seq = place.generation, place.order
    steps: list[Step] = []
    while generation > after and seq > 0 and len(steps) <= _STEPS_MAX:
        commits = await exchange.store.log_trail(seq, place.task_id, _COMMITS_AT_ONCE)
        if not commits:
            break
        for logged in commits:
            moved = steps_in(logged, place.task_id)
            if moved:
                generation -= moved
                steps.append(Step(seq, generation))
            seq = logged.previous(place.task_id)
            if generation <= after:
                break
    return Steps(place, steps, generation <= after)


async def updates_at(exchange: Exchange, place: Place, step: Step) -> list[Update]:
    """Nothing when the log has lost it meanwhile."""
    commits = await exchange.store.log_trail(step.seq, place.task_id, 1)
    return updates_of(commits[0], place.task_id, place.context_id, step.before) if commits else []


async def follow(exchange: Exchange, caller: Caller, task_id: str, after: int) -> AsyncIterator[Trail]:
    """Until the task has ended, or the daemon does. A trail that is not whole is the last."""
    while True:
        seen = await trail(exchange, caller, task_id, after)
        yield seen
        if not seen.is_whole or (seen.updates and seen.updates[-1].ends) or exchange.is_draining:
            return
        if seen.updates:
            after = seen.updates[-1].generation
        entry = await exchange.watch(caller, task_id, after, exchange.bounds.wait_ms_max)
        if entry.outcome is not None and entry.generation <= after:
            return
