"""Peers and grants: who is let in, and to do what."""

from __future__ import annotations

from typing import Final

from covenant.exchange.exchange import Exchange
from covenant.model import command as c
from covenant.model import query as q
from covenant.model.peer import Caller
from covenant.rules.envelope import check_count
from covenant.rules.grant import Question, check_action, demand_for, question
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
    asked = question(r.action, r.counterparty, r.task_id, r.lease_id, r.duplicate_risk)
    if r.subject is not None and x.key_of(r.subject) != caller.agent.pubkey:
        return await x.under(caller, "capabilities.list", lambda: _checked(x, caller, r.subject, asked))
    return await _checked(x, caller, r.subject, asked)


async def _checked(x: Exchange, caller: Caller, name: str | None, asked: Question) -> w.Checked:
    subject = caller.agent if name is None else x.agent(name)
    other = None if asked.counterparty is None else x.named(asked.counterparty)
    demand = demand_for(asked.stem, "check", other, asked.task_id, asked.lease_id, asked.duplicate_risk)
    grant, reason = await x.check(caller, subject, demand)
    if reason is None and asked.counterparty is not None:
        x.agent(asked.counterparty)  # raises if nobody has that name: a caller whose grant reaches it may know
    return w.Checked(action=asked.action, subject=subject.display, passed=reason is None, grant=grant, reason=reason)
