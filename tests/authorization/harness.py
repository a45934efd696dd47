"""A harness that has the rules decide a cell, on the things of `world.py` in a store in memory.

The command is decided and not applied, so one set of things serves all cells. The grants of a cell are given through
the rules, and revoked after it.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct, structs

from covenant import AgentId, CovenantError, Limits
from covenant.model import command as c
from covenant.model import event as e
from covenant.model.audit import AuditRow
from covenant.model.error import Malformed
from covenant.model.peer import Caller, Scope, grant_key, peer_key
from covenant.model.peer import Role as RealRole
from covenant.model.repair import DuplicateRisk
from covenant.rules.decide import DECIDE, decide
from covenant.rules.peer import check_caller
from covenant.rules.query import answer
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.memory import Memory
from tests.authorization.verbs import LET_IN, Verb
from tests.authorization.verdict import (
    CUT_OFF,
    MISSING,
    NOT_PERMITTED,
    SCOPE,
    SCOPES,
    SENDER_MISMATCH,
    UNAUTHENTICATED,
    UNGRANTABLE,
    Cell,
    Fate,
    Held,
    Role,
    Width,
)
from tests.authorization.world import SAMPLES, State, Thing, World

REFUSALS: Final = frozenset(
    (
        UNAUTHENTICATED,
        MISSING,
        SCOPE,
        NOT_PERMITTED,
        SENDER_MISMATCH,
        "unknown_task",
        "unknown_lease",
        "unknown_grant",
        "unknown_peer",
        "recipient_refused",
    )
)
"""The codes of authorization. A call with any other code was let in, and then refused for another reason."""
_TIMED: Final = (Fate.EXPIRED, Fate.EXPIRED_NOW, Fate.SOURCE_EXPIRED)
_BOUNDED: Final = (Fate.BOUNDED, Fate.USED_UP, Fate.SOURCE_USED_UP)


class Judged(Struct, frozen=True):
    """The decision of the rules: as a verdict, as the error, and as audit rows."""

    verdict: str
    refusal: CovenantError | None = None
    rows: tuple[AuditRow, ...] = ()
    events: int = 0
    is_command: bool = False  # else a query

    @property
    def is_quiet(self) -> bool:
        """Whether a refusal changed nothing, and that of a command left a row."""
        return self.events == 0 and (not self.is_command or any(not row.passed for row in self.rows))

    @property
    def is_done(self) -> bool:
        return self.refusal is None

    def words(self, thing: Thing) -> str:
        """Return all that the caller can read, without the ids that it gave."""
        told = str((None if self.refusal is None else self.refusal.to_wire(), self.rows))
        for given in (thing.task, thing.lease, thing.slot, thing.grant):
            told = told.replace(given, "…") if given else told
        return told


class Harness:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Memory(Limits(), self.clock, CountingIds())
        self.world = World(self.store)
        self.things: dict[State, Thing] = {}
        self.spare = SAMPLES[State.NOTHING]

    async def open(self) -> None:
        await self.store.open()
        await self.world.enroll("operator@local", RealRole.OPERATOR)
        await self.world.settle()
        for state in State:
            self.things[state] = await self.world.make(state)
        self.spare = await self.world.make(State.NOTHING)

    async def close(self) -> None:
        await self.store.close()

    # --- one cell -----------------------------------------------------------------------------------------

    async def judged(self, cell: Cell) -> Judged:
        given: list[str] = []
        caller, thing = self.world.callers[cell.role], self.things[cell.state]
        is_enrolled = cell.role not in (Role.NO_TOKEN, Role.REVOKED)
        is_late = False
        try:
            if is_enrolled:
                given += [await self.world.grant(caller.agent, action) for action in cell.verb.besides]
            if is_enrolled and cell.held is not None:
                try:
                    is_late = await self._grant(cell, cell.held, thing, given)
                except Malformed as refusal:
                    return Judged(UNGRANTABLE, refusal)
            return self._decided(cell, thing, is_late)
        finally:
            for grant_id in given:
                await self.world.revoke(grant_id)

    def _decided(
        self, cell: Cell, thing: Thing, is_late: bool = False, risk: DuplicateRisk = "operator_accepted"
    ) -> Judged:
        state, ctx, caller = self.store.state, self.store.context, self.world.callers[cell.role]
        ctx.now, ctx.recv_gate = self.clock.now_ms() + is_late, cell.verb.asks_recipient
        call = self.world.call(caller.agent, thing, self.world.peers["eve@lab"], cell.role is Role.OPERATOR, risk)
        try:
            check_caller(caller, state)
        except CovenantError as refusal:
            return Judged(_verdict_of(refusal), refusal)
        steps = [self._step(caller, step) for step in cell.verb.rule(call)]
        if cell.verb.names is not None:
            assert len({step.verdict for step in steps}) == 1, f"each by itself: {cell}"
        return next((step for step in steps if not step.is_done), steps[-1] if steps else Judged(LET_IN))

    def _step(self, caller: Caller, step: Any) -> Judged:
        state, ctx = self.store.state, self.store.context
        try:
            if type(step) not in DECIDE:
                answer(step, state, ctx)
                return Judged(LET_IN)
            commit = decide(c.Call(caller, step), state, ctx)
        except CovenantError as refusal:
            return Judged(_verdict_of(refusal), refusal)
        if isinstance(commit.reply, CovenantError):
            return Judged(_verdict_of(commit.reply), commit.reply, commit.audit, len(commit.events), True)
        return Judged(LET_IN, None, commit.audit)

    # --- its grant ----------------------------------------------------------------------------------------

    async def _grant(self, cell: Cell, held: Held, thing: Thing, given: list[str]) -> bool:
        """Give the grant, let the rules use and remember it for another call, and then bring about its fate.

        Returns whether that fate comes only with the next millisecond.
        """
        world, caller, elsewhere = self.world, self.world.callers[cell.role], self._elsewhere(cell)
        other = world.counterparty(cell.verb.action or "", cell.role, thing)
        action = action_for(cell.verb.action, held.width, other)
        scope = _scope_for(held, other, _ids(cell.verb, thing), _ids(cell.verb, elsewhere))
        subject = world.peers["bob@lab"] if cell.verb.asks_recipient else caller.agent
        holder = world.peers["zoe@lab"] if held.by_another else subject
        source: str | None = None
        giver: AgentId | None = None
        expires = self.clock.now_ms() + 1 if held.fate in _TIMED else None
        if held.fate in _BOUNDED:
            scope = structs.replace(scope, max_uses=1)
        if held.fate in (Fate.PASSED_ON, *CUT_OFF):
            giver = world.peers["dan@lab"]
            if held.fate is Fate.SOURCE_LOST:
                giver = await world.enroll(f"g{world.new_id()}@lab")
            source = await world.grant(giver, action, scope, expires)
            given.append(source)
        grant = await world.grant(holder, action, scope, expires, source, giver)
        given.append(grant)
        if held.fate is not Fate.ALIVE or not all(right for _, right in held.pins):
            self._warm_up(cell, held, elsewhere)
        await self._end(held.fate, grant, source, giver)
        return held.fate is Fate.EXPIRED_NOW

    def _warm_up(self, cell: Cell, held: Held, elsewhere: Thing) -> None:
        self._decided(cell, elsewhere, risk="idempotent" if ("risk", False) in held.pins else "operator_accepted")

    def _elsewhere(self, cell: Cell) -> Thing:
        """Return another thing that the verb can be called on."""
        return next((self.things[state] for state in cell.verb.on if state is not cell.state), self.spare)

    async def _end(self, fate: Fate, grant: str, source: str | None, giver: AgentId | None) -> None:
        if fate in (Fate.EXPIRED, Fate.SOURCE_EXPIRED):
            self.clock.advance(2)
        elif fate in (Fate.USED_UP, Fate.SOURCE_USED_UP):
            self._apply(e.GrantUsed(grant_key(source or grant)))
        elif fate in (Fate.REVOKED, Fate.SOURCE_REVOKED):
            await self.world.revoke(source or grant)
        elif fate is Fate.SOURCE_LOST:  # and its grants are not ended yet: that takes steps
            assert giver is not None
            self._apply(e.PeerRevoked(peer_key(giver.pubkey)))

    def _apply(self, event: e.Event) -> None:
        self.store.state.apply((event,), self.clock.now_ms())


def _verdict_of(refusal: CovenantError) -> str:
    return refusal.code if refusal.code in REFUSALS else LET_IN


def action_for(action: str | None, width: Width, other: AgentId) -> str:
    """Return the action that a grant of this width names."""
    action = action or "a2a.send.<recipient>"
    start, has_peer, _ = action.partition("<")
    stem = start if has_peer else action.rpartition(".")[0] + "."
    return {
        Width.EXACT: f"{start}{other.display}" if has_peer else action,
        Width.KEY: start + other.pubkey,
        Width.FAMILY: f"{stem}*",
        Width.WHOLE: f"{action.partition('.')[0]}.*",
        Width.OTHER_PEER: f"{start}zed@lab",
        Width.OTHER_ACTION: "audit.read" if action != "audit.read" else "peers.list",
    }[width]


def _ids(verb: Verb, thing: Thing) -> tuple[str, str]:
    """Return the task and the lease that a call on this thing is about."""
    return thing.child if verb.from_run else thing.task, thing.lease


def _scope_for(held: Held, other: AgentId, right_ids: tuple[str, str], wrong_ids: tuple[str, str]) -> Scope:
    right = dict(zip(SCOPES, (other.pubkey, *right_ids, "operator_accepted"), strict=True))
    wrong = dict(zip(SCOPES, (AgentId.named("zed@lab").pubkey, *wrong_ids, "idempotent"), strict=True))
    pins: dict[str, Any] = {scope: (right if is_right else wrong)[scope] for scope, is_right in held.pins}
    return Scope(1, pins.get("peer"), pins.get("task"), pins.get("lease"), pins.get("risk"))
