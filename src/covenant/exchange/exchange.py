"""The exchange: every call of every surface, from the token to the reply.

It knows who calls, hands the command to the store together with the caller, and so has the right to do it, the doing
and the audit of it decided in one commit. It keeps what belongs to nobody's task: the realm's key, the bounds of each
peer, and the signature under the end of the chain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from covenant.exchange.bounds import Bounds, Gauge, Meter, Refusals
from covenant.exchange.realm import Realm
from covenant.exchange.receipts import Receipts
from covenant.exchange.token import Keeper, digest_of, make_token
from covenant.exchange.waits import Waits
from covenant.model import command as c
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow, Logged
from covenant.model.error import (
    CovenantError,
    Draining,
    Malformed,
    PeerConflict,
    StoreUnavailable,
    Unauthenticated,
    UnknownPeer,
)
from covenant.model.peer import Caller, Capability, Demand, GrantedView, PeerView, Role, Scope
from covenant.model.query import CheckGrant, GetTask, ListInputs, Query
from covenant.model.run import RunCommit
from covenant.model.task import Result, Task
from covenant.model.view import Compaction, Inputs, QueueEntry
from covenant.rules.audit import rows_of, task_of
from covenant.rules.context import Ids
from covenant.rules.envelope import check_text
from covenant.rules.grant import OPERATOR_ACTIONS, PEER_ACTIONS, check_action
from covenant.rules.page import Room
from covenant.store.clock import Clock
from covenant.store.engine import Store

SIGN_EVERY_MS: Final = 1000
_STORY_MAX: Final = 1000
_SCAN_MAX: Final = 2000
_NOBODY: Final = "nobody"

log = logging.getLogger("covenant.exchange")

T = TypeVar("T")


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
        self.waits = Waits(self.bounds.waits_max)
        self.connections = Gauge(self.bounds.connections_max, "connections")
        self.is_draining = False
        self.incarnation = ids.lease()
        self._clock = clock
        self._ids = ids
        self._meter = Meter(self.bounds.requests_per_s, self.bounds.burst)
        self._refusals = Refusals(self.bounds.refusals_per_min, clock.now_ms)
        self._receipts = Receipts(clock)
        self._on_lost_trust: list[Callable[[str], None]] = []
        self._ending_trust: set[asyncio.Task[Any]] = set()
        self._keeper: Keeper | None = None  # of the operator's token
        self._keeping = asyncio.Lock()
        self._signed_seq = 0
        self._signing = False
        store.context.is_genuine = realm.is_genuine
        realm.keys = store.keys
        store.join(realm.pubkey, self._trust_lost)
        store.context.refused = self._refusals.draw
        store.context.recv_gate = recv_gate
        store.context.private_webhooks = private_webhooks

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self, operator_token: str | Keeper) -> None:
        """Open the store; see to it that the operator is in it, with a token that its keeper has.

        Once the store knows the operator, no other token becomes good because it was found: it may be one that was
        rotated away. A keeper that has lost the good one gets a fresh one."""
        await self.store.open()
        self._keeper = None if isinstance(operator_token, str) else operator_token
        found = [operator_token] if isinstance(operator_token, str) else operator_token.found()
        try:
            await self._meet_operator(found)
        except PeerConflict:  # another daemon was first: both have just begun
            await self.store.refresh()
            await self._meet_operator(found)

    async def _meet_operator(self, found: Sequence[str]) -> None:
        enrolled = self.store.agent_of(self.realm.operator.display)
        if enrolled is not None:
            self.realm.operator = enrolled
        operator = self.realm.operator
        known = self.store.caller_at(operator.pubkey)
        if known is None:
            grants = tuple(self._grant(operator, action) for action in OPERATOR_ACTIONS)
            token = found[0] if found else make_token()
            await self._keep(token, c.EnrollPeer(None, operator, Role.OPERATOR, digest_of(token), grants))
            return
        good = next((token for token in found if digest_of(token) == known.token), None)
        if good is None and self._keeper is None:
            log.warning("the token that was given at the start is not the operator's (any more), and opens nothing")
        elif good is None and self.store.is_shared:
            log.info("the operator's token is not kept here: the daemon that first opened this store has it")
        elif good is None:
            log.warning("the operator's token was not where it is kept; a new one was made")
            token = make_token()
            await self._keep(token, c.RotateToken(None, operator.pubkey, digest_of(token)))
        elif self._keeper is not None:
            self._keeper.settle(good)

    async def _keep(self, token: str, command: c.Command | c.Call) -> Any:
        """Make a token the operator's: whoever is killed on the way leaves it where the next start finds it."""
        if self._keeper is None:
            return await self.store.run(command)
        async with self._keeping:
            try:
                self._keeper.lay_ready(token)
            except OSError as failed:
                raise StoreUnavailable(
                    f"the operator's token cannot be kept: {failed}", outcome="not_stored"
                ) from failed
            reply = await self.store.run(command)
            try:
                self._keeper.settle(token)
            except OSError:
                log.exception(
                    "the operator's new token is laid ready, but not in its place; the next start puts it there"
                )
            return reply

    def drain(self) -> None:
        """No new leases; who waits is answered with what there is."""
        self.is_draining = True
        self.waits.end()

    async def close(self) -> None:
        self.drain()
        if self._ending_trust:
            await asyncio.wait(self._ending_trust)
        try:
            await self.tell_refusals(everything=True)
            await self.sign_head()
        except CovenantError as failed:
            log.warning("the end of the chain could not be signed: %s", failed)
        await self.store.close()

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
        self._meter.draw(caller.agent.pubkey, self.store.companions())

    async def note_stranger(self, transport: str) -> None:
        """Somebody without a valid token: written down, or counted when there are many."""
        count = self._refusals.draw(_NOBODY)
        if count >= 0:
            await self.store.run(c.NoteRefusal(None, "authentication_failed", transport, count=count))

    def watch_trust(self, lost: Callable[[str], None]) -> None:
        """Be told the key of a peer whose token is worth nothing from now on."""
        self._on_lost_trust.append(lost)

    def named(self, name: str) -> AgentId:
        """The enrolled agent with this label or key, or one of that label whose key nobody has: the rules say, to those
        who may hear it, that it is not there."""
        return self._enrolled(name) or AgentId(AgentId.named(name).display, _random_key())

    def agent(self, name: str) -> AgentId:
        """The enrolled agent with this label or key, for callers who may know that there is none."""
        found = self._enrolled(name)
        if found is None:
            raise UnknownPeer(f"no peer {name}", peer=name)
        return found

    def key_of(self, name: str) -> str:
        """Whose label or key this is; a name that nobody has stands for itself."""
        found = self._enrolled(name)
        return name if found is None else found.pubkey

    def _enrolled(self, name: str) -> AgentId | None:
        return self.store.agent_of(name) or self.store.agent_of(_label(name))

    # --- doing --------------------------------------------------------------------------------------------

    def run(self, caller: Caller, command: c.Command) -> Coroutine[Any, Any, Any]:
        return self.store.run(self._call(caller, command))

    async def run_all(self, caller: Caller, commands: Sequence[c.Command]) -> list[Any]:
        return await self.store.run_all([self._call(caller, command) for command in commands])

    async def take(
        self, caller: Caller, command: c.LeaseTasks | c.DrainResults, wait_ms: int, receipt: str | None = None
    ) -> list[Any]:
        """Nothing is taken for a caller that goes away, is thrown out, or waits when the daemon ends. Under a receipt,
        the same receive again gets the same answer: the first one may have been lost on its way."""
        if receipt is None:
            return await self._take(caller, command, wait_ms, [])
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
        for command in undoing:
            await self.store.run(command)
        return len(undoing)

    async def _take(
        self, caller: Caller, command: c.LeaseTasks | c.DrainResults, wait_ms: int, undoing: list[c.Command]
    ) -> list[Any]:
        if self.is_draining:
            if isinstance(command, c.LeaseTasks):
                raise Draining("the daemon is ending and hands out no more tasks")
            wait_ms = 0
        call = self._call(caller, command)
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

    async def settle(self, caller: Caller, task_id: str) -> None:
        """Wait until a task has ended or asks its sender for something, as long as a request may take. Nothing is told:
        who wants to know asks then."""
        if not self.is_draining:
            with self.waits.interruptible(caller.agent.pubkey):
                await self.store.settle(task_id, self.bounds.wait_ms_max)

    async def require(self, caller: Caller, action: str) -> None:
        """Raise unless the caller is the operator or holds this action. It counts as a use of it."""
        await self.run(caller, c.UseRight(self.by(caller), action))

    async def may(self, caller: Caller, action: str) -> bool:
        """Whether it would be let in; nothing is used up."""
        return caller.is_operator or (await self.check(caller, caller.agent, Demand(action, action)))[0] is not None

    async def check(self, caller: Caller, subject: AgentId, demand: Demand) -> tuple[str | None, bool]:
        """The grant that would let this subject do that, and whether it holds the action at all."""
        found: tuple[str | None, bool] = await self.ask(caller, CheckGrant(None, subject.pubkey, demand))
        return found

    async def compact(self, caller: Caller, older_than_ms: int | None) -> Compaction:
        return await self.store.compact(self._call(caller, c.CompactHistory(self.by(caller), older_than_ms)))

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def new_id(self) -> str:
        """A random UUID."""
        return self._ids.lease()

    def by(self, caller: Caller) -> AgentId | None:
        """How the rules name the caller: the operator sees all, and so is nobody in particular."""
        return None if caller.is_operator else caller.agent

    def _call(self, caller: Caller, command: c.Command) -> c.Call:
        return c.Call(caller, command)

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
        return c.PostResult(self.by(caller), result, self._incarnation(caller, incarnation))

    def commit_run(self, caller: Caller, lease_id: str, commit: RunCommit, incarnation: str | None) -> c.CommitRun:
        return c.CommitRun(self.by(caller), lease_id, commit, self._incarnation(caller, incarnation))

    def _for(self, caller: Caller, name: str | None) -> AgentId | None:
        """Whom the caller names, or itself; the operator, if it names nobody, receives for everybody."""
        if name is None:
            return self.by(caller)
        if name == "*":
            return None
        return self.agent(name) if caller.is_operator else self.named(name)

    def _incarnation(self, caller: Caller, named: str | None) -> str:
        if named is None:
            return self._incarnation_of(caller)
        check_text(named, "incarnation", self.store.limits.key_bytes_max)
        return named

    def _incarnation_of(self, caller: Caller) -> str:
        """For callers that name none: one for each peer as long as this daemon runs."""
        return f"{self.incarnation}/{caller.agent.pubkey}"

    # --- peers and grants ---------------------------------------------------------------------------------

    async def enroll(
        self, caller: Caller, display: str, pubkey: str | None, actions: Sequence[str]
    ) -> tuple[PeerView, str]:
        """A new peer with a token of its own. Without a key it gets a random one, and is known by its token alone."""
        label = AgentId.named(display).display
        agent = AgentId(label, pubkey or _random_key())
        token = make_token()
        for action in actions:
            check_action(action)
        grants = tuple(self._grant(agent, action, by=caller.agent) for action in actions)
        command = c.EnrollPeer(self.by(caller), agent, Role.PEER, digest_of(token), grants)
        return await self.run(caller, command), token

    async def revoke_peer(self, caller: Caller, name: str, reason: str) -> PeerView:
        agent = self.named(name)
        revoking = self.run(caller, c.RevokePeer(self.by(caller), agent.pubkey, reason))
        view: PeerView = await self._end_trust(agent.pubkey, revoking)
        return view

    async def rotate(self, caller: Caller, name: str | None) -> tuple[PeerView, str]:
        """A peer may always change its own token."""
        agent = caller.agent if name is None else self.named(name)
        token = make_token()
        command = c.RotateToken(self.by(caller), agent.pubkey, digest_of(token))
        if caller.is_operator and agent == self.realm.operator:
            rotating = self._keep(token, self._call(caller, command))
        else:
            rotating = self.run(caller, command)
        view: PeerView = await self._end_trust(agent.pubkey, rotating)
        return view, token

    async def _end_trust(self, pubkey: str, work: Coroutine[Any, Any, T]) -> T:
        """Done to its end, with what follows from it, also when nobody waits for the answer any more."""
        doing = asyncio.ensure_future(work)
        self._ending_trust.add(doing)
        try:
            return await asyncio.shield(doing)
        finally:
            # Behind the reply: who changes its own token hears the new one on a connection that this closes.
            doing.add_done_callback(partial(self._trust_ended, pubkey))

    def _trust_ended(self, pubkey: str, doing: asyncio.Task[Any]) -> None:
        self._ending_trust.discard(doing)
        if not doing.cancelled() and doing.exception() is None:
            self._trust_lost(pubkey)

    def _trust_lost(self, pubkey: str) -> None:
        self.waits.end(pubkey)
        for tell in self._on_lost_trust:
            tell(pubkey)

    async def grant(
        self,
        caller: Caller,
        subject: str,
        action: str,
        scope: Scope,
        expires_ms: int | None,
        delegable: bool,
        parent: str | None,
    ) -> GrantedView:
        check_action(action)
        capability = Capability(
            self._ids.lease(),
            self.named(subject),
            action,
            caller.agent,
            self._clock.now_ms(),
            scope,
            expires_ms,
            delegable,
            parent,
        )
        command = c.GrantCapability(self.by(caller), self.realm.sign_grant(capability))
        granted: GrantedView = await self.run(caller, command)
        return granted

    def _grant(self, subject: AgentId, action: str, by: AgentId | None = None) -> Any:
        granter = by or self.realm.operator
        now = self._clock.now_ms()
        return self.realm.sign_grant(Capability(self._ids.lease(), subject, action, granter, now))

    # --- the log ------------------------------------------------------------------------------------------

    async def recent_rows(
        self,
        caller: Caller,
        limit: int,
        before: int | None,
        wanted: Callable[[AuditRow], bool],
    ) -> tuple[list[AuditRow], int | None]:
        """Rows that pass, the newest first, and where to go on; looks at a bounded stretch of the log."""
        rows: list[AuditRow] = []  # of whole commits: the last may bring a few more than were asked for
        room = Room(self.store.limits)
        scanned = 0
        while len(rows) < limit and scanned < _SCAN_MAX and not room.is_full:
            stretch = await self.store.log_back(before, min(_SCAN_MAX - scanned, 200))
            if not stretch:
                return rows, None
            for logged in stretch:
                scanned += 1
                before = logged.seq
                passed = [row for row in reversed(list(rows_of(logged))) if wanted(row)]
                rows += passed
                if len(rows) >= limit or not all(map(room.takes, passed)):
                    break
        return rows, before

    async def story(self, caller: Caller, task_id: str) -> tuple[QueueEntry, list[AuditRow], bool]:
        """What happened to a task, in order, and whether the log still reaches back to its beginning."""
        entry: QueueEntry = await self.ask(caller, GetTask(self.by(caller), task_id))
        task_id = entry.task.id
        rows: list[AuditRow] = []
        seq, scanned = await self.store.order_of(task_id), 0
        while seq > 0 and scanned < _STORY_MAX:
            trail = await self.store.log_trail(seq, task_id, _STORY_MAX - scanned)
            if not trail:
                break
            told = (row for logged in reversed(trail) for row in rows_of(logged) if _is_about(row, logged, task_id))
            rows = [*told, *rows]
            scanned += len(trail)
            seq = trail[-1].previous(task_id)
        if not caller.is_operator:
            rows = [row for row in rows if _is_for(row, caller.agent)]
        return entry, rows, seq == 0

    async def tell_refusals(self, everything: bool = False) -> None:
        """Write down how often somebody was refused in silence, once there is an end to it."""
        for pubkey, count in self._refusals.counted(everything):
            known = self.store.agent_of(pubkey)
            subject = pubkey if known is None else known.display
            await self.store.run(c.NoteRefusal(None, "refusals_counted", subject=subject, count=count))

    async def sign_head(self) -> None:
        """Vouch for the chain as it is durable now, if anything was written since the last time."""
        sign_lanes = getattr(self.store, "sign_lanes", None)
        if sign_lanes is not None:
            await sign_lanes(self.realm.sign_head)
            return
        head_of = getattr(self.store, "head", None)
        if head_of is None or self._signing:
            return
        self._signing = True
        try:
            head = await head_of()
            if head.seq > self._signed_seq:
                signature = self.realm.sign_head(head.seq, head.hash)
                await self.store.run(c.SignHead(None, head.seq, head.hash, signature, self.realm.pubkey))
                self._signed_seq = head.seq + 1
        finally:
            self._signing = False


def demand_for(action: str, label: str, counterparty: AgentId | None, **scope: Any) -> Demand:
    """What a call of this action would demand."""
    start = next((start for start in PEER_ACTIONS if action.startswith(start)), None)
    if start is None:
        return Demand(action, label, counterparty, **scope)
    if counterparty is None:
        raise Malformed("this action is about a counterparty: name it", field="counterparty")
    return Demand(start + counterparty.display, label, counterparty, **scope)


def _label(name: str) -> str:
    """`alice` is short for `alice@local`."""
    return name if "@" in name else f"{name}@local"


def _is_about(row: AuditRow, logged: Logged, task_id: str) -> bool:
    """A row of this task, or one without a task in a commit that is about this one alone."""
    if row.task_id is not None:
        return row.task_id == task_id
    return {task_of(event) for event in logged.events} <= {task_id, None}


def _is_for(row: AuditRow, party: AgentId) -> bool:
    """By which grant somebody else was let in, and what else it did in the same commit, is not this party's to know."""
    if row.kind == "capability_check":
        return row.actor == party.display
    return row.task_id is not None


def _random_key() -> str:
    """The public half of a key that nobody keeps."""
    return Realm.throwaway().pubkey
