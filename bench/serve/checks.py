"""One check of a capability, with few grants in the store and with very many, in one process and in turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from typing import Final

from bench.work import Figures
from covenant import AgentId, Limits
from covenant.exchange.realm import Realm
from covenant.model import event as e
from covenant.model.peer import Capability, Demand, Grant, Role, Scope, grant_key, peer_key
from covenant.rules.context import Context
from covenant.rules.grant import authorize
from covenant.store.clock import RandomIds
from covenant.store.state import State

_SUBJECTS: Final = 10
_SLICES: Final = 200
_CHECKS_AT_ONCE: Final = 500
_NOW_MS: Final = 1_800_000_000_000


def checks(folder: Path, few: int, many: int) -> Figures:
    """Nanoseconds of one check that succeeds. The grants belong to ten peers that take turns; all but one grant of each
    peer are for the same action and other tasks, or for other peers."""
    realm = Realm.throwaway()
    sides = {"few": _Side(realm, few), "many": _Side(realm, many)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(_SLICES):
        for name, side in sides.items():
            times[name].append(side.slice_ns())
    return {f"{name}_ns": min(found) for name, found in times.items()}  # of so short a thing, the rest is the machine


class _Side:
    def __init__(self, realm: Realm, grants: int) -> None:
        self._state = State()
        self._ctx = Context(_NOW_MS, RandomIds(), Limits())
        self._ctx.is_genuine = realm.is_genuine
        agents = [AgentId.named(f"p{number}@bench") for number in range(_SUBJECTS)]
        for agent in agents:
            self._state.apply((e.Enrolled(peer_key(agent.pubkey), agent, Role.PEER, agent.pubkey),), _NOW_MS)
        for grant in _grants(realm, agents, grants // _SUBJECTS):
            self._state.apply((e.Granted(grant_key(grant.capability.id), grant),), _NOW_MS)
        self._demands = [(agent.pubkey, _demand(other)) for agent, other in zip(agents, reversed(agents), strict=True)]

    def slice_ns(self) -> float:
        state, ctx, demands = self._state, self._ctx, self._demands
        start = perf_counter_ns()
        for _ in range(_CHECKS_AT_ONCE // _SUBJECTS):
            for subject, demand in demands:
                authorize(subject, demand, state, ctx)
        spent = perf_counter_ns() - start
        if any(authorize(subject, demand, state, ctx)[0] is None for subject, demand in demands):
            raise RuntimeError("a check found no grant")
        return spent / _CHECKS_AT_ONCE


def _demand(other: AgentId) -> Demand:
    ids = RandomIds()
    return Demand(f"a2a.respond.{other.display}", "check", other, ids.task(), ids.lease())


def _grants(realm: Realm, agents: list[AgentId], of_each: int) -> Iterator[Grant]:
    """Only what a check comes to look at needs the realm's signature."""
    ids, others = RandomIds(), count()
    for agent in agents:
        yield realm.sign_grant(_capability(ids.lease(), agent, "a2a.respond.*"))
        for number in range(of_each - 1):
            if number % 2:
                scope = Scope(task_id=ids.task())
                yield Grant(_capability(ids.lease(), agent, "a2a.respond.*", scope), "unsigned")
            else:
                yield Grant(_capability(ids.lease(), agent, f"a2a.respond.other{next(others)}@bench"), "unsigned")


def _capability(grant_id: str, subject: AgentId, action: str, scope: Scope | None = None) -> Capability:
    return Capability(grant_id, subject, action, subject, _NOW_MS, scope or Scope())
