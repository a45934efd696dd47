"""Peers, and one thing of each kind that a call can name, in a store.

`World` makes them below the checks of authorization, so that a test decides which grants there are. It works on any
store, also on that of a running daemon.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from enum import StrEnum
from itertools import count
from typing import Any, Final

from msgspec import Struct

from covenant import AgentId, Idempotency, Result, Task
from covenant.exchange.token import digest_of
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.peer import Caller, Capability, Grant, Role, Scope
from covenant.model.push import PushConfig
from covenant.model.record import Asks
from covenant.model.repair import DuplicateRisk
from covenant.model.run import RunCommit, Wait

NOBODY: Final = AgentId.named("nobody@lab")
UNKNOWN_SLOT: Final = f"slot:{'0' * 64}"
GIVEN: Final = "a2a.recv.given@lab"  # of the grants that are passed on and revoked; no call here demands it


class State(StrEnum):
    NOTHING = "nothing"
    QUEUED = "queued"  # at its second attempt: the lease that is named is over
    IN_FLIGHT = "in flight"
    ENDED = "ended"
    CANCELED = "canceled"
    OWN = "of its own run"  # a task that a run of bob's gave to bob
    RUNNING = "a run in flight"
    PARKED = "a parked run"  # in doubt about an effect
    CACHED = "cached"
    GRANTED = "granted by the operator"
    PASSED_ON = "passed on"
    UNKNOWN = "unknown"


class Thing(Struct, frozen=True):
    """The thing that a call names, in one state. Ids that play no part in that state are ids that nobody uses."""

    state: State
    task: str
    lease: str
    child: str  # an id for a task that is given from a run
    slot: str = UNKNOWN_SLOT
    grant: str = ""
    sender: str = "alice@lab"
    recipient: str = "bob@lab"
    holder: str = ""
    granter: str = ""


SAMPLES: Final = {  # things with parties but without ids, which `verdict` does not look at
    **{state: Thing(state, "", "", "") for state in State},
    State.OWN: Thing(State.OWN, "", "", "", sender="bob@lab"),
    State.GRANTED: Thing(State.GRANTED, "", "", "", holder="alice@lab"),
    State.PASSED_ON: Thing(State.PASSED_ON, "", "", "", holder="bob@lab", granter="alice@lab"),
}


class Call(Struct, frozen=True):
    """One call: the caller, and everything that it may name."""

    caller: AgentId
    is_operator: bool
    thing: Thing
    fresh: str
    visitor: AgentId
    peers: dict[str, AgentId]
    risk: DuplicateRisk = "operator_accepted"  # of a requeue
    asks: Asks = Asks.INPUT

    @property
    def by(self) -> AgentId | None:
        """How rules name the caller: the operator is nobody in particular."""
        return None if self.is_operator else self.caller

    task = property(lambda self: self.thing.task)
    lease = property(lambda self: self.thing.lease)
    child = property(lambda self: self.thing.child)
    slot = property(lambda self: self.thing.slot)
    grant = property(lambda self: self.thing.grant)
    alice = property(lambda self: self.peers["alice@lab"])
    bob = property(lambda self: self.peers["bob@lab"])
    zoe = property(lambda self: self.peers["zoe@lab"])
    nobody = NOBODY


PEERS: Final = ("alice@lab", "bob@lab", "carol@lab", "dora@lab", "zoe@lab", "dan@lab", "eve@lab", "old@lab", "rex@lab")


def token_of(display: str) -> str:
    return f"cov_{display}"


def unsigned(capability: Capability) -> Grant:
    return Grant(capability, "")


class World:
    def __init__(self, store: Any, sign: Callable[[Capability], Grant] = unsigned) -> None:
        self.store = store
        self.sign = sign
        self.peers: dict[str, AgentId] = {}
        self.callers: dict[str, Caller] = {}
        self._numbers = count(1)
        self._kinds = count(1)

    def new_id(self) -> str:
        return str(uuid.UUID(int=next(self._numbers), version=4))

    # --- peers --------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Enroll everybody, each with a card. Then rex is revoked, and old's token changed."""
        for display in PEERS:
            await self.enroll(display)
        for agent in self.peers.values():
            await self.store.run(c.PublishCard(None, agent, {"name": agent.display}))
        await self.store.run(c.RevokePeer(None, self.peers["rex@lab"].pubkey, "left"))
        await self.store.run(c.RotateToken(None, self.peers["old@lab"].pubkey, digest_of("another")))
        self.callers["none"] = Caller(NOBODY, Role.PEER, digest_of("of nobody"))

    async def enroll(self, display: str, role: Role = Role.PEER) -> AgentId:
        agent, token = AgentId.named(display), digest_of(token_of(display))
        await self.store.run(c.EnrollPeer(None, agent, role, token))
        self.peers[display] = agent
        self.callers[display] = Caller(agent, role, token)
        return agent

    def call(
        self,
        caller: AgentId,
        thing: Thing,
        visitor: AgentId,
        is_operator: bool = False,
        risk: DuplicateRisk = "operator_accepted",
    ) -> Call:
        return Call(caller, is_operator, thing, self.new_id(), visitor, self.peers, risk)

    def counterparty(self, action: str, role: str, thing: Thing) -> AgentId:
        """Return the peer that the word in angle brackets stands for; without one, the other side of the thing."""
        peers = self.peers
        named = {
            "recipient": peers[thing.recipient],
            "sender": peers[thing.sender],
            "caller": self.callers[role].agent,
            "zoe": peers["zoe@lab"],
            "nobody": NOBODY,
        }
        word = action.partition("<")[2].rstrip(">")
        other_side = peers[thing.recipient if role == thing.sender else thing.sender]
        return named.get(word, other_side)

    # --- grants -------------------------------------------------------------------------------------------

    async def grant(
        self,
        subject: AgentId,
        action: str,
        scope: Scope = Scope(),  # noqa: B008  # frozen
        expires_ms: int | None = None,
        parent: str | None = None,
        granter: AgentId | None = None,
    ) -> str:
        capability = Capability(
            self.new_id(), subject, action, granter or NOBODY, 1, scope, expires_ms, parent is None, parent
        )
        await self.store.run(c.GrantCapability(granter, self.sign(capability)))
        return capability.id

    async def revoke(self, grant_id: str) -> None:
        await self.store.run(c.RevokeCapability(None, grant_id, "over"))

    # --- things -------------------------------------------------------------------------------------------

    async def make(self, state: State) -> Thing:
        makers: dict[State, Callable[[], Coroutine[Any, Any, Thing]]] = {
            State.NOTHING: self._nothing,
            State.QUEUED: self._queued,
            State.IN_FLIGHT: self._in_flight,
            State.ENDED: self._ended,
            State.CANCELED: self._canceled,
            State.OWN: self._own,
            State.RUNNING: self._running,
            State.PARKED: self._parked,
            State.CACHED: self._cached,
            State.GRANTED: self._granted,
            State.PASSED_ON: self._passed_on,
            State.UNKNOWN: self._unknown,
        }
        return await makers[state]()

    def _thing(self, state: State, task: str = "", lease: str = "", **more: str) -> Thing:
        return Thing(state, task or self.new_id(), lease or self.new_id(), self.new_id(), **more)

    async def _nothing(self) -> Thing:
        return self._thing(State.NOTHING)

    async def _unknown(self) -> Thing:
        return self._thing(State.UNKNOWN, grant=self.new_id())

    async def _leased(self, state: State, **more: Any) -> Thing:
        alice, bob = self.peers["alice@lab"], self.peers["bob@lab"]
        parent, task_id, kind = self.new_id(), self.new_id(), f"kind-{next(self._kinds)}"
        dora = self.peers["dora@lab"]
        await self.store.run(c.SendTask(dora, Task(id=parent, recipient=alice, sender=dora, intent_text="the whole")))
        task = Task(
            id=task_id, sender=alice, recipient=bob, intent_text="a part", task_kind=kind, parent=parent, **more
        )
        await self.store.run(c.SendTask(alice, task, protocol=True, shown=True))
        leased = await self.store.take(c.LeaseTasks(bob, bob, "w1", 1, frozenset((kind,))), 0)
        return self._thing(state, task_id, leased[0].lease_id)

    async def _in_flight(self) -> Thing:
        thing = await self._leased(State.IN_FLIGHT)
        await self.store.run(
            c.SetPush(None, thing.task, PushConfig(id="hook", url="https://hooks.example.com/covenant"))
        )
        return thing

    async def _queued(self) -> Thing:
        thing = await self._leased(State.QUEUED)
        await self.store.run(c.ReleaseLease(None, thing.lease))
        return thing

    async def _ended(self) -> Thing:
        thing = await self._leased(State.ENDED)
        await self._finish(thing)
        return thing

    async def _canceled(self) -> Thing:
        thing = await self._leased(State.CANCELED)
        await self.store.run(c.CancelTask(None, thing.task, "no longer needed"))
        return thing

    async def _finish(self, thing: Thing) -> None:
        await self.store.run(c.PostResult(None, Result(thing.task, "ok", (), None, thing.lease), "w1"))

    async def _cached(self) -> Thing:
        key = f"key-{next(self._kinds)}"
        thing = await self._leased(State.CACHED, idempotency=Idempotency("idempotent", key))
        await self._finish(thing)
        page = await self.store.ask(q.ListCached(None, 500))
        slot = next(entry.id for entry in page.entries if entry.cache_key.key == key)
        return self._thing(State.CACHED, thing.task, thing.lease, slot=slot)

    async def _running(self) -> Thing:
        thing = await self._leased(State.RUNNING)
        await self.store.run(c.CommitRun(None, thing.lease, RunCommit(number=1), "w1"))
        return thing

    async def _parked(self) -> Thing:
        thing = await self._leased(State.PARKED)
        wait = Wait(signals=("effect:charge",), doubt="charge")
        await self.store.run(c.CommitRun(None, thing.lease, RunCommit(number=1, wait=wait), "w1"))
        return thing

    async def _own(self) -> Thing:
        run, bob, child = await self._leased(State.OWN), self.peers["bob@lab"], self.new_id()
        task = Task(id=child, sender=bob, recipient=bob, intent_text="by myself")
        commit = RunCommit(number=1, tasks=(task,), begins=(child,))
        standing = await self.store.run(c.CommitRun(bob, run.lease, commit, "w1"))
        return self._thing(State.OWN, child, standing.leases[child], sender="bob@lab")

    async def _granted(self) -> Thing:
        grant = await self.grant(self.peers["alice@lab"], GIVEN)
        return self._thing(State.GRANTED, grant=grant, holder="alice@lab")

    async def _passed_on(self) -> Thing:
        source = await self._granted()
        alice, bob = self.peers["alice@lab"], self.peers["bob@lab"]
        passed_on = await self.grant(bob, GIVEN, parent=source.grant, granter=alice)
        return self._thing(State.PASSED_ON, grant=passed_on, holder="bob@lab", granter="alice@lab")
