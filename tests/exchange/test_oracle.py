"""Existence is no oracle: for a caller without grants, a verb takes the same steps and gives the same answer whether
what it names is there, belongs to others, or is free. (Contract 27.)

The steps are the calls of functions of the package, as a profiler sees them: what takes other steps takes other time.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any, Final

import msgspec
import pytest
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from covenant import AgentId, CovenantError, ForceError, Idempotency, Limits, RepairRequest, Requeue, Result, Task
from covenant.exchange.bounds import Bounds
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model import agent as agents
from covenant.model import command as c
from covenant.model.message import Artifact, Part
from covenant.model.peer import Caller, Scope
from covenant.model.run import RunCommit, Wait
from covenant.rules.grant import PEER_ACTIONS
from covenant.serve import wire as w
from covenant.serve.places import PLACES
from covenant.serve.verbs.table import handled
from covenant.store.clock import ManualClock, RandomIds
from covenant.store.memory import Memory

FREE: Final = "00000000-0000-4000-8000-00000000000{}"
REASON: Final = "because"


class Names(Struct, frozen=True):
    """The things that a request may name."""

    task: str
    lease: str
    slot: str
    grant: str
    label: str


NOBODYS: Final = Names(FREE.format(1), FREE.format(2), f"slot:{'0' * 64}", FREE.format(3), "nobody@lab")


def _task(names: Names, **more: Any) -> Task:
    return Task(id=names.task, recipient=AgentId(names.label), intent_text="x", **more)


# What each member of a request is filled with. A member that a new verb brings has to be added here.
MEMBERS: Final[dict[str, Callable[[Names], Any]]] = {
    "task_id": lambda names: names.task,
    "lease_id": lambda names: names.lease,
    "entry_id": lambda names: names.slot,
    "grant_id": lambda names: names.grant,
    "parent": lambda names: names.grant,
    "peer": lambda names: names.label,
    "recipient": lambda names: names.label,
    "subject": lambda names: names.label,
    "display": lambda names: names.label,
    "name": lambda names: names.label,
    "actor": lambda names: names.label,
    "counterparty": lambda names: names.label,
    "task": _task,
    "tasks": lambda names: [_task(names)],
    "start": _task,
    "result": lambda names: Result(names.task, "ok", (), None, names.lease),
    "request": lambda names: RepairRequest(names.task, Requeue("idempotent", names.lease), REASON),
    "action": lambda names: f"a2a.send.{names.label}",
    "commit": lambda names: RunCommit(number=1),
    "wait": lambda names: Wait(signals=("go",)),
    "artifact": lambda names: Artifact(artifact_id="a", parts=(Part(text="one"),)),
    "text": lambda names: "x",
    "reason": lambda names: REASON,
    "dead": lambda names: "w1",
    "effect": lambda names: "charge",
    "verdict": lambda names: "done",
    "receipt": lambda names: "r",
    "key": lambda names: "k",
    "limit": lambda names: 5,
    "scope": lambda names: Scope(task_id=names.task),
}
_OTHERS: Final = Names("", "", "", "", "other@lab")
_MAY_NAME: Final = ("task_id", "recipient", "peer", "name", "actor", "subject", "parent", "start", "text")
"""Members that may be left out and name something, or without which nothing is said."""


def requests(names: Names) -> Iterator[tuple[str, w.Request]]:
    """Every verb that names something: with what it must have, and with each of the members that it may have."""
    for place in PLACES:
        kind = place.request
        if kind is w.RecentAudit:
            continue  # pages through the log of all for the caller's own rows: see docs/trust.md
        members = fields(kind)
        needed = [f.name for f in members if f.default is NODEFAULT and f.default_factory is NODEFAULT]
        filled = {name: MEMBERS[name](names) for name in needed}
        if filled != {name: MEMBERS[name](_OTHERS) for name in needed}:
            yield kind.__name__, kind(**filled)
        for member in members:
            if member.name in _MAY_NAME and member.name not in filled:
                yield f"{kind.__name__} {member.name}", kind(**filled, **{member.name: MEMBERS[member.name](names)})
    by_key = Task(id=names.task, recipient=AgentId("said@lab", AgentId.named(names.label).pubkey), intent_text="x")
    yield "SendTask by key", w.SendTask(task=by_key)
    yield "SendTasks by key", w.SendTasks(tasks=[by_key])
    yield "SignalRun start by key", w.SignalRun(task_id=names.task, name="go", start=by_key)
    keyed = Idempotency("idempotent", "k")
    yield "SendTask keyed", w.SendTask(task=_task(names, idempotency=keyed, parent=names.task))
    yield "Repair by force", w.Repair(request=RepairRequest(names.task, ForceError("x"), REASON))
    yield "Grant by key", w.Grant(subject=agents.AgentId.named(names.label).pubkey, action="a2a.*", parent=names.grant)
    yield "Cancel cascade", w.Cancel(task_id=names.task, graceful=True, cascade=True)
    yield "GetTask wait", w.GetTask(task_id=names.task, current_generation=0, wait_ms=1)


@asynccontextmanager
async def _exchange() -> AsyncIterator[Exchange]:
    realm = Realm.throwaway()
    bounds = Bounds(refusals_per_min=1_000_000)  # every refusal is written
    clock, ids = ManualClock(), RandomIds()
    exchange = Exchange(Memory(Limits(), clock, ids), realm, clock, ids, bounds)
    await exchange.open("cov_operator")
    yield exchange
    await exchange.close()


async def _peer(exchange: Exchange, display: str, *actions: str) -> Caller:
    _, token = await exchange.enroll(exchange.operator(), display, AgentId.named(display).pubkey, actions)
    return exchange.authenticate(token)


async def _queued(x: Exchange, alice: Caller, bob: Caller) -> Names:
    keyed = Idempotency("idempotent", "k")
    task = Task(id=FREE.format(7), recipient=bob.agent, intent_text="x", idempotency=keyed)
    await x.run(alice, x.send(alice, task))
    grants = await x.trust.grant(x.operator(), "alice@lab", "a2a.send.*", Scope(), None, True, None)
    slot = next(key for key in x.store.state.records if key.startswith("slot:"))  # type: ignore[attr-defined]
    return Names(FREE.format(7), FREE.format(8), slot, grants.id, "bob@lab")


async def _leased(x: Exchange, alice: Caller, bob: Caller) -> Names:
    names = await _queued(x, alice, bob)
    (delivery,) = await x.take(bob, x.lease(bob, None, "w1"), 0)
    return msgspec.structs.replace(names, lease=delivery.lease_id)


async def _parked(x: Exchange, alice: Caller, bob: Caller) -> Names:
    names = await _leased(x, alice, bob)
    await x.run(bob, x.commit_run(bob, names.lease, RunCommit(number=1, wait=Wait(signals=("go",))), "w1"))
    return names


async def _ended(x: Exchange, alice: Caller, bob: Caller) -> Names:
    names = await _leased(x, alice, bob)
    await x.run(bob, x.post(bob, Result(names.task, "ok", (), None, names.lease), "w1"))
    await x.take(alice, x.drain_results(alice, None), 0)
    return names


async def _revoked(x: Exchange, alice: Caller, bob: Caller) -> Names:
    names = await _leased(x, alice, bob)
    await x.trust.revoke_peer(x.operator(), "bob@lab", REASON)
    await x.run(x.operator(), c.RevokeCapability(None, names.grant, REASON))
    return names


PASTS: Final = {
    "queued": _queued,
    "leased": _leased,
    "parked": _parked,
    "ended": _ended,
    "recipient revoked": _revoked,
}


async def _steps(x: Exchange, caller: Caller, request: w.Request, names: Names) -> tuple[str, list[str]]:
    """The answer, without the names; and the functions of the package that it took."""
    steps: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and "/covenant/" in frame.f_code.co_filename:
            steps.append(f"{frame.f_code.co_filename.rpartition('/covenant/')[2]} {frame.f_code.co_qualname}")

    agents._named.cache_clear()
    agents._is_sound.cache_clear()
    sys.setprofile(note)
    try:
        answer = str(msgspec.to_builtins(await handled(x, caller, request)))
    except CovenantError as refusal:
        answer = str(refusal.to_wire())
    finally:
        sys.setprofile(None)
    for name in sorted((getattr(names, field) for field in names.__struct_fields__), key=len, reverse=True):
        answer = answer.replace(name, "NAME")
    answer = re.sub(r"'seq': \d+", "'seq': N", answer)
    return answer.replace(agents.AgentId.named(names.label).pubkey, "NAME"), steps


def _difference(one: tuple[str, list[str]], other: tuple[str, list[str]]) -> Any:
    if one[0] != other[0]:
        return one[0], other[0]
    return list(difflib.unified_diff(one[1], other[1], "there", "free", lineterm="", n=1))


@pytest.mark.parametrize(
    "grants", [(), [f"{start}carol@lab" for start in PEER_ACTIONS]], ids=["no grant", "grants for another"]
)
@pytest.mark.parametrize("past", PASTS)
async def test_a_verb_takes_the_same_steps_whether_what_it_names_is_there(past: str, grants: Sequence[str]) -> None:
    """Contract 27: for every verb, by a caller who has no part in what it names, and no grant for it."""
    async with _exchange() as x:
        alice, bob = await _peer(x, "alice@lab", "a2a.*"), await _peer(x, "bob@lab", "a2a.*")
        eve = await _peer(x, "eve@lab", *grants)
        theirs = await PASTS[past](x, alice, bob)
        differing = {}
        refused = 0
        for (verb, there), (_, free) in zip(requests(theirs), requests(NOBODYS), strict=True):
            for _ in range(2):  # in the first, what is loaded at its first use
                first, second = await _steps(x, eve, there, theirs), await _steps(x, eve, free, NOBODYS)
            refused += "'error'" in first[0]
            if first != second:
                differing[verb] = _difference(first, second)
        assert not differing, "\n".join(f"{verb}: {diff}" for verb, diff in differing.items())
        assert refused > 40  # of some 50 verbs and members; the others answer with nothing, or with a no


async def test_what_may_not_be_sent_is_not_read() -> None:
    """Contract 32: to read a large task takes long, and its sender has no grant. A repeat is read, as it has to be."""
    async with _exchange() as x:
        bob, eve = await _peer(x, "bob@lab"), await _peer(x, "eve@lab")
        granted = await x.trust.grant(x.operator(), "eve@lab", "a2a.send.*", Scope(), None, False, None)
        names = msgspec.structs.replace(NOBODYS, task=FREE.format(7), label="bob@lab")
        send = w.SendTask(task=_task(names))
        asked: list[tuple[w.Request, str]] = [(send, "task_queued"), (send, "task_queued")]
        new = Task(recipient=bob.agent, intent_text="x")
        asked += [(w.SendTask(task=new), "missing_capability"), (w.SendTask(task=_task(NOBODYS)), "missing_capability")]
        for number, (request, told) in enumerate(asked):
            if number == 1:
                await x.run(x.operator(), c.RevokeCapability(None, granted.id, REASON))
            answer, steps = await _steps(x, eve, request, names)
            is_read = any(step.endswith(" seal_task") for step in steps)
            assert told in answer and is_read == (number < 2), (number, answer)
