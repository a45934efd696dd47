"""The exchange: every call of every surface, from the token to the reply.

It knows who calls, hands the command to the store together with the caller, and so has the right to do it, the doing
and the audit of it decided in one commit. What belongs to nobody's task stands beside it: whom the realm trusts, the
bounds of each peer, and the signature under the end of the chain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from secrets import token_bytes
from typing import Any, Final, TypeVar

from covenant.exchange.bounds import Bounds, Gauge, Meter, Refusals
from covenant.exchange.heads import Heads
from covenant.exchange.outcome import committed
from covenant.exchange.realm import Realm
from covenant.exchange.receipts import Receipts
from covenant.exchange.token import Keeper, digest_of
from covenant.exchange.trust import Trust
from covenant.exchange.waits import Wait, Waits
from covenant.model import command as c
from covenant.model.agent import AgentId, base58, full_label, is_key
from covenant.model.error import CovenantError, Draining, Unauthenticated, UnknownPeer
from covenant.model.peer import OPERATOR, Caller, Demand, PeerView
from covenant.model.query import CheckGrant, GetTask, ListInputs, Query
from covenant.model.run import RunCommit
from covenant.model.task import Result, Task
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.rules.context import Ids
from covenant.rules.envelope import check_text
from covenant.rules.grant import demand_for
from covenant.store.clock import Clock
from covenant.store.engine import Store

_NOBODY: Final = "nobody"
_GIVING_BACK_S: Final = 2.0

T = TypeVar("T")

log = logging.getLogger("covenant.exchange")


class Exchange:
    def __init__(
        self,
        store: Store,
        realm: Realm,
        clock: Clock,
        ids: Ids,
        bounds: Bounds | None = None,
        *,
        recv_gate: bool = False,
        private_webhooks: bool = False,
    ) -> None:
        self.store = store
        self.realm = realm
        self.bounds = bounds or Bounds()
        self.waits = Waits(self.bounds.waits_max, self.bounds.wait_ms_max)
        self.connections = Gauge(self.bounds.connections_max, "connections")
        self.is_draining = False
        self._clock = clock
        self._ids = ids
        self._meter = Meter(self.bounds.requests_per_s, self.bounds.burst)
        self._refusals = Refusals(self.bounds.refusals_per_min, clock.now_ms)
        self._receipts = Receipts(clock)
        self.trust = Trust(self)
        self.trust.watch(self.waits.end)
        self.heads = Heads(store, realm)
        store.context.is_genuine = realm.is_genuine
        realm.keys = store.keys
        store.join(realm.pubkey, self.trust.lost)
        store.context.refused = self._refusals.draw
        store.context.recv_gate = recv_gate
        store.context.private_webhooks = private_webhooks

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self, operator_token: str | Keeper) -> None:
        """Open the store; see to it that the operator is in it, with a token that its keeper has."""
        await self.store.open()
        await self.trust.operator.meet(operator_token)

    def drain(self) -> None:
        """No new leases; who waits is answered with what there is."""
        self.is_draining = True
        self.waits.end()

    async def close(self) -> None:
        self.drain()
        await self.trust.settle()
        try:
            await self.tell_refusals(everything=True)
            await self.heads.sign()
        except CovenantError as failed:
            log.warning("the end of the chain could not be signed: %s", failed)
        await self.store.close()

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def new_id(self) -> str:
        """A random UUID."""
        return self._ids.lease()

    # --- who ----------------------------------------------------------------------------------------------

    def authenticate(self, token: str | None) -> Caller:
        caller = None if not token else self.store.caller_of(digest_of(token))
        if caller is None:
            raise Unauthenticated("a valid token is needed: Authorization: Bearer <token>")
        return caller

    async def recognise(self, token: str | None) -> Caller:
        """The same; one whom another daemon has just enrolled is known here, too."""
        try:
            return self.authenticate(token)
        except Unauthenticated:
            if not token or not self.store.is_shared:
                raise
            await self.store.refresh()
            return self.authenticate(token)

    def operator(self) -> Caller:
        """With the token that is good now: it may be another tomorrow."""
        caller = self.store.caller_at(self.realm.operator.pubkey)
        if caller is None:
            raise UnknownPeer("the operator is not enrolled", peer=self.realm.operator.display)
        return caller

    def meter(self, caller: Caller) -> None:
        """Count one request of this caller; refused when there were too many of late."""
        self._meter.draw(caller.agent.pubkey, self.store.companions() if self.store.is_shared else 1)

    async def note_stranger(self, transport: str) -> None:
        """Somebody without a valid token: written down, or counted when there are many."""
        count = self._refusals.draw(_NOBODY)
        if count >= 0:
            await self.store.run(c.NoteRefusal(None, "authentication_failed", transport, count=count))

    async def tell_refusals(self, everything: bool = False) -> None:
        """Write down how often somebody was refused in silence, once there is an end to it."""
        for pubkey, count in self._refusals.counted(everything):
            known = self.store.agent_of(pubkey)
            subject = pubkey if known is None else known.display
            await self.store.run(c.NoteRefusal(None, "refusals_counted", subject=subject, count=count))

    def revoked_in(self, entries: Iterable[QueueEntry]) -> list[str]:
        """Return the keys of the revoked peers among the senders, recipients and holders of these tasks."""
        parties = {
            agent.pubkey for one in entries for agent in (one.task.sender, one.task.recipient, one.leased_to) if agent
        }
        is_enrolled, is_in = self.store.agent_of, self.store.caller_at
        return sorted(pubkey for pubkey in parties if is_enrolled(pubkey) is not None and is_in(pubkey) is None)

    def named(self, name: str) -> AgentId:
        """The enrolled agent with this label or key, or one of that label, or with that key, that nobody is: the rules
        say, to those who may hear it, that it is not there. Both take the same steps, and the same time."""
        free_key = base58(token_bytes(32))  # a new one each time, so that nobody can have it
        unknown = AgentId(full_label(name), name if is_key(name) else free_key)
        return self._enrolled(name) or unknown

    def agent(self, name: str) -> AgentId:
        """The enrolled agent with this label or key, for callers who may know that there is none."""
        found = self._enrolled(name)
        if found is None:
            raise UnknownPeer(f"no peer {name}", peer=name)
        return found

    def meant(self, caller: Caller, name: str) -> AgentId:
        """Whom the caller names. Only the operator hears that there is nobody of that name."""
        return self.agent(name) if caller.is_operator else self.named(name)

    def key_of(self, name: str) -> str:
        """Whose label or key this is; a name that nobody has stands for itself."""
        found = self._enrolled(name)
        return name if found is None else found.pubkey

    def _enrolled(self, name: str) -> AgentId | None:
        by_key, by_label = self.store.agent_of(name), self.store.agent_of(_label(name))
        return by_key or by_label

    # --- doing --------------------------------------------------------------------------------------------

    def run(self, caller: Caller, command: c.Command) -> Coroutine[Any, Any, Any]:
        return self.store.run(c.Call(caller, command))

    def run_and_settle(self, caller: Caller, command: c.SendTask | c.AddMessage) -> Coroutine[Any, Any, Any]:
        """Run it, and wait until its task has ended or asks its sender for something, as long as a request may take.
        Nothing of that is told: who wants to know asks then. Who may not wait does not: its command is done."""
        return self.store.run_and_settle(c.Call(caller, command), self._place_to_settle)

    def _place_to_settle(self, caller: Caller) -> Wait | None:
        peer = caller.agent.pubkey
        return self.waits.timed(peer) if not self.is_draining and self.waits.has_room(peer) else None

    async def run_all(self, caller: Caller, commands: Sequence[c.Command]) -> list[Any]:
        return await self.store.run_all([c.Call(caller, command) for command in commands])

    async def take(
        self, caller: Caller, command: c.LeaseTasks | c.DrainResults, wait_ms: int, receipt: str | None = None
    ) -> list[Any]:
        """Nothing is taken for a caller that goes away, is thrown out, or waits when the daemon ends. Under a receipt,
        the same receive again gets the same answer: the first one may have been lost on its way."""
        if receipt is None:
            return await self._take(caller, command, wait_ms)
        check_text(receipt, "receipt", self.store.limits.key_bytes_max)
        return await self._receipts.take(
            caller.agent.pubkey, receipt, lambda undoing: self._take(caller, command, wait_ms, undoing)
        )

    async def give_back(self, caller: Caller, receipt: str) -> int:
        """How many commands it took to undo the receive."""
        if self.store.caller_of(caller.token) is None:
            raise Unauthenticated("the token is not valid (any more)")
        check_text(receipt, "receipt", self.store.limits.key_bytes_max)
        undoing = await self._receipts.forget(caller.agent.pubkey, receipt)
        left = list(undoing)
        try:
            while left:
                doing = asyncio.ensure_future(self.store.run(left[0]))
                try:
                    await asyncio.shield(doing)
                finally:
                    if await _is_done(doing):
                        del left[0]
        except BaseException:
            self._receipts.owe(caller.agent.pubkey, receipt, left)
            raise
        return len(undoing)

    async def _take(
        self,
        caller: Caller,
        command: c.LeaseTasks | c.DrainResults,
        wait_ms: int,
        undoing: list[c.Command] | None = None,
    ) -> list[Any]:
        if self.is_draining:
            if isinstance(command, c.LeaseTasks):
                raise Draining("the daemon is ending and hands out no more tasks")
            wait_ms = 0
        call = c.Call(caller, command)
        wait_ms = min(wait_ms, self.bounds.wait_ms_max)
        if wait_ms == 0:
            return await self.store.take(call, 0, undoing)
        with self.waits.interruptible(caller.agent.pubkey):
            return await self.store.take(call, wait_ms, undoing)
        return []

    def ask(self, caller: Caller, query: Query) -> Coroutine[Any, Any, Any]:
        return self.store.ask(query, caller)

    async def watch(
        self,
        caller: Caller,
        task_id: str,
        after: int,
        wait_ms: int,
        cancel_known: bool | None = None,
        has_place: bool = False,
    ) -> QueueEntry:
        """`has_place`: the caller is counted among those who wait already."""
        query = GetTask(self.by(caller), task_id)
        wait_ms = 0 if self.is_draining else min(wait_ms, self.bounds.wait_ms_max)
        if wait_ms:
            with self.waits.interruptible(caller.agent.pubkey, has_place):
                return await self.store.watch(query, after, wait_ms, caller, cancel_known)
        entry: QueueEntry = await self.store.ask(query, caller)
        return entry

    async def listen(
        self, caller: Caller, lease_id: str, after: int, wait_ms: int, cancel_known: bool = False
    ) -> Inputs:
        query = ListInputs(self.by(caller), lease_id, after)
        wait_ms = 0 if self.is_draining else min(wait_ms, self.bounds.wait_ms_max)
        if wait_ms:
            with self.waits.interruptible(caller.agent.pubkey):
                return await self.store.listen(query, wait_ms, cancel_known, caller)
        heard: Inputs = await self.store.ask(query, caller)
        return heard

    async def compact(self, caller: Caller, older_than_ms: int | None) -> Compaction:
        return await self.store.compact(c.Call(caller, c.CompactHistory(self.by(caller), older_than_ms)))

    # --- rights -------------------------------------------------------------------------------------------

    def enroll(
        self, caller: Caller, display: str, pubkey: str | None, actions: Sequence[str]
    ) -> Coroutine[Any, Any, tuple[PeerView, str]]:
        """A new peer, and its token."""
        return self.trust.enroll(caller, display, pubkey, actions)

    async def require(self, caller: Caller, action: str) -> None:
        """Raise unless the caller may do this. It counts as a use."""
        await self.run(caller, c.UseRight(self.by(caller), action))

    async def under(self, caller: Caller, action: str, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What is read under a right, which is used once there is something to tell: a read that fails is no use of it.
        (Contract 26.) Who does not hold it is refused before anything is read."""
        if await self.may(caller, action):
            found = await read()
            await self.require(caller, action)
            return found
        await self.require(caller, action)
        with committed:  # it was granted just now
            return await read()

    async def may(self, caller: Caller, action: str) -> bool:
        """Whether it would be let in; nothing is used up."""
        return (await self.check(caller, caller.agent, demand_for(action, action)))[1] is None

    async def check(self, caller: Caller, subject: AgentId, demand: Demand) -> tuple[str | None, str | None]:
        """Return the grant that would let this subject do that, or the code of the refusal. Both are None if it may
        without a grant."""
        found: tuple[str | None, str | None] = await self.ask(caller, CheckGrant(None, subject.pubkey, demand))
        return found

    # --- what a caller's words mean -----------------------------------------------------------------------

    def by(self, caller: Caller) -> AgentId | None:
        """How the rules name the caller: the operator sees all, and so is nobody in particular."""
        return None if caller.role is OPERATOR else caller.agent

    def send(self, caller: Caller, task: Task) -> c.SendTask:
        return c.SendTask(caller.agent, task)

    def lease(
        self,
        caller: Caller,
        recipient: str | None,
        incarnation: str | None,
        limit: int = 1,
        kinds: frozenset[str] | None = None,
    ) -> c.LeaseTasks:
        whose, holder = self._for(caller, recipient), self._incarnation(caller, incarnation)
        return c.LeaseTasks(self.by(caller), whose, holder, limit, kinds)

    def drain_results(self, caller: Caller, peer: str | None, limit: int = 1) -> c.DrainResults:
        return c.DrainResults(self.by(caller), self._for(caller, peer), limit)

    def post(self, caller: Caller, result: Result, incarnation: str | None) -> c.PostResult:
        by = None if caller.role is OPERATOR else caller.agent
        return c.PostResult(by, result, self._incarnation(caller, incarnation))

    def commit_run(self, caller: Caller, lease_id: str, commit: RunCommit, incarnation: str | None) -> c.CommitRun:
        return c.CommitRun(self.by(caller), lease_id, commit, self._incarnation(caller, incarnation))

    def _for(self, caller: Caller, name: str | None) -> AgentId | None:
        """Whom the caller names, or itself; the operator, if it names nobody, receives for everybody."""
        if name is None:
            return self.by(caller)
        if name == "*":
            return None
        return self.meant(caller, name)

    def _incarnation(self, caller: Caller, named: str | None) -> str:
        """Return the worker id under which a caller leases and posts: the one that it names, else its public key.

        A client of the first protocol names neither a worker nor a lease. Its key is all that every connection, every
        daemon of the store and every later process know of it. So each of them takes the client for the holder of a
        lease that another one gave it. An operator that receives for others is a worker of its own.
        """
        if named is None:
            return caller.agent.pubkey
        check_text(named, "incarnation", self.store.limits.key_bytes_max)
        return named


async def _is_done(doing: asyncio.Future[Any]) -> bool:
    """Whoever waits for it may have gone away: what was given back then is not owed, and others may have it."""
    await asyncio.wait([doing], timeout=_GIVING_BACK_S)
    if not doing.done():
        doing.cancel()
        return False
    return not doing.cancelled() and doing.exception() is None


def _label(name: str) -> str:
    """`alice` is short for `alice@local`."""
    return name if "@" in name else f"{name}@local"
