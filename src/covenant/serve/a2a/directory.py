"""The agents that the A2A protocol reaches here: found by name, and shown by their cards.

An agent is any recipient that published a card. What its owner wrote is completed with what only the daemon knows:
where it is served, how callers prove who they are, and the realm's signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

import rfc8785
from msgspec import Struct

from covenant.a2a.fault import TASK_NOT_FOUND, UNSUPPORTED, Fault
from covenant.a2a.interface import GENERATION
from covenant.a2a.signature import b64, payloads_of
from covenant.exchange.exchange import Exchange
from covenant.exchange.realm import Realm
from covenant.model import query as q
from covenant.model.card import BINDINGS, CARD_VERSION, REQUIRED, Card, CardPage
from covenant.rules.card import bindings_of
from covenant.rules.media import DEFAULT_MODES, input_modes
from covenant.rules.whereabouts import Listening, Reached, Whereabouts, where
from covenant.serve.a2a.operations import Agent

PREFIX: Final = "/agents/"
DIRECT_REPLY: Final = "urn:covenant:direct-reply"
_LEFT_OUT: Final = ("signatures", "extended")
_NOTHING: Final[tuple[Any, ...]] = ("", [], {})
_MODES: Final = list(DEFAULT_MODES)
_SHOWN_MAX: Final = 1000  # cards that are kept as they were last shown
_ANYHOW: Final = Reached()


class Shown(Struct, frozen=True):
    """A card as it is served."""

    card: dict[str, Any]
    etag: str
    modified_ms: int


class Directory:
    """`listening` says where the daemon is, once it listens; `default` names the agent at the root."""

    def __init__(self, exchange: Exchange, listening: Callable[[], Listening], default: str | None = None) -> None:
        self._exchange = exchange
        self._listening = listening
        self._default = default
        self._found: dict[str | None, Agent] = {}  # as long as the store has this mark
        self._mark: object = None
        self._shown: dict[tuple[str, bool, bool, Whereabouts], tuple[dict[str, Any], Shown]] = {}

    async def find(self, name: str | None) -> Agent:
        """By its label or key; without a name, the agent at the root."""
        return self.at_hand(name) or agent_of(await self._looked_up(name))

    def at_hand(self, name: str | None) -> Agent | None:
        """As far as memory knows. For whoever has something to ask of it: that becomes durable after the card, so there
        is nothing to wait for."""
        mark = self._exchange.store.directory_mark()
        if mark is not self._mark or len(self._found) >= _SHOWN_MAX:
            self._found.clear()
            self._mark = mark
        agent = self._found.get(name)
        if agent is None:
            card = self._card_at_hand(name or self._default)
            agent = None if card is None else agent_of(card)
            if agent is not None:
                self._found[name] = agent
        return agent

    def _card_at_hand(self, name: str | None) -> Card | None:
        store = self._exchange.store
        cards = store.cards(None if name is None else self._exchange.key_of(name))
        return next((card for card in cards if store.caller_at(card.agent.pubkey) is not None), None)

    async def _looked_up(self, name: str | None) -> Card:
        """As it is durable, for whoever is to see it."""
        card = await self._default_card() if not name else await self._card(name)
        if card is None:
            raise Fault(TASK_NOT_FOUND, f"no agent {name}" if name else "no agent is published here")
        return card

    async def _default_card(self) -> Card | None:
        """The one that was named, or else the first that was published."""
        if self._default is not None:
            return await self._card(self._default)
        page: CardPage = await self._exchange.store.ask(q.ListCards(None, 1))
        return page.cards[0] if page.cards else None

    async def _card(self, name: str) -> Card | None:
        found: Card | None = await self._exchange.store.ask(q.GetCard(None, self._exchange.key_of(name)))
        return found

    async def show(self, name: str | None, extended: bool = False, reached: Reached = _ANYHOW) -> Shown:
        """Completed and signed once for each place, each time that it is published: anybody may ask for it."""
        card = await self._looked_up(name)
        if extended and not _capabilities(card)["extendedAgentCard"]:
            raise Fault(UNSUPPORTED, f"{card.agent.display} has no extended card")
        here = where(self._listening(), reached)
        key = (card.agent.pubkey, not name, extended, here)
        known = self._shown.get(key)
        if known is not None and known[0] is card.card and known[1].modified_ms == card.published_ms:
            return known[1]
        shown = _complete(card, here, at_root=not name, extended=extended)
        if not shown["supportedInterfaces"]:
            bindings = ", ".join(bindings_of(card.card))
            raise Fault(TASK_NOT_FOUND, f"{card.agent.display} is reached by {bindings}, which is not served here")
        shown["signatures"] = sign_card(shown, self._exchange.realm)
        digest = hashlib.sha256(rfc8785.dumps(shown)).hexdigest()[:32]
        if len(self._shown) >= _SHOWN_MAX:
            self._shown.clear()
        made = Shown(shown, f'"{digest}"', card.published_ms)
        self._shown[key] = (card.card, made)
        return made


def _complete(card: Card, here: Whereabouts, at_root: bool, extended: bool) -> dict[str, Any]:
    label = card.agent.display
    shown = {
        "description": f"{label}, an agent of this realm",
        "version": "1.0.0",
        "defaultInputModes": _MODES,
        "defaultOutputModes": _MODES,
        "skills": [{"id": "work", "name": "work", "description": "does what it is asked to", "tags": ["task"]}],
        **_said(card.card),
    }
    if extended:
        shown |= _said(card.card.get("extended") or {})
    shown["capabilities"] = _capabilities(card)
    interfaces = _interfaces(here, "" if at_root else f"{PREFIX}{quote(label, safe='@')}", label)
    shown["supportedInterfaces"] = [interfaces[name] for name in bindings_of(card.card) if name in interfaces]
    shown["securitySchemes"] = {"bearer": {"httpAuthSecurityScheme": {"scheme": "Bearer"}}}
    shown["securityRequirements"] = [{"schemes": {"bearer": {"list": [f"a2a.send.{label}"]}}}]
    return shown


def _interfaces(here: Whereabouts, path: str, label: str) -> dict[str, dict[str, Any]]:
    """Return the interfaces of an agent that this daemon serves, by their bindings."""
    found: dict[str, dict[str, Any]] = {}
    for binding in BINDINGS:
        interface = {"protocolBinding": binding, "protocolVersion": CARD_VERSION}
        if binding == "GRPC" and here.grpc is not None:
            found[binding] = {"url": here.grpc, **interface, **({"tenant": label} if path else {})}
        elif binding != "GRPC" and here.url is not None:
            found[binding] = {"url": f"{here.url}{path}", **interface}
    return found


def _said(card: dict[str, Any]) -> dict[str, Any]:
    """Return the members that the owner wrote, but no null, and no empty member that clients require.

    Such a member is only in a card of an older store: it is refused today.
    """
    return {
        name: value
        for name, value in card.items()
        if name not in _LEFT_OUT and value is not None and not (name in REQUIRED and value in _NOTHING)
    }


def agent_of(card: Card) -> Agent:
    said = _capabilities(card)
    extensions = [e for e in said["extensions"] if isinstance(e, dict) and isinstance(e.get("uri"), str)]
    uris = tuple(e["uri"] for e in extensions)
    return Agent(
        card.agent,
        bool(said["streaming"]),
        bool(said["pushNotifications"]),
        DIRECT_REPLY in uris,
        uris,
        tuple(e["uri"] for e in extensions if e.get("required") is True),
        input_modes(card.card),
    )


def _capabilities(card: Card) -> dict[str, Any]:
    said = card.card.get("capabilities")
    given = {name: value for name, value in said.items() if value is not None} if isinstance(said, dict) else {}
    extensions = list(given.get("extensions", ()))
    if all(extension.get("uri") != GENERATION for extension in extensions):
        extensions.append({"uri": GENERATION, "description": "task generation, resumable streams, idempotency keys"})
    return {"streaming": True, "pushNotifications": True, "extendedAgentCard": True, **given, "extensions": extensions}


def sign_card(card: dict[str, Any], realm: Realm) -> list[dict[str, str]]:
    """Each a JWS with its payload left out (RFC 7515), by the realm's key: a verifier needs one that it finds good."""
    protected = b64(rfc8785.dumps({"alg": "EdDSA", "kid": realm.pubkey, "typ": "JOSE"}))
    signed = [realm.sign(f"{protected}.{b64(payload)}".encode()) for payload in payloads_of(card)]
    return [{"protected": protected, "signature": b64(signature)} for signature in signed]
