"""What an agent says of itself: its A2A card, as it was published."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from covenant.model.agent import AgentId

CARD_PREFIX = "card:"


class Card(Struct, gc=False, omit_defaults=True):
    """The agent, and the card as its owner wrote it. Where it is served, and its signature, are added when it is."""

    agent: AgentId
    card: dict[str, Any]
    published_ms: int
    order: int = 0


class CardPage(Struct, frozen=True, gc=False):
    cards: list[Card]
    cursor: str | None = None


def card_key(pubkey: str) -> str:
    return f"{CARD_PREFIX}{pubkey}"
