"""Puts a cell before the rules: the things of `things.py` in a store in memory, and what the rules say.

The command is decided and not applied, so one set of things serves all cells; the grants of a cell are given by the
rules themselves, and revoked behind it.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from covenant import AgentId, CovenantError, Limits
from covenant.model import command as c
from covenant.model import event as e
from covenant.model.audit import AuditRow
from covenant.model.error import Malformed
from covenant.model.peer import Role as RealRole
from covenant.model.peer import Scope, grant_key
from covenant.rules.decide import DECIDE, decide
from covenant.rules.peer import check_caller
from covenant.rules.query import answer
from covenant.store.clock import CountingIds, ManualClock
from covenant.store.memory import Memory
from tests.authorization.things import State, Thing, Town
from tests.authorization.verbs import LET_IN
from tests.authorization.verdict import (
    MISSING,
    NOT_PERMITTED,
    SCOPE,
    SENDER_MISMATCH,
    UNAUTHENTICATED,
    UNGRANTABLE,
    Cell,
    Fate,
    Held,
    Role,
    Width,
)

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
"""By these authorization refuses. By any other code, a call that was let in is refused as things are."""


class Judged(Struct, frozen=True):
    """What the rules say: in a word, and in full; and what is written down of it."""

    verdict: str
    refusal: CovenantError | None = None
    rows: tuple[AuditRow, ...] = ()
    events: int = 0
    is_command: bool = False  # else a query

    @property
    def is_quiet(self) -> bool:
        """A refusal changes nothing, and that of a command leaves a row."""
        return self.events == 0 and (not self.is_command or any(not row.passed for row in self.rows))

    @property
    def is_done(self) -> bool:
        return self.refusal is None

    def words(self, thing: Thing) -> str:
        """All that the caller can read, without the ids that it gave."""
        told = str((None if self.refusal is None else self.refusal.to_wire(), self.rows))
        for given in (thing.task, thing.lease, thing.slot, thing.grant):
            told = told.replace(given, "…") if given else told
        return told


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Memory(Limits(), self.clock, CountingIds())
        self.town = Town(self.store)
        self.things: dict[State, Thing] = {}

    async def open(self) -> None:
        await self.store.open()
        await self.town.enroll("operator@local", RealRole.OPERATOR)
        await self.town.settle()
        for state in State:
            self.things[state] = await self.town.make(state)

    async def close(self) -> None:
        await self.store.close()

    # --- one cell -----------------------------------------------------------------------------------------

    async def judged(self, cell: Cell) -> Judged:
        given: list[str] = []
        caller = self.town.callers[cell.role]
        thing = self.things[cell.state]
        subject = self.town.peers["bob@lab"] if cell.verb.asks_recipient else caller.agent
        is_enrolled = cell.role not in (Role.NO_TOKEN, Role.REVOKED)
        is_late = False
        try:
            if is_enrolled:
                given += [await self.town.grant(caller.agent, action) for action in cell.verb.besides]
            if is_enrolled and cell.held is not None:
                try:
                    is_late = await self._give(cell, subject, thing, given)
                except Malformed as refusal:
                    return Judged(UNGRANTABLE, refusal)
            return self._decided(cell, thing, is_late)
        finally:
            for grant_id in given:
                await self.town.revoke(grant_id)

    def _decided(self, cell: Cell, thing: Thing, is_late: bool) -> Judged:
        state, ctx, caller = self.store.state, self.store.context, self.town.callers[cell.role]
        ctx.now, ctx.recv_gate = self.clock.now_ms() + is_late, cell.verb.asks_recipient
        rows: tuple[AuditRow, ...] = ()
        call = self.town.call(caller.agent, thing, self.town.peers["eve@lab"], cell.role is Role.OPERATOR)
        try:
            check_caller(caller, state)
            for step in cell.verb.rule(call):
                if type(step) not in DECIDE:
                    answer(step, state, ctx)
                    continue
                commit = decide(c.Call(caller, step), state, ctx)
                rows += commit.audit
                if isinstance(commit.reply, CovenantError):
                    return Judged(_verdict_of(commit.reply), commit.reply, rows, len(commit.events), True)
        except CovenantError as refusal:
            return Judged(_verdict_of(refusal), refusal, rows)
        return Judged(LET_IN, None, rows)

    # --- its grant ----------------------------------------------------------------------------------------

    async def _give(self, cell: Cell, subject: AgentId, thing: Thing, given: list[str]) -> bool:
        """Whether it is over only from the next millisecond on."""
        held, town = cell.held, self.town
        assert held is not None
        other = town.counterparty(cell.verb.action or "", cell.role, thing)
        action = action_for(cell.verb.action, held.width, other)
        task = thing.child if cell.verb.from_run else thing.task
        scope = _scope_for(held, other, task, thing.lease, town.new_id())
        holder = town.peers["zoe@lab"] if held.by_another else subject
        if held.fate is Fate.PASSED_ON or held.fate.name.startswith("SOURCE_"):
            given.append(await self._passed_on(held.fate, holder, action, scope))
            return False
        soon = self.clock.now_ms() + 1 if held.fate in (Fate.EXPIRED, Fate.EXPIRED_NOW) else None
        bound = 1 if held.fate in (Fate.USED_UP, Fate.BOUNDED) else None
        grant = await town.grant(holder, action, _bounded(scope, bound), soon)
        given.append(grant)
        if held.fate is Fate.USED_UP:
            self._use_up(grant)
        elif held.fate is Fate.EXPIRED:
            self.clock.advance(2)
        elif held.fate is Fate.REVOKED:
            await town.revoke(grant)
        return held.fate is Fate.EXPIRED_NOW

    async def _passed_on(self, fate: Fate, holder: AgentId, action: str, scope: Scope) -> str:
        town = self.town
        giver = town.peers["dan@lab"]
        if fate is Fate.SOURCE_LOST:
            giver = await town.enroll(f"g{town.new_id()}@lab")
        soon = self.clock.now_ms() + 1 if fate is Fate.SOURCE_EXPIRED else None
        bound = 1 if fate is Fate.SOURCE_USED_UP else None
        source = await town.grant(giver, action, _bounded(scope, bound), soon)
        grant = await town.grant(holder, action, _bounded(scope, bound), soon, source, giver)
        if fate is Fate.SOURCE_EXPIRED:
            self.clock.advance(2)
        elif fate is Fate.SOURCE_USED_UP:
            self._use_up(source)
        elif fate is Fate.SOURCE_LOST:
            await self.store.run(c.RevokePeer(None, giver.pubkey, "left"))
        if fate is not Fate.PASSED_ON:
            await town.revoke(source)
        return grant

    def _use_up(self, grant_id: str) -> None:
        self.store.state.apply((e.GrantUsed(grant_key(grant_id)),), self.clock.now_ms())


def _verdict_of(refusal: CovenantError) -> str:
    return refusal.code if refusal.code in REFUSALS else LET_IN


def action_for(action: str | None, width: Width, other: AgentId) -> str:
    """The action that a grant of this width names."""
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


def _scope_for(held: Held, other: AgentId, task: str, lease: str, another: str) -> Scope:
    right = {"peer": other.pubkey, "task": task, "lease": lease, "risk": "operator_accepted"}
    wrong = {"peer": AgentId.named("zed@lab").pubkey, "task": another, "lease": another, "risk": "idempotent"}
    pins: dict[str, Any] = {scope: (right if is_right else wrong)[scope] for scope, is_right in held.pins}
    return Scope(1, pins.get("peer"), pins.get("task"), pins.get("lease"), pins.get("risk"))


def _bounded(scope: Scope, uses: int | None) -> Scope:
    return Scope(1, scope.peer_pubkey_b58, scope.task_id, scope.lease_id, scope.duplicate_risk, uses)
