"""Cards: which agents the A2A protocol reaches, and what they say of themselves."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import rfc8785
from msgspec import Struct

from covenant.model import event as e
from covenant.model.agent import AgentId
from covenant.model.audit import AuditRow
from covenant.model.card import (
    BINDINGS,
    CARD_VERSION,
    REQUIRED,
    Capabilities,
    Card,
    CardPage,
    Description,
    Skill,
    card_key,
)
from covenant.model.command import PublishCard, WithdrawCard
from covenant.model.error import Malformed, NotPermitted, TooLarge, UnknownPeer
from covenant.model.peer import Peer, peer_key
from covenant.model.query import GetCard, ListCards
from covenant.rules.context import Commit, Context, View
from covenant.rules.envelope import check_count, check_cursor, check_json, check_text
from covenant.rules.media import impossible_mode
from covenant.rules.portable import is_portable

CARD_BYTES_MAX: Final = 256 * 1024
_ADDED_BY_DAEMON: Final = ("signatures", "securitySchemes", "securityRequirements")
_OF_0_3: Final = (
    "url",
    "preferredTransport",
    "additionalInterfaces",
    "protocolVersion",
    "security",
    "supportsAuthenticatedExtendedCard",
)
_NOT_IN_EXTENDED: Final = ("capabilities", "supportedInterfaces", "extended")
_INTERFACE: Final = ("protocolBinding", "protocolVersion")
_shape: Final = msgspec.json.Decoder(Description)
_NAMEABLE: Final = re.compile(r"[!-+\--~]+")  # in a header that is a list: visible ASCII, but for the comma


def publish(command: PublishCard, view: View, ctx: Context) -> Commit:
    """An agent publishes its own card, the operator anybody's."""
    agent = _published(command.by, command.agent.pubkey, view).agent
    card = command.card
    if not isinstance(card, dict):
        raise Malformed("a card is a JSON object", field="card")
    check_text(card.get("name", ""), "name", ctx.limits.text_bytes_max)
    check_json(card, ctx.limits)
    _check_shape(card)
    _check_extensions(card)
    row = AuditRow("card_published", subject=agent.display)
    published = e.CardPublished(card_key(agent.pubkey), agent, card)
    return Commit((published,), Card(agent, card, ctx.now), (row,))


def _check_shape(card: dict[str, Any]) -> None:
    """That clients can read it, and the realm can sign it."""
    try:
        body = msgspec.json.encode(card)
        _shape.decode(body)
        plain = msgspec.json.decode(body)
        rfc8785.dumps(plain)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as wrong:
        raise Malformed(f"card: {wrong}", field="card") from None
    if len(body) > CARD_BYTES_MAX:
        raise TooLarge(f"the card has {len(body)} bytes", field="card", size=len(body), limit=CARD_BYTES_MAX)
    if not is_portable(plain):
        raise Malformed("card: something is nested too deep to go over gRPC", field="card")
    extended = plain.get("extended") or {}
    for said in (plain, extended):
        _check_names(Description, said)
        _check_names(Capabilities, said.get("capabilities") or {})
        for skill in said.get("skills") or ():
            _check_names(Skill, skill)
    _check_served_as_written(plain, extended)


def _check_served_as_written(card: dict[str, Any], extended: dict[str, Any]) -> None:
    """Raise Malformed for a member that the served card would leave out or change."""
    for said, path in ((card, ""), (extended, "extended.")):
        for name in _ADDED_BY_DAEMON:
            if said.get(name) is not None:
                raise _refusal(f"{path}{name} is the daemon's to say: leave it out")
        for name in _OF_0_3:
            if said.get(name) is not None:
                raise _refusal(
                    f"{path}{name} is of version 0.3 of the protocol, which is not spoken here: leave it out"
                )
        for name in REQUIRED:
            if said.get(name) in ("", []):
                raise _refusal(f"{path}{name} is empty, and clients require it: leave it out, or say something")
    for name in _NOT_IN_EXTENDED:
        if extended.get(name) is not None:
            raise _refusal(f"extended.{name} is that of the card itself: leave it out")
    if extended and (card.get("capabilities") or {}).get("extendedAgentCard") is False:
        raise _refusal("extended is shown to nobody where capabilities.extendedAgentCard is false")
    if (mode := impossible_mode(card)) is not None:
        raise _refusal(f"{mode!r} is no media type, so its agent would take nothing: text/plain, image/*, */*")
    if card.get("supportedInterfaces") is not None:
        _check_interfaces(card["supportedInterfaces"])


def _check_interfaces(listed: Any) -> None:
    """Raise Malformed unless the list says which bindings the card lists, in which order, and nothing else."""
    if not isinstance(listed, list) or not listed or not all(isinstance(entry, dict) for entry in listed):
        raise _refusal('supportedInterfaces is a list like [{"protocolBinding": "JSONRPC"}]')
    found: set[str] = set()
    for entry in listed:
        other = next((name for name in entry if name not in _INTERFACE), None)
        if other is not None:
            raise _refusal(f"supportedInterfaces: {other} is the daemon's to say: leave it out")
        binding = entry.get("protocolBinding")
        if binding not in BINDINGS:
            raise _refusal(f"supportedInterfaces: protocolBinding {binding!r} is none of {', '.join(BINDINGS)}")
        if binding in found:
            raise _refusal(f"supportedInterfaces: {binding} is there twice")
        if entry.get("protocolVersion") not in (None, CARD_VERSION):
            raise _refusal(f"supportedInterfaces: protocolVersion is {CARD_VERSION}")
        found.add(binding)


def _refusal(reason: str) -> Malformed:
    return Malformed(f"card: {reason}", field="card")


def bindings_of(card: dict[str, Any]) -> tuple[str, ...]:
    """Return the bindings that a published card lists, in its order; all of them if it names none."""
    listed = card.get("supportedInterfaces")
    if not isinstance(listed, list):
        return BINDINGS
    named = [entry.get("protocolBinding") for entry in listed if isinstance(entry, dict)]
    return tuple(name for name in named if name in BINDINGS) or BINDINGS


def _check_extensions(card: dict[str, Any]) -> None:
    """Raise Malformed if the card requires an extension that no client can name."""
    for extension in (card.get("capabilities") or {}).get("extensions") or ():
        uri = extension.get("uri")
        if extension.get("required") and _NAMEABLE.fullmatch(uri or "") is None:
            raise Malformed(f"card: no client can name the extension {uri!r}, which is required", field="card")


def _check_names(shape: type[Struct], said: dict[str, Any]) -> None:
    """The other spelling of ProtoJSON would stand beside what is added when the card is served, and what is read by it
    would not be signed."""
    for field in msgspec.structs.fields(shape):
        if field.name != field.encode_name and field.name in said:
            raise Malformed(f"card: {field.name} is written {field.encode_name}", field="card")


def withdraw(command: WithdrawCard, view: View, ctx: Context) -> Commit:
    agent = _published(command.by, command.agent.pubkey, view).agent
    key = card_key(agent.pubkey)
    if view.get(key) is None:
        return Commit(())
    return Commit((e.CardWithdrawn(key),), None, (AuditRow("card_withdrawn", subject=agent.display),))


def _published(by: object, pubkey: str, view: View) -> Peer:
    if by is not None and getattr(by, "pubkey", None) != pubkey:
        raise NotPermitted("an agent publishes its own card")
    peer = view.get(peer_key(pubkey))
    if not isinstance(peer, Peer) or peer.revoked_ms is not None:
        raise UnknownPeer("no such peer", peer=pubkey)
    return peer


def plain_card(agent: AgentId) -> dict[str, Any]:
    """What can be said of an agent that says nothing of itself."""
    return {"name": agent.display.partition("@")[0], "description": f"{agent.display}, an agent of this realm"}


def get_card(query: GetCard, view: View, ctx: Context) -> Card | None:
    """A card is public; the one of a revoked agent is gone."""
    card = view.get(card_key(query.pubkey))
    return card if isinstance(card, Card) and _is_in(card, view) else None


def list_cards(query: ListCards, view: View, ctx: Context) -> CardPage:
    limit = check_count(query.limit, "limit", ctx.limits.page_max)
    after = check_cursor(query.cursor, "agent")
    found: list[Card] = []
    while len(found) < limit and (cards := view.cards(after, limit)):
        after = cards[-1].order
        found += [card for card in cards if _is_in(card, view)]
    more = f"agent:{found[limit - 1].order}" if 0 < limit <= len(found) else None
    return CardPage(found[:limit], more)


def _is_in(card: Card, view: View) -> bool:
    peer = view.get(peer_key(card.agent.pubkey))
    return isinstance(peer, Peer) and peer.revoked_ms is None
