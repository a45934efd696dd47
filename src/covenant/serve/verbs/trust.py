"""Peers and grants: who is let in, and to do what."""

from __future__ import annotations

from typing import Final

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.error import BadAction, Malformed
from covenant.model.peer import Caller
from covenant.rules.envelope import check_count, check_id
from covenant.rules.grant import check_action, check_scoped, demand_for, kind_of
from covenant.serve import wire as w

_SIGNED_MAX: Final = 2**53 - 1  # a grant is signed as canonical JSON, which has no larger number


async def enroll_peer(x: Exchange, caller: Caller, r: w.EnrollPeer) -> w.PeerEnrolled:
    peer, token = await x.enroll(caller, r.display, r.pubkey, r.grants)
    return w.PeerEnrolled(
        display=peer.display, pubkey=peer.pubkey, token=token, granted=[check_action(action) for action in r.grants]
    )


async def list_peers(x: Exchange, caller: Caller, r: w.ListPeers) -> w.Peers:
    query = q.ListPeers(x.by(caller), r.limit, r.cursor)
    page = await x.under(caller, "peers.list", lambda: x.ask(caller, query))
    return w.Peers(peers=page.peers, cursor=page.cursor)


async def revoke_peer(x: Exchange, caller: Caller, r: w.RevokePeer) -> w.PeerRevoked:
    peer = await x.trust.revoke_peer(caller, r.peer, r.reason)
    return w.PeerRevoked(display=peer.display, pubkey=peer.pubkey)


async def rotate_token(x: Exchange, caller: Caller, r: w.RotateToken) -> w.TokenRotated:
    peer, token = await x.trust.rotate(caller, r.peer)
    return w.TokenRotated(display=peer.display, pubkey=peer.pubkey, token=token)


async def grant(x: Exchange, caller: Caller, r: w.Grant) -> w.Granted:
    numbers = {"expires_ms": r.expires_ms, "max_uses": r.scope.max_uses, "version": r.scope.version}
    for name, number in numbers.items():
        check_count(number or 0, name, _SIGNED_MAX)
    granted = await x.trust.grant(caller, r.subject, r.action, r.scope, r.expires_ms, r.delegable, r.parent)
    return w.Granted(capability=granted)


async def revoke(x: Exchange, caller: Caller, r: w.Revoke) -> w.Revoked:
    return w.Revoked(capability=await x.run(caller, c.RevokeCapability(x.by(caller), r.grant_id, r.reason)))


async def list_grants(x: Exchange, caller: Caller, r: w.ListGrants) -> w.Grants:
    subject = None if r.subject is None else x.key_of(r.subject)
    query = q.ListGrants(x.by(caller), r.limit, subject, r.cursor)
    if subject != caller.agent.pubkey and (subject is not None or await x.may(caller, "capabilities.list")):
        page = await x.under(caller, "capabilities.list", lambda: x.ask(caller, query))
    else:
        page = await x.ask(caller, query)
    return w.Grants(capabilities=page.capabilities, cursor=page.cursor)


async def check(x: Exchange, caller: Caller, r: w.Check) -> w.Checked:
    action, other, facts = _asked(r)
    if r.subject is not None and x.key_of(r.subject) != caller.agent.pubkey:
        return await x.under(caller, "capabilities.list", lambda: _checked(x, caller, r, action, other, facts))
    return await _checked(x, caller, r, action, other, facts)


def _asked(r: w.Check) -> tuple[str, str | None, dict[str, str]]:
    """The action, its counterparty, and what the call would say. What no call of the action says is refused."""
    action = check_action(r.action)
    if action.endswith(".*"):
        raise BadAction(f"a check is of one action, and {action} is a family", action=action)
    kind, other = kind_of(action), r.counterparty
    if kind != action:
        other = action[len(kind) :]
        if r.counterparty is not None and check_action(kind + r.counterparty) != action:
            raise Malformed(f"{action} is about {other}, and not about the counterparty", field="counterparty")
    said = {"task_id": r.task_id, "lease_id": r.lease_id, "duplicate_risk": r.duplicate_risk}
    facts = {name: value for name, value in said.items() if value is not None}
    check_scoped(action, [*facts, *(["peer_pubkey_b58"] if other is not None else [])])
    for name in ("task_id", "lease_id"):
        if name in facts:
            facts[name] = check_id(facts[name], name)
    if facts.get("duplicate_risk", "idempotent") not in ("idempotent", "operator_accepted"):
        raise Malformed("duplicate_risk is `idempotent` or `operator_accepted`", field="duplicate_risk")
    return action, other, facts


async def _checked(
    x: Exchange, caller: Caller, r: w.Check, action: str, other: str | None, facts: dict[str, str]
) -> w.Checked:
    subject = caller.agent if r.subject is None else x.agent(r.subject)
    counterparty = None if other is None else x.named(other)
    grant, reason = await x.check(caller, subject, demand_for(kind_of(action), "check", counterparty, **facts))
    if reason is None and other is not None:
        x.agent(other)  # the subject's right reaches that name, and its holder may know whether anybody has it
    return w.Checked(action=action, subject=subject.display, passed=reason is None, grant=grant, reason=reason)
