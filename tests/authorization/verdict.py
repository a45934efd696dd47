"""The contract of authorization, stated a second time, without the rules.

`verdict` returns the outcome of a call from its row in `verbs.py` and the facts of its cell, by points 25 to 27 of the
contract and `docs/trust.md`. A cell is a verb, a caller, the state of the thing that it names, and a grant; `cells`
yields every combination.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import combinations
from typing import Final

from msgspec import Struct

from tests.authorization.verbs import (
    ADDRESSED,
    GRANTER,
    HOLDER,
    ITSELF,
    OPERATOR,
    RECIPIENT,
    SENDER,
    VERBS,
    Party,
    Verb,
)
from tests.authorization.world import State, Thing

UNAUTHENTICATED: Final = "unauthenticated"
MISSING: Final = "missing_capability"
SCOPE: Final = "scope_mismatch"
NOT_PERMITTED: Final = "not_permitted"
SENDER_MISMATCH: Final = "sender_mismatch"
UNGRANTABLE: Final = "there is no such grant"  # what it is pinned to is in no call of this action

# --- who calls -----------------------------------------------------------------------------------------------


class Role(StrEnum):
    OPERATOR = "operator@local"
    SENDER = "alice@lab"
    RECIPIENT = "bob@lab"
    THIRD = "carol@lab"  # with no part in anything
    ABOVE = "dora@lab"  # the sender of the task that the thing hangs below
    REVOKED = "rex@lab"
    OLD_TOKEN = "old@lab"  # which was changed since
    NO_TOKEN = "none"


OUTSIDE: Final = (Role.REVOKED, Role.OLD_TOKEN, Role.NO_TOKEN)


def parties(role: Role, thing: Thing) -> frozenset[Party]:
    """Return what this caller is to the thing."""
    is_there = thing.state not in (State.NOTHING, State.UNKNOWN)
    found = {
        OPERATOR: role is Role.OPERATOR,
        SENDER: role == thing.sender and is_there,
        RECIPIENT: role == thing.recipient and is_there,
        ITSELF: role == thing.sender == thing.recipient,
        ADDRESSED: role == thing.recipient and thing.state is State.NOTHING,
        HOLDER: role == thing.holder,
        GRANTER: role == thing.granter,
    }
    return frozenset(party for party, is_so in found.items() if is_so)


# --- under which grant ---------------------------------------------------------------------------------------


class Width(StrEnum):
    """The action that the grant names. The comments are for a call that demands `a2a.send.bob@lab`."""

    EXACT = "exactly"  # a2a.send.bob@lab
    KEY = "by its key"  # a2a.send.<bob's key>
    FAMILY = "family"  # a2a.send.*
    WHOLE = "whole"  # a2a.*
    OTHER_PEER = "for another peer"  # a2a.send.zoe@lab
    OTHER_ACTION = "another action"


class Fate(StrEnum):
    ALIVE = "alive"
    BOUNDED = "one use left"
    USED_UP = "used up"
    EXPIRED = "expired"
    EXPIRED_NOW = "expired, and not yet swept"
    REVOKED = "revoked"
    PASSED_ON = "passed on"
    SOURCE_REVOKED = "passed on, its source revoked"
    SOURCE_EXPIRED = "passed on, its source expired"
    SOURCE_USED_UP = "passed on, its source used up"
    SOURCE_LOST = "passed on by a peer that was revoked just now"


DEAD: Final = (Fate.USED_UP, Fate.EXPIRED, Fate.EXPIRED_NOW)
CUT_OFF: Final = (Fate.SOURCE_REVOKED, Fate.SOURCE_EXPIRED, Fate.SOURCE_USED_UP, Fate.SOURCE_LOST)


class Held(Struct, frozen=True):
    """A grant in a cell. `pins` are members of its scope, each with whether the call has the same value."""

    width: Width
    pins: tuple[tuple[str, bool], ...] = ()
    fate: Fate = Fate.ALIVE
    by_another: bool = False  # another peer holds it

    def __str__(self) -> str:
        pinned = [f"{'the' if right else 'another'} {scope}" for scope, right in self.pins]
        words = [self.width.value, *(f"pinned to {' and '.join(pinned)}",) * bool(pinned)]
        words += [self.fate.value] * (self.fate is not Fate.ALIVE) + ["held by another"] * self.by_another
        return ", ".join(words)


SCOPES: Final = ("peer", "task", "lease", "risk")
_NARROWEST_FIRST: Final = ("task", "lease", "peer", "risk")
GRANTS: Final[tuple[Held | None, ...]] = (
    None,
    *(Held(width) for width in Width),
    Held(Width.EXACT, by_another=True),
    *(Held(Width.WHOLE, ((scope, right),)) for scope in SCOPES for right in (True, False)),
    *(Held(Width.EXACT, ((scope, True),)) for scope in SCOPES),
    *(Held(Width.WHOLE, ((one, True), (other, False))) for one, other in combinations(_NARROWEST_FIRST, 2)),
    *(Held(Width.WHOLE, ((one, True), (other, True))) for one, other in (("peer", "task"), ("lease", "risk"))),
    Held(Width.FAMILY, tuple((scope, True) for scope in SCOPES)),
    *(Held(Width.EXACT, fate=fate) for fate in Fate if fate is not Fate.ALIVE),
    *(Held(Width.FAMILY, fate=fate) for fate in (Fate.USED_UP, Fate.EXPIRED, Fate.SOURCE_REVOKED)),
    Held(Width.EXACT, (("peer", False),)),
    Held(Width.WHOLE, (("peer", True),), Fate.EXPIRED),
    Held(Width.WHOLE, (("peer", False),), Fate.BOUNDED),
)
FEW: Final[tuple[Held | None, ...]] = (None, Held(Width.WHOLE))  # where no grant matters


# --- the verdict ---------------------------------------------------------------------------------------------


class Cell(Struct, frozen=True):
    verb: Verb
    role: Role
    state: State
    held: Held | None

    def __str__(self) -> str:
        return f"{self.verb.name} · {self.role} · {self.state.value} · {self.held or 'no grant'}"


def verdict(cell: Cell, thing: Thing) -> str:
    verb, who = cell.verb, parties(cell.role, thing)
    if cell.held is not None and not is_grantable(verb, cell.held):
        return UNGRANTABLE
    if cell.role in OUTSIDE:
        return UNAUTHENTICATED
    if verb.names is not None and (cell.state is State.UNKNOWN or not who & verb.names.seen_by):
        return verb.names.unseen
    if verb.speaks_for_sender and cell.role is not Role.SENDER:
        return SENDER_MISMATCH
    if verb.action is not None and not who & verb.free:
        lacks = missing(cell)
        is_repeated = cell.state is verb.repeats_on and (verb.only is None or who & verb.only)
        if lacks is not None and not is_repeated:
            return verb.refusal or lacks
        if verb.from_run and cell.held is not None and cell.held.fate in (Fate.BOUNDED, Fate.PASSED_ON):
            return NOT_PERMITTED
    if verb.only is not None and not who & verb.only:
        return NOT_PERMITTED
    return verb.lets_in


def missing(cell: Cell) -> str | None:
    """Return the code for a grant that does not let this call in, or None if it does."""
    held = cell.held
    if held is None or held.by_another or held.width in (Width.OTHER_PEER, Width.OTHER_ACTION):
        return MISSING
    if held.fate is Fate.REVOKED:
        return MISSING  # as if it had never been given
    if held.fate in DEAD or held.fate in CUT_OFF:
        return SCOPE
    if cell.verb.each:
        return None
    return None if all(right and scope in cell.verb.carries for scope, right in held.pins) else SCOPE


def is_grantable(verb: Verb, held: Held) -> bool:
    """Return whether such a grant can be given: one with a scope that no call of its action has is refused."""
    action = verb.action or ""
    names_peer = held.width in (Width.EXACT, Width.KEY) and "<" in action and "<nobody>" not in action
    if names_peer and ("peer", False) in held.pins:
        return False  # the action names the one peer, and the scope another
    return all(scope in carried_by(action, held.width) for scope, _ in held.pins)


def carried_by(action: str, width: Width) -> frozenset[str]:
    """Return the members of a scope that calls of this action, or of its family, have among them."""
    stem = action.partition("<")[0]
    if width is Width.WHOLE:
        stem = action.partition(".")[0] + "."
    elif width is Width.FAMILY:
        stem = stem if stem.endswith(".") else stem.rpartition(".")[0] + "."
    found = [verb.carries for verb in VERBS if verb.action is not None and verb.action.startswith(stem)]
    return frozenset(scope for carries in found for scope in carries)


# --- every combination ---------------------------------------------------------------------------------------


def cells(verb: Verb) -> Iterator[Cell]:
    for state in verb.on:
        for role in Role:
            matters = verb.action is not None and role not in OUTSIDE
            for held in GRANTS if matters else FEW:
                if is_possible(verb, role, held):
                    yield Cell(verb, role, state, held)


def is_possible(verb: Verb, role: Role, held: Held | None) -> bool:
    """Return whether the cell exists: some grants are only possible if the action names a peer."""
    if held is None:
        return True
    if verb.action is None:
        return held == Held(Width.WHOLE)
    has_peer = "<" in verb.action
    return has_peer or (held.width not in (Width.KEY, Width.OTHER_PEER))


def all_cells() -> Iterator[Cell]:
    for verb in VERBS:
        yield from cells(verb)
