"""Peers: who is enrolled, under which label, with which token. (Contract 25.)"""

from __future__ import annotations

from covenant.model import event as e
from covenant.model.agent import check_agent
from covenant.model.audit import AuditRow
from covenant.model.command import EndGrants, EnrollPeer, RevokePeer, RotateToken
from covenant.model.error import NotPermitted, PeerConflict, Unauthenticated, UnknownPeer
from covenant.model.peer import Caller, Peer, PeerView, Role, grant_key, peer_key
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_text
from covenant.rules.grant import seal_grant


def enroll(command: EnrollPeer, view: View, ctx: Context) -> Commit:
    """A label belongs to one key for good: actions name peers by their label."""
    agent = command.agent
    check_agent(agent)
    holder = view.peer_named(agent.display)
    if holder is not None and holder != agent.pubkey:
        raise _conflict(f"{agent.display} is enrolled already, under another key", holder, command, view)
    if command.by is not None and command.grants:
        raise NotPermitted("only the operator enrolls a peer with grants")
    known = view.get(peer_key(agent.pubkey))
    if isinstance(known, Peer) and (known.revoked_ms is None or known.agent.display != agent.display):
        raise _conflict(f"this key is enrolled as {known.agent.display}", agent.pubkey, command, view)
    if isinstance(known, Peer):
        _check_return(command, view)
    peer = Peer(agent, command.role, command.token, ctx.now)
    row = AuditRow("peer_enrolled", subject=agent.display, scope_id=f"peer:{agent.pubkey}")
    held = tuple(dict.fromkeys(wanted.capability.action for wanted in command.grants))
    events: list[e.Event] = [e.Enrolled(peer_key(agent.pubkey), agent, command.role, command.token, held)]
    rows = [row]
    for wanted in command.grants:
        grant = seal_grant(wanted, view, ctx, peer)
        events.append(e.Granted(grant_key(grant.capability.id), grant))
        rows.append(
            AuditRow("capability_granted", grant.capability.action, subject=agent.display, grant=grant.capability.id)
        )
    return Commit(tuple(events), shown(peer), tuple(rows))


def _conflict(why: str, pubkey: str, command: EnrollPeer, view: View) -> PeerConflict:
    """Return the error for a label or a key that is taken.

    Of a revoked peer it says so, and to the operator also the key under which it can be enrolled again.
    """
    peer = view.get(peer_key(pubkey))
    assert isinstance(peer, Peer)
    display = peer.agent.display
    if peer.revoked_ms is None:
        return PeerConflict(why, display=display)
    if command.by is not None:
        return PeerConflict(f"{display} was revoked, and only the operator lets it in again", is_revoked=True)
    why = f"{display} was revoked, and comes back under its own key"
    return PeerConflict(why, display=display, pubkey=pubkey, is_revoked=True)


def _check_return(command: EnrollPeer, view: View) -> None:
    """Who was revoked comes back by the operator's will only, and with none of the grants that it had."""
    display = command.agent.display
    if command.by is not None:
        raise NotPermitted("only the operator enrolls again who was revoked", display=display)
    if view.all_grants(command.agent.pubkey, 0, 1):
        raise PeerConflict(f"the grants that {display} had are still being ended; try again in a moment")


def rotate(command: RotateToken, view: View, ctx: Context) -> Commit:
    """Give a peer a new token; the old one is worth nothing from this commit on.

    Whoever has the token may do all that the peer may, so a peer can only change its own.
    """
    if command.by is not None and command.by.pubkey != command.pubkey:
        raise NotPermitted("a peer changes its own token; the operator that of others")
    peer = _living(command.pubkey, view, for_operator=command.by is None)
    row = AuditRow("token_rotated", subject=peer.agent.display, scope_id=f"peer:{command.pubkey}")
    return Commit((e.TokenRotated(peer_key(command.pubkey), command.token),), shown(peer), (row,))


def revoke(command: RevokePeer, view: View, ctx: Context) -> Commit:
    check_text(command.reason, "reason", ctx.limits.text_bytes_max)
    peer = _living(command.pubkey, view, for_operator=command.by is None)
    if peer.role is Role.OPERATOR:
        raise NotPermitted("the operator cannot be revoked; rotate its token instead", peer=peer.agent.display)
    row = AuditRow("peer_revoked", subject=peer.agent.display, scope_id=f"peer:{command.pubkey}", reason=command.reason)
    then = (EndGrants(None, command.pubkey),)
    return Commit((e.PeerRevoked(peer_key(command.pubkey)),), shown(peer, ctx.now), (row,), then)


def _living(pubkey: str, view: View, *, for_operator: bool) -> Peer:
    """Return an enrolled peer. Raises UnknownPeer, which says that the peer was revoked only if the operator asks."""
    peer = view.get(peer_key(pubkey))
    if isinstance(peer, Peer) and peer.revoked_ms is None:
        return peer
    if isinstance(peer, Peer) and for_operator:
        display = peer.agent.display
        raise UnknownPeer(f"{display} was revoked", peer=pubkey, display=display, pubkey=pubkey, is_revoked=True)
    raise UnknownPeer(f"no peer {pubkey}", peer=pubkey)


def check_caller(caller: Caller, view: View) -> None:
    """Raise unless the token by which the caller came in is still good."""
    known = view.caller_of(caller.token)
    if known is not caller and (known is None or known.agent != caller.agent):
        raise Unauthenticated("the token is not valid (any more)")


def shown(peer: Peer, revoked_ms: int | None = None) -> PeerView:
    return PeerView(peer.agent.display, peer.agent.pubkey, peer.role, peer.enrolled_ms, revoked_ms or peer.revoked_ms)
