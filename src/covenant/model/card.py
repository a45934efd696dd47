"""What an agent says of itself: its A2A card, as it was published."""

from __future__ import annotations

import builtins
from typing import Any, Final

from msgspec import Struct

from covenant.model.agent import AgentId

CARD_PREFIX = "card:"
BINDINGS: Final = ("JSONRPC", "HTTP+JSON", "GRPC")  # of the protocol, the preferred first
REQUIRED: Final = ("name", "description", "version", "defaultInputModes", "defaultOutputModes", "skills")  # by clients
CARD_VERSION: Final = "1.0"  # of the protocol, which a card names for each of its interfaces


class _Said(Struct, frozen=True, rename="camel", kw_only=True, gc=False):
    """What clients read in a card, where it is there; other members are its owner's own."""


class _Names(_Said, frozen=True):
    list: builtins.list[str] | None = None


class _Requirement(_Said, frozen=True):
    schemes: dict[str, _Names] | None = None


class _Provider(_Said, frozen=True):
    url: str | None = None
    organization: str | None = None


class _Extension(_Said, frozen=True):
    uri: str | None = None
    description: str | None = None
    required: bool | None = None
    params: dict[str, Any] | None = None


class Capabilities(_Said, frozen=True):
    streaming: bool | None = None
    push_notifications: bool | None = None
    extended_agent_card: bool | None = None
    extensions: list[_Extension] | None = None


class Skill(_Said, frozen=True):
    id: str | None = None
    name: str | None = None
    description: str | None = None
    tags: list[str] | None = None
    examples: list[str] | None = None
    input_modes: list[str] | None = None
    output_modes: list[str] | None = None
    security_requirements: list[_Requirement] | None = None


class Description(_Said, frozen=True):
    """The shape of a card. What the daemon puts in itself may look as it likes."""

    name: str | None = None
    description: str | None = None
    version: str | None = None
    provider: _Provider | None = None
    documentation_url: str | None = None
    icon_url: str | None = None
    capabilities: Capabilities | None = None
    default_input_modes: list[str] | None = None
    default_output_modes: list[str] | None = None
    skills: list[Skill] | None = None
    supported_interfaces: Any = None
    security_schemes: Any = None
    security_requirements: Any = None
    extended: Description | None = None


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
