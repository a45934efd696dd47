"""Who is enrolled, and who has published a card: what an engine tells of those whom it trusts, out of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from covenant.model.agent import AgentId
from covenant.model.card import Card, card_key
from covenant.model.peer import Caller, Peer, peer_key
from covenant.store.directory import Directory

CARDS_SHOWN: Final = 10


class Roll(ABC):
    """The base of every engine."""

    @property
    @abstractmethod
    def trust(self) -> Directory:
        """Where memory holds the peers, the grants and the cards."""

    def caller_of(self, token: str) -> Caller | None:
        """Whose token this is (its digest), as far as memory knows; the door looks again in each commit."""
        return self.trust.caller_of(token)

    def caller_at(self, pubkey: str) -> Caller | None:
        """The peer with this key, as it would come in now."""
        peer = self.trust.get(peer_key(pubkey))
        if not isinstance(peer, Peer) or peer.revoked_ms is not None:
            return None
        return Caller(peer.agent, peer.role, peer.token)

    def agent_of(self, name: str) -> AgentId | None:
        """The enrolled agent with this label or key."""
        trust = self.trust
        peer = trust.get(peer_key(trust.peer_named(name) or name))
        return peer.agent if isinstance(peer, Peer) else None

    def cards(self, pubkey: str | None = None) -> Sequence[Card]:
        """The card of this agent, or the first ones, as far as memory knows."""
        if pubkey is None:
            return self.trust.cards(0, CARDS_SHOWN)
        card = self.trust.get(card_key(pubkey))
        return (card,) if isinstance(card, Card) else ()

    def directory_mark(self) -> object:
        return self.trust.directory_mark
