"""Capabilities: who holds which action, how far it reaches, and who may pass it on. (Contract 26.)

The actions are a closed list. A grant names one of them exactly, or a family of them with a trailing `.*`; a check
tries the few spellings that can cover a demand, so that its cost does not depend on how many grants there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, TypeVar

from msgspec import Struct, structs

from covenant.model import event as e
from covenant.model.agent import AgentId, check_agent, full_label, is_key
from covenant.model.audit import AuditRow
from covenant.model.command import EndGrants, GrantCapability, RevokeCapability
from covenant.model.error import (
    BadAction,
    BadAgent,
    CovenantError,
    Malformed,
    MissingCapability,
    NotPermitted,
    ScopeMismatch,
    TooLarge,
    UnknownGrant,
    UnknownPeer,
)
from covenant.model.peer import OPERATOR, Capability, Demand, Grant, GrantedView, Peer, Scope, grant_key, peer_key
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_id, check_risk, check_text, check_time

K = TypeVar("K")
V = TypeVar("V")

SCOPED: Final[dict[str, tuple[str, ...]]] = {
    # Every action, with the members of a scope that can be compared with its calls. An action that ends with a dot is
    # followed by the label or the key of the counterparty.
    "a2a.send.": ("peer_pubkey_b58", "task_id"),
    "a2a.respond.": ("peer_pubkey_b58", "task_id", "lease_id"),
    "a2a.recv.": ("peer_pubkey_b58",),
    "a2a.cancel.": ("peer_pubkey_b58", "task_id"),
    "a2a.repair.requeue": ("peer_pubkey_b58", "task_id", "lease_id", "duplicate_risk"),
    "a2a.repair.force_error": ("peer_pubkey_b58", "task_id", "lease_id"),
    "a2a.cache.forget": (),
    "store.compact": (),
    "peers.enroll": (),
    "peers.list": (),
    "peers.revoke": (),
    "capabilities.list": (),
    "agents.publish": (),
    "audit.read": (),
}
ACTIONS: Final = tuple(action for action in SCOPED if not action.endswith("."))
PEER_ACTIONS: Final = tuple(action for action in SCOPED if action.endswith("."))
OPERATOR_ACTIONS: Final = (  # the first start grants them to the operator, who can revoke them
    "a2a.send.*",
    "a2a.respond.*",
    "a2a.cancel.*",
    "a2a.repair.requeue",
    "a2a.repair.force_error",
    "a2a.cache.forget",
    "store.compact",
)
BY_RIGHT: Final = frozenset(ACTIONS) - frozenset(OPERATOR_ACTIONS)
"""The operator needs no grant for these: it cannot lose the means to give rights back."""
_FAMILIES: Final = frozenset(
    f"{prefix}.*"
    for action in (*ACTIONS, *(f"{start}x" for start in PEER_ACTIONS))
    for prefix in (action.split(".")[0], action.rpartition(".")[0])
)
_THERE_ARE: Final = ", ".join((*(f"{start}NAME" for start in PEER_ACTIONS), *ACTIONS))
_PINS: Final = ("peer_pubkey_b58", "task_id", "lease_id", "duplicate_risk")
_CHAIN_MAX: Final = 8
_ALIKE_MAX: Final = 100  # passed on to one peer for one thing: a check may have to look at each, also if all are over
_RECALLED_MAX: Final = 100_000
_UNPINNED: Final = ""
_LASTING, _PASSING, _COUNTED = _SORTS = ("", "passing:", "counted:")  # of grants, in the order in which calls take them
_USES_MAX: Final = 2**31


# --- what covers what --------------------------------------------------------------------------------------


def spellings(demand: Demand) -> tuple[str, ...]:
    """The actions of a grant that would cover this demand, the narrowest first."""
    action, other = demand.action, demand.counterparty
    whole = f"{action[: action.index('.')]}.*"
    if other is not None and action.startswith(PEER_ACTIONS):
        family = action[: -len(other.display)]
        return action, family + other.pubkey, f"{family}*", whole
    return action, f"{action[: action.rindex('.')]}.*", whole


def demand_for(
    action: str,
    label: str,
    counterparty: AgentId | None = None,
    task_id: str | None = None,
    lease_id: str | None = None,
    duplicate_risk: str | None = None,
) -> Demand:
    """Return what a grant must cover to let in a call of this action, a key of `SCOPED`."""
    scoped = SCOPED[action]
    assert task_id is None or "task_id" in scoped
    assert lease_id is None or "lease_id" in scoped
    assert duplicate_risk is None or "duplicate_risk" in scoped
    if action in PEER_ACTIONS:
        assert counterparty is not None
        action += counterparty.display
    return Demand(action, label, counterparty, task_id, lease_id, duplicate_risk)


def _stem(action: str) -> str:
    """Return the key of `SCOPED` for an action without a wildcard: `a2a.send.` for `a2a.send.bob@local`."""
    return next((start for start in PEER_ACTIONS if action.startswith(start)), action)


def pin_of(capability: Capability) -> str:
    """Return the place of a grant in the index: what a call under it costs, then the narrowest thing it is pinned to.

    So a check finds the grant that it prefers first, however many others there are.
    """
    scope = capability.scope
    return _sort_of(capability) + (scope.task_id or scope.lease_id or scope.peer_pubkey_b58 or _UNPINNED)


def _sort_of(capability: Capability) -> str:
    if is_lasting(capability):
        return _LASTING
    may_be_counted = capability.scope.max_uses is not None or capability.parent is not None
    return _COUNTED if may_be_counted else _PASSING


def fits(scope: Scope, demand: Demand) -> bool:
    """A scope that names something which the call does not have covers nothing."""
    peer = None if demand.counterparty is None else demand.counterparty.pubkey
    return (
        (scope.peer_pubkey_b58 is None or scope.peer_pubkey_b58 == peer)
        and (scope.task_id is None or scope.task_id == demand.task_id)
        and (scope.lease_id is None or scope.lease_id == demand.lease_id)
        and (scope.duplicate_risk is None or scope.duplicate_risk == demand.duplicate_risk)
    )


def chain_of(grant: Grant, view: View) -> list[Grant] | None:
    """The grant and those that it was delegated from; None when one of them is missing."""
    chain = [grant]
    while (parent := chain[-1].capability.parent) is not None:
        above = view.get(grant_key(parent))
        if not isinstance(above, Grant) or len(chain) >= _CHAIN_MAX:
            return None
        chain.append(above)
    return chain


def is_live(grant: Grant, view: View, ctx: Context) -> bool:
    """Neither revoked, expired nor used up, nor is anything that it was delegated from."""
    if grant.capability.parent is None:
        return _is_live_alone(grant, view, ctx)
    chain = chain_of(grant, view)
    return chain is not None and all(_is_live_alone(link, view, ctx) for link in chain)


def _is_live_alone(grant: Grant, view: View, ctx: Context) -> bool:
    capability = grant.capability
    limit = capability.scope.max_uses
    if (
        grant.revoked_ms is not None
        or (capability.expires_ms is not None and capability.expires_ms <= ctx.now)
        or (limit is not None and grant.uses >= limit)
    ):
        return False
    holder = view.get(peer_key(capability.subject.pubkey))
    return isinstance(holder, Peer) and holder.revoked_ms is None and ctx.is_genuine(grant)


def authorize(subject: str, demand: Demand, view: View, ctx: Context) -> tuple[Grant | None, str | None]:
    """Decide whether the subject may do what is demanded.

    Returns the grant that covers the demand and None, or None and the code of the refusal; both are None if the
    operator needs no grant. Every call is decided by this function, and so is the answer of `capabilities check`. A
    grant that lasts goes before one that ends or is pinned, and that before one that the call may use up.
    """
    if demand.action in BY_RIGHT and _is_operator(subject, view):
        return None, None
    for grant in _candidates(subject, demand, view):
        if fits(grant.capability.scope, demand) and is_live(grant, view, ctx):
            return grant, None
    return None, ScopeMismatch.code if holds(subject, demand, view) else MissingCapability.code


def _is_operator(subject: str, view: View) -> bool:
    peer = view.get(peer_key(subject))
    return isinstance(peer, Peer) and peer.role is OPERATOR and peer.revoked_ms is None


def _candidates(subject: str, demand: Demand, view: View) -> Iterator[Grant]:
    """Yield the subject's grants of the demanded action that are pinned to nothing, or to something in the demand."""
    other = demand.counterparty
    pins = (demand.task_id, demand.lease_id, None if other is None else other.pubkey, _UNPINNED)
    held = [by_pin for action in spellings(demand) if (by_pin := view.grants(subject, action))]
    for sort in _SORTS:
        for by_pin in held:
            for pin in pins:
                if pin is not None and (found := by_pin.get(sort + pin)):
                    yield from found.values()


def holds(subject: str, demand: Demand, view: View) -> bool:
    """Return whether the subject was ever granted the demanded action, for this call or for others.

    A grant that is used up or expired counts, one that was revoked does not.
    """
    peer = view.get(peer_key(subject))
    held = peer.held if isinstance(peer, Peer) else ()
    return any(action in held or view.grants(subject, action) for action in spellings(demand))


def refusal_for(subject: AgentId, demand: Demand, reason: str) -> CovenantError:
    """Return the error for a code from `authorize`."""
    kind = ScopeMismatch if reason == ScopeMismatch.code else MissingCapability
    return kind(f"{subject} has no grant of {demand.action} for this", action=demand.action)


def recall(subject: str, demand: Demand, view: View, ctx: Context) -> tuple[Grant | None, str | None]:
    """Decide as `authorize` does, from memory where the answer cannot have changed.

    A grant that covers every call of this action with this counterparty covers the next one too, until a peer or a
    grant changes.
    """
    other = demand.counterparty
    key = (subject, demand.action, None if other is None else other.pubkey)
    known = ctx.recalled.get(key)
    if known is not None and known[0] == view.trust_order:
        return known[1], None
    grant, reason = authorize(subject, demand, view, ctx)
    if grant is not None and is_lasting(grant.capability):
        remember(ctx.recalled, key, (view.trust_order, grant))
    return grant, reason


def remember(memory: dict[K, V], key: K, value: V) -> None:
    if len(memory) >= _RECALLED_MAX:
        memory.clear()
    memory[key] = value


def is_lasting(capability: Capability) -> bool:
    """Nothing but a revocation ends it, and it asks for nothing that differs from call to call."""
    scope = capability.scope
    pinned = scope.task_id or scope.lease_id or scope.duplicate_risk or scope.max_uses
    return not pinned and capability.expires_ms is None and capability.parent is None


def uses_of(grant: Grant, view: View) -> tuple[e.Event, ...]:
    """A use is written down where it is counted: on every link that has a bound."""
    chain = [grant] if grant.capability.parent is None else chain_of(grant, view) or []
    return tuple(
        e.GrantUsed(grant_key(link.capability.id)) for link in chain if link.capability.scope.max_uses is not None
    )


# --- asking whether a call would be let in ------------------------------------------------------------------


class Question(Struct, frozen=True):
    """The call that `capabilities check` is about. `counterparty` is a label or a key."""

    action: str  # in full
    stem: str  # the key of `SCOPED`
    counterparty: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None


def question(
    action: str, counterparty: str | None, task_id: str | None, lease_id: str | None, duplicate_risk: str | None
) -> Question:
    """Return the call that is asked about. Raises BadAction for a family of actions, and Malformed for a member that
    calls of the action do not have, or for another counterparty than the action names."""
    action = check_action(action)
    if action.endswith(".*"):
        raise BadAction(f"a check is of one action, and {action} is a family", action=action)
    stem = _stem(action)
    if stem != action:
        named = action[len(stem) :]
        if counterparty is not None and check_action(stem + counterparty) != action:
            raise Malformed(f"{action} is about {named}, and not about the counterparty", field="counterparty")
        counterparty = named
    given = zip(_PINS, (counterparty, task_id, lease_id, duplicate_risk), strict=True)
    _check_scoped(action, [name for name, value in given if value is not None])
    task_id = None if task_id is None else check_id(task_id, "task_id")
    lease_id = None if lease_id is None else check_id(lease_id, "lease_id")
    if duplicate_risk is not None:
        check_risk(duplicate_risk)
    return Question(action, stem, counterparty, task_id, lease_id, duplicate_risk)


# --- granting and revoking ---------------------------------------------------------------------------------


def grant(command: GrantCapability, view: View, ctx: Context) -> Commit:
    """The operator grants anything, others what they hold as delegable, and never wider."""
    capability = command.grant.capability
    if command.by is not None and capability.parent is None:
        raise NotPermitted("only the operator grants what was not delegated", action=capability.action)
    if capability.parent is not None:
        _check_delegation(command, capability, view, ctx)
    granted = seal_grant(command.grant, view, ctx)  # last: it tells whether there is such a peer
    row = AuditRow(
        "capability_granted",
        capability.action,
        subject=capability.subject.display,
        grant=capability.id,
        scope_id=f"capability:{capability.id}",
    )
    peer = peer_key(capability.subject.pubkey)
    holder = view.get(peer)
    events: tuple[e.Event, ...] = (e.Granted(grant_key(capability.id), granted),)
    if isinstance(holder, Peer) and capability.action not in holder.held:
        events = (*events, e.ActionHeld(peer, capability.action))
    return Commit(events, shown(granted), (row,))


def seal_grant(wanted: Grant, view: View, ctx: Context, newcomer: Peer | None = None) -> Grant:
    """The grant, every part of it checked. Its subject is enrolled, or being enrolled in this commit."""
    capability = wanted.capability
    check_id(capability.id, "id")
    check_agent(capability.subject, "subject")
    if check_action(capability.action) != capability.action:
        raise BadAction(f"a signed grant names its action in full: {check_action(capability.action)}")
    _check_scope(capability.scope)
    _check_reach(capability, view)
    if capability.expires_ms is not None and check_time(capability.expires_ms, "expires_ms") <= ctx.now:
        raise Malformed("expires_ms is in the past", field="expires_ms")
    if view.get(grant_key(capability.id)) is not None:
        raise Malformed("this grant exists", field="id")
    subject = newcomer or view.get(peer_key(capability.subject.pubkey))
    if not isinstance(subject, Peer) or subject.revoked_ms is not None:
        raise UnknownPeer(f"no peer {capability.subject.display}", peer=capability.subject.display)
    return wanted


def check_action(action: str) -> str:
    """Return the action as grants name it: `a2a.send.bob` is `a2a.send.bob@local`.

    Raises BadAction unless it is on the closed list or a family of it, and names a peer where it has to.
    """
    check_text(action, "action", 300)
    if action in ACTIONS or action in _FAMILIES:
        return action
    start = next((start for start in PEER_ACTIONS if action.startswith(start)), None)
    if start is None:
        raise BadAction(f"no such action: {action}; there are {_THERE_ARE}", action=action)
    name = action[len(start) :]
    if is_key(name):
        return action
    try:
        return start + full_label(name)
    except BadAgent as wrong:
        raise BadAction(f"{start} is followed by a peer, by its label or its key: {wrong}", action=action) from None


def _check_scope(scope: Scope) -> None:
    if type(scope) is not Scope or scope.version != 1:
        raise Malformed("a scope has version 1", field="scope")
    if scope.max_uses is not None and (type(scope.max_uses) is not int or not 0 < scope.max_uses <= _USES_MAX):
        raise Malformed("max_uses is a number from 1", field="max_uses")
    for name in ("task_id", "lease_id"):
        value = getattr(scope, name)
        if value is not None and check_id(value, name) != value:
            raise Malformed(f"{name} is a UUID in small letters", field=name)
    key = scope.peer_pubkey_b58
    if key is not None and not (type(key) is str and is_key(key)):
        raise Malformed("peer_pubkey_b58 is the base58 of a key of 32 bytes", field="peer_pubkey_b58")
    if scope.duplicate_risk is not None:
        check_risk(scope.duplicate_risk)


def _check_reach(capability: Capability, view: View) -> None:
    """Raise Malformed if the grant could never cover a call: its scope names a member that no call of the action has,
    or another counterparty than the action does."""
    action, scope = capability.action, capability.scope
    _check_scoped(action, [name for name in _PINS if getattr(scope, name) is not None])
    start = _stem(action)
    key = scope.peer_pubkey_b58
    if key is None or start == action or action.endswith(".*"):
        return
    name = action[len(start) :]
    known, peer = view.peer_named(name), view.get(peer_key(key))
    is_another = is_key(name) and name != key
    is_other_key = known is not None and known != key and capability.parent is None  # others may not learn who has it
    is_other_label = not is_key(name) and isinstance(peer, Peer) and peer.agent.display != name
    if is_another or is_other_key or is_other_label:
        raise Malformed(f"peer_pubkey_b58 is not the key of {name}", field="peer_pubkey_b58")


def _check_scoped(action: str, names: Collection[str]) -> None:
    """Raise Malformed unless calls of this action, or of one action of this family, have all these members."""
    stems = [_stem(action)]
    if action.endswith(".*"):
        stems = [stem for stem in SCOPED if stem.startswith(action[:-1])]
    if not any(all(name in SCOPED[stem] for name in names) for stem in stems):
        raise Malformed(f"no call of {action} has {' and '.join(names)}", field="scope")


def _check_delegation(command: GrantCapability, wanted: Capability, view: View, ctx: Context) -> None:
    """Never wider than the grant that it comes from."""
    assert wanted.parent is not None
    above = view.get(grant_key(wanted.parent))
    by = None if command.by is None else command.by.pubkey
    if not isinstance(above, Grant) or by not in (None, above.capability.subject.pubkey):
        raise UnknownGrant(f"no grant {wanted.parent}", grant=wanted.parent)
    source = above.capability
    if not source.delegable or not is_live(above, view, ctx):
        raise NotPermitted("this grant cannot be passed on", grant=source.id)
    if not covers(source, wanted):
        raise NotPermitted("a grant is never passed on wider than it is", grant=source.id)
    chain = chain_of(above, view)
    if chain is None or len(chain) >= _CHAIN_MAX:
        raise NotPermitted("it was passed on too often", grant=source.id)
    alike = view.grants(wanted.subject.pubkey, wanted.action).get(pin_of(wanted), ())
    if len(alike) >= _ALIKE_MAX:
        why = f"{wanted.subject.display} holds {len(alike)} open grants like this one: revoke those that are not needed"
        raise TooLarge(why, field="parent", limit=_ALIKE_MAX)


def covers(source: Capability, wanted: Capability) -> bool:
    """Whether everything that `wanted` allows is allowed by `source`."""
    same = source.action == wanted.action
    family = source.action.endswith(".*") and wanted.action.startswith(source.action[:-1])
    if not same and not family:
        return False
    if source.expires_ms is not None and (wanted.expires_ms is None or wanted.expires_ms > source.expires_ms):
        return False
    for name in ("peer_pubkey_b58", "task_id", "lease_id", "duplicate_risk"):
        bound = getattr(source.scope, name)
        if bound is not None and getattr(wanted.scope, name) != bound:
            return False
    limit = source.scope.max_uses
    return limit is None or (wanted.scope.max_uses is not None and wanted.scope.max_uses <= limit)


def revoke(command: RevokeCapability, view: View, ctx: Context) -> Commit:
    """By whoever granted it, or the operator. Again changes nothing."""
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    found = view.get(grant_key(check_id(command.grant_id, "id")))
    by = None if command.by is None else command.by.pubkey
    if not isinstance(found, Grant) or by not in (
        None,
        found.capability.subject.pubkey,
        found.capability.granted_by.pubkey,
    ):
        raise UnknownGrant(f"no grant {command.grant_id}", grant=command.grant_id)
    capability = found.capability
    if command.by is not None and capability.granted_by != command.by:
        raise NotPermitted("the granter and the operator revoke", grant=capability.id)
    if found.revoked_ms is not None:
        return Commit((), shown(found))
    row = AuditRow(
        "capability_revoked",
        capability.action,
        subject=capability.subject.display,
        grant=capability.id,
        reason=command.reason,
    )
    events: tuple[e.Event, ...] = (e.GrantRevoked(grant_key(capability.id)),)
    if _is_last(found, view):
        events = (*events, e.ActionHeld(peer_key(capability.subject.pubkey), capability.action, is_held=False))
    return Commit(events, shown(structs.replace(found, revoked_ms=ctx.now)), (row,))


def _is_last(grant: Grant, view: View) -> bool:
    """Return whether the subject of this grant has no other open grant of exactly this action."""
    by_pin = view.grants(grant.capability.subject.pubkey, grant.capability.action)
    return sum(len(grants) for grants in by_pin.values()) <= 1


def end_grants(command: EndGrants, view: View, ctx: Context) -> Commit:
    """One step of what a revoked peer leaves behind: should it be enrolled again, it begins with nothing."""
    ended = view.all_grants(command.pubkey, 0, ctx.limits.step_records_max)
    rows = tuple(
        AuditRow(
            "capability_revoked",
            grant.capability.action,
            subject=grant.capability.subject.display,
            grant=grant.capability.id,
            reason="peer_revoked",
        )
        for grant in ended
    )
    events = tuple(e.GrantRevoked(grant_key(grant.capability.id)) for grant in ended)
    return Commit(events, None, rows, (EndGrants(None, command.pubkey),) if ended else ())


def shown(grant: Grant) -> GrantedView:
    c = grant.capability
    return GrantedView(
        id=c.id,
        subject=c.subject,
        action=c.action,
        scope=c.scope,
        granted_by=c.granted_by,
        granted_ms=c.granted_ms,
        signature=grant.signature,
        expires_ms=c.expires_ms,
        delegable=c.delegable,
        parent=c.parent,
        uses=grant.uses,
        revoked_ms=grant.revoked_ms,
    )
