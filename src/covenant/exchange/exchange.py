"""The exchange: every call of every surface, from the token to the reply.

It knows who calls, hands the command to the store together with the caller, and so has the right to do it, the doing
and the audit of it decided in one commit. It keeps what belongs to nobody's task: the realm's key, the bounds of each
peer, and the signature under the end of the chain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from covenant.exchange.bounds import Bounds, Gauge, Meter, Refusals
from covenant.exchange.realm import Realm
from covenant.exchange.receipts import Receipts
from covenant.exchange.token import digest_of, make_token
from covenant.model import command as c
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow, Logged
from covenant.model.error import (
    CovenantError,
    Draining,
    Malformed,
    MissingCapability,
    NotPermitted,
    SenderMismatch,
    Unauthenticated,
    UnknownPeer,
    UnknownTask,
)
from covenant.model.peer import Caller, Capability, Demand, GrantedView, PeerView, Role, Scope
from covenant.model.query import CheckGrant, GetTask, Query
from covenant.model.task import Result, Task
from covenant.model.view import Compaction, QueueEntry
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
_WRITTEN_DOWN: Final = (NotPermitted, UnknownTask, SenderMismatch)

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
    ) -> None:
        self.store = store
        self.realm = realm
        self.bounds = bounds or Bounds()
        self.waits = Gauge(self.bounds.waits_max, "waits")
        self.connections = Gauge(self.bounds.connections_max, "connections")
        self.is_draining = False
        self.incarnation = ids.lease()
        self._clock = clock
        self._ids = ids
        self._meter = Meter(self.bounds.requests_per_s, self.bounds.burst)
        self._refusals = Refusals(self.bounds.refusals_per_min)
        self._receipts = Receipts(clock)
        self._waiting: dict[asyncio.Task[Any], str] = {}
        self._on_lost_trust: list[Callable[[str], None]] = []
        self._signed_seq = 0
        self._signing = False
        store.context.is_genuine = realm.is_genuine
        store.context.recv_gate = recv_gate

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self, operator_token: str) -> None:
        """Open the store; see to it that the operator is in it, with this token."""
        await self.store.open()
        digest = digest_of(operator_token)
        known = self.store.caller_of(digest)
        if known is not None and known.agent == self.realm.operator:
            return
        if self.store.agent_of(self.realm.operator.pubkey) is not None:
            await self.store.run(c.RotateToken(None, self.realm.operator.pubkey, digest))
            return
        grants = tuple(self._grant(self.realm.operator, action) for action in OPERATOR_ACTIONS)
        await self.store.run(c.EnrollPeer(None, self.realm.operator, Role.OPERATOR, digest, grants))

    def drain(self) -> None:
        """No new leases; who waits is answered with what there is."""
        self.is_draining = True
        for task in list(self._waiting):
            task.cancel()

    async def close(self) -> None:
        self.drain()
        try:
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

    def meter(self, caller: Caller) -> None:
        """Count one request of this caller; refused when there were too many of late."""
        self._meter.draw(caller.agent.pubkey)

    async def note_stranger(self, transport: str) -> None:
        """Somebody without a valid token: written down, or counted when there are many."""
        count = self._refusals.next(_NOBODY)
        self._refusals.note(_NOBODY, count >= 0)
        if count >= 0:
            await self.store.run(c.NoteRefusal(None, "authentication_failed", transport, count))

    def watch_trust(self, lost: Callable[[str], None]) -> None:
        """Be told the key of a peer whose token is worth nothing from now on."""
        self._on_lost_trust.append(lost)

    def agent(self, name: str) -> AgentId:
        """The enrolled agent with this label or key."""
        found = self.store.agent_of(name) or self.store.agent_of(_label(name))
        if found is None:
            raise UnknownPeer(f"no peer {name}", peer=name)
        return found

    # --- doing --------------------------------------------------------------------------------------------

    async def run(self, caller: Caller, command: c.Command) -> Any:
        call = self._call(caller, command)
        try:
            return await self.store.run(call)
        except _WRITTEN_DOWN:
            self._refusals.note(caller.agent.pubkey, call.refusals >= 0)
            raise

    async def run_all(self, caller: Caller, commands: Sequence[c.Command]) -> list[Any]:
        """Of a batch, one refusal is written down; the others are counted."""
        calls = [self._call(caller, command) for command in commands[:1]]
        calls += [c.Call(caller, command, -1) for command in commands[1:]]
        replies = await self.store.run_all(calls)
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, _WRITTEN_DOWN):
                self._refusals.note(caller.agent.pubkey, call.refusals >= 0)
        return replies

    async def take(
        self, caller: Caller, command: c.LeaseTasks | c.DrainResults, wait_ms: int, receipt: str | None = None
    ) -> list[Any]:
        """Nothing is taken for a caller that goes away, is thrown out, or waits when the daemon ends. Under a receipt,
        the same receive again gets the same answer: the first one may have been lost on its way."""
        if receipt is None:
            return await self._take(caller, command, wait_ms, [])
        check_text(receipt, "receipt", self.store.limits.key_bytes_max)
        return await self._receipts.take(
            f"{caller.agent.pubkey}/{receipt}", lambda undoing: self._take(caller, command, wait_ms, undoing)
        )

    async def give_back(self, caller: Caller, receipt: str) -> int:
        """How many commands it took to undo the receive."""
        if self.store.caller_of(caller.token) is None:
            raise Unauthenticated("the token is not valid (any more)")
        check_text(receipt, "receipt", self.store.limits.key_bytes_max)
        undoing = await self._receipts.forget(f"{caller.agent.pubkey}/{receipt}")
        for command in undoing:
            await self.store.run(command)
        return len(undoing)

    async def _take(
        self, caller: Caller, command: c.LeaseTasks | c.DrainResults, wait_ms: int, undoing: list[c.Command]
    ) -> list[Any]:
        pubkey = caller.agent.pubkey
        if self.is_draining:
            if isinstance(command, c.LeaseTasks):
                raise Draining("the daemon is ending and hands out no more tasks")
            wait_ms = 0
        call = self._call(caller, command)
        wait_ms = min(wait_ms, self.bounds.wait_ms_max)
        if wait_ms == 0:
            return await self.store.take(call, 0, undoing)
        try:
            with self.waits.one(pubkey):
                taken: list[Any] = await self._interruptible(pubkey, self.store.take(call, wait_ms, undoing), [])
        except asyncio.CancelledError:
            await self._undo(undoing)
            raise
        return taken

    async def _undo(self, undoing: list[c.Command]) -> None:
        """What was taken in the very moment in which nobody wanted it any more goes back."""
        for command in undoing:
            await asyncio.shield(asyncio.ensure_future(self.store.run(command)))
        undoing.clear()

    async def ask(self, caller: Caller, query: Query) -> Any:
        return await self.store.ask(query, caller)

    async def watch(
        self, caller: Caller, task_id: str, after: int, wait_ms: int, cancel_known: bool | None = None
    ) -> QueueEntry:
        pubkey = caller.agent.pubkey
        query = GetTask(self.by(caller), task_id)
        wait_ms = 0 if self.is_draining else min(wait_ms, self.bounds.wait_ms_max)
        if wait_ms == 0:
            entry: QueueEntry = await self.store.ask(query, caller)
            return entry
        with self.waits.one(pubkey):
            found: QueueEntry | None = await self._interruptible(
                pubkey, self.store.watch(query, after, wait_ms, caller, cancel_known), None
            )
            return found or await self.store.ask(query, caller)

    async def _interruptible(self, pubkey: str, work: Any, nothing: Any) -> Any:
        """A wait that the exchange can end: as if its time were over."""
        task = asyncio.current_task()
        assert task is not None
        waiting = asyncio.ensure_future(work)
        self._waiting[waiting] = pubkey
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.cancelled() and not task.cancelling():
                return nothing
            waiting.cancel()
            await asyncio.wait([waiting])
            raise
        finally:
            self._waiting.pop(waiting, None)

    async def require(self, caller: Caller, action: str) -> None:
        """Raise unless the caller is the operator or holds this action."""
        if not caller.is_operator and not (await self.check(caller, caller.agent, Demand(action, action)))[0]:
            raise MissingCapability(f"{caller.agent} has no grant of {action}", action=action)

    async def check(self, caller: Caller, subject: AgentId, demand: Demand) -> tuple[str | None, bool]:
        """The grant that would let this subject do that, and whether it holds the action at all."""
        found: tuple[str | None, bool] = await self.ask(caller, CheckGrant(None, subject.pubkey, demand))
        return found

    async def compact(self, caller: Caller, older_than_ms: int | None) -> Compaction:
        return await self.store.compact(self._call(caller, c.CompactHistory(self.by(caller), older_than_ms)))

    def by(self, caller: Caller) -> AgentId | None:
        """How the rules name the caller: the operator sees all, and so is nobody in particular."""
        return None if caller.is_operator else caller.agent

    def _call(self, caller: Caller, command: c.Command) -> c.Call:
        return c.Call(caller, command, self._refusals.next(caller.agent.pubkey))

    def send(self, caller: Caller, task: Task) -> c.SendTask:
        return c.SendTask(caller.agent, task)

    def lease(self, caller: Caller, recipient: str | None, incarnation: str | None, limit: int = 1) -> c.LeaseTasks:
        by = self.by(caller)
        return c.LeaseTasks(by, self._for(caller, recipient), self._incarnation(caller, incarnation), limit)

    def drain_results(self, caller: Caller, peer: str | None, limit: int = 1) -> c.DrainResults:
        return c.DrainResults(self.by(caller), self._for(caller, peer), limit)

    def post(self, caller: Caller, result: Result, incarnation: str | None) -> c.PostResult:
        return c.PostResult(self.by(caller), result, self._incarnation(caller, incarnation))

    def _for(self, caller: Caller, name: str | None) -> AgentId | None:
        """A peer receives for itself; the operator for everybody, or for whom it names."""
        if not caller.is_operator:
            if name is not None and (name == "*" or self.agent(name) != caller.agent):
                raise NotPermitted(f"{caller.agent} receives for itself only")
            return caller.agent
        return None if name in (None, "*") else self.agent(str(name))

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
        if grants and not caller.is_operator:
            raise NotPermitted("only the operator enrolls a peer with grants")
        command = c.EnrollPeer(self.by(caller), agent, Role.PEER, digest_of(token), grants)
        return await self.run(caller, command), token

    async def revoke_peer(self, caller: Caller, name: str, reason: str) -> PeerView:
        agent = self.agent(name)
        view: PeerView = await self.run(caller, c.RevokePeer(self.by(caller), agent.pubkey, reason))
        self._trust_lost(agent.pubkey)
        return view

    async def rotate(self, caller: Caller, name: str | None) -> tuple[PeerView, str]:
        """A peer may always change its own token."""
        agent = caller.agent if name is None else self.agent(name)
        token = make_token()
        command = c.RotateToken(self.by(caller), agent.pubkey, digest_of(token))
        view: PeerView = await self.run(caller, command)
        # Once the reply is out: who changes its own token hears the new one on a connection that this closes.
        asyncio.get_running_loop().call_soon(self._trust_lost, agent.pubkey)
        return view, token

    def _trust_lost(self, pubkey: str) -> None:
        for task, peer in list(self._waiting.items()):
            if peer == pubkey:
                task.cancel()
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
            self.agent(subject),
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
        found: list[Logged] = []
        seq = self.store.order_of(entry.task.id)
        while seq > 0 and len(found) < _STORY_MAX:
            logged = await self.store.log_at(seq)
            if logged is None:
                break
            found.append(logged)
            seq = _previous(logged, entry.task.id)
        rows = [row for logged in reversed(found) for row in rows_of(logged) if _is_about(row, logged, entry.task.id)]
        if not caller.is_operator:  # by which grant somebody else was let in is not this caller's to know
            rows = [row for row in rows if row.kind != "capability_check" or row.actor == caller.agent.display]
        return entry, rows, seq == 0

    async def sign_head(self) -> None:
        """Vouch for the chain as it is durable now, if anything was written since the last time."""
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


def _previous(logged: Logged, task_id: str) -> int:
    for event, prev in zip(logged.events, logged.prev or (0,) * len(logged.events), strict=True):
        if event.key == task_id:
            return prev
    return 0


def _is_about(row: AuditRow, logged: Logged, task_id: str) -> bool:
    """A row of this task, or one without a task in a commit that is about this one alone."""
    if row.task_id is not None:
        return row.task_id == task_id
    return {task_of(event) for event in logged.events} <= {task_id, None}


def _random_key() -> str:
    """The public half of a key that nobody keeps."""
    return Realm.throwaway().pubkey
