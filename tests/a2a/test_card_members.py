"""A card is served as it was published, or refused with the reason: member by member, and which bindings it lists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from a2a.client.card_resolver import parse_agent_card
from msgspec import structs

from covenant.model import command as c
from covenant.model.card import Capabilities, Description
from covenant.model.error import CovenantError
from tests.a2a.served import Site, start_site

PATH = "/.well-known/agent-card.json"
ALL = ["JSONRPC", "HTTP+JSON", "GRPC"]
GOOD: dict[str, Any] = {
    "name": "Writer",
    "description": "writes",
    "version": "7",
    "provider": {"url": "https://example.com", "organization": "Example"},
    "documentationUrl": "https://example.com/docs",
    "iconUrl": "https://example.com/icon.png",
    "capabilities": {"streaming": False, "extensions": [{"uri": "urn:x"}]},
    "defaultInputModes": ["text/markdown"],
    "defaultOutputModes": ["text/markdown"],
    "skills": [{"id": "s", "name": "s", "description": "s", "tags": ["s"], "examples": []}],
    "supportedInterfaces": [{"protocolBinding": "JSONRPC"}],
    "securitySchemes": {"key": {"apiKeySecurityScheme": {"name": "k", "location": "header"}}},
    "securityRequirements": [{"schemes": {"key": {"list": []}}}],
    "extended": {"description": "for those who are known", "x-more": 1},
}
OF_03 = {
    "url": "https://example.com/a2a",
    "preferredTransport": "JSONRPC",
    "additionalInterfaces": [],
    "protocolVersion": "0.3.0",
    "security": [{"key": []}],
    "supportsAuthenticatedExtendedCard": True,
}


@pytest.fixture
async def whole_site() -> AsyncIterator[Site]:
    """One that serves every binding."""
    async with httpx.AsyncClient() as client:
        site = await start_site(client, grpc="127.0.0.1:0")
        yield site
        await site.daemon.stop()


async def publish(site: Site, card: Any) -> None:
    await site.exchange.run(site.exchange.operator(), c.PublishCard(None, site.writer.agent, card))


async def refusal_of(site: Site, card: Any) -> str:
    with pytest.raises(CovenantError) as refusal:
        await publish(site, card)
    assert refusal.value.code in ("malformed", "blank_text")
    return refusal.value.message


async def card_of(site: Site) -> dict[str, Any]:
    card: dict[str, Any] = (await site.client.get(f"{site.url}/agents/writer@lab{PATH}")).json()
    parse_agent_card(msgspec.json.decode(msgspec.json.encode(card)))
    return card


def names(shape: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in structs.fields(shape)]


def is_in(given: Any, served: Any) -> bool:
    """All that was said is there, and a list may go on behind it; null is what was not said."""
    if isinstance(given, dict) and isinstance(served, dict):
        return all(value is None or (name in served and is_in(value, served[name])) for name, value in given.items())
    if isinstance(given, list) and isinstance(served, list):
        return len(given) <= len(served) and all(map(is_in, given, served))
    return type(given) is type(served) and bool(given == served)


@pytest.mark.parametrize("name", [*names(Description), *OF_03, "signatures", "x-house"])
async def test_a_member_is_served_as_it_was_published_or_refused(site: Site, name: str) -> None:
    kept = refused = 0
    whole = {**GOOD, **OF_03, "signatures": [{"protected": "a", "signature": "b"}], "x-house": {"a": []}}
    for value in (whole[name], "", [], {}, "text", ["text"], {"a": "b"}, False, 0, None):
        try:
            await publish(site, {"name": "writer", name: value})
        except CovenantError as refusal:
            assert refusal.code in ("malformed", "blank_text"), value
            assert refusal.message
            refused += 1
            continue
        kept += 1
        served = await card_of(site)
        if name == "extended":
            served["extended"] = await site.rpc("GetExtendedAgentCard", path="/agents/writer@lab")
        if value is not None:
            assert is_in(value, served.get(name)), (value, served.get(name))
    assert (kept + refused, kept > 0 or name == "name") == (10, True)


@pytest.mark.parametrize("name", names(Capabilities))
async def test_a_capability_is_served_as_it_was_published_or_refused(site: Site, name: str) -> None:
    kept = 0
    values: tuple[Any, ...] = (True, False, None, [], [{"uri": "urn:x", "required": True}], "", {})
    for value in values:
        try:
            await publish(site, {"name": "writer", "capabilities": {name: value}})
        except CovenantError as refusal:
            assert refusal.code == "malformed"
            continue
        kept += 1
        served = (await card_of(site))["capabilities"]
        assert served[name] is not None
        if value is not None:
            assert is_in(value, served[name]), (value, served[name])
    assert kept >= 3


@pytest.mark.parametrize("name", ["signatures", "securitySchemes", "securityRequirements", *OF_03])
async def test_what_only_the_daemon_can_say_is_refused_with_the_reason(site: Site, name: str) -> None:
    whole = {**GOOD, **OF_03, "signatures": [{"protected": "a", "signature": "b"}]}
    assert name in await refusal_of(site, {"name": "writer", name: whole[name]})
    assert name in await refusal_of(site, {"name": "writer", "extended": {name: whole[name]}})


async def test_an_extended_card_is_refused_where_the_card_says_that_there_is_none(site: Site) -> None:
    card: dict[str, Any] = {"name": "writer", "extended": {"description": "more"}}
    assert "shown to nobody" in await refusal_of(site, {**card, "capabilities": {"extendedAgentCard": False}})
    for said in (True, None):
        await publish(site, {**card, "capabilities": {"extendedAgentCard": said}})


@pytest.mark.parametrize("name", ["capabilities", "supportedInterfaces", "extended"])
async def test_what_an_extended_card_cannot_say_otherwise_is_refused(site: Site, name: str) -> None:
    assert f"extended.{name}" in await refusal_of(site, {"name": "writer", "extended": {name: GOOD[name]}})


@pytest.mark.parametrize("name", ["description", "version", "defaultInputModes", "defaultOutputModes", "skills"])
async def test_a_required_member_that_says_nothing_is_refused(site: Site, name: str) -> None:
    empty: Any = type(GOOD[name])()
    assert f"{name} is empty" in await refusal_of(site, {"name": "writer", name: empty})
    assert f"extended.{name} is empty" in await refusal_of(site, {"name": "writer", "extended": {name: empty}})


async def test_a_whole_card_is_served_as_it_was_published(site: Site) -> None:
    card = {name: value for name, value in GOOD.items() if not name.startswith("security")}
    await publish(site, card)
    served = await card_of(site)
    told = {name: value for name, value in card.items() if name not in ("capabilities", "extended")}
    assert is_in(told, served)
    extended = await site.rpc("GetExtendedAgentCard", path="/agents/writer@lab")
    assert is_in({**told, **card["extended"]}, extended)


# --- which bindings a card lists ----------------------------------------------------------------------------


def listed(card: dict[str, Any]) -> list[str]:
    return [one["protocolBinding"] for one in card["supportedInterfaces"]]


@pytest.mark.parametrize("bindings", [["JSONRPC"], ["HTTP+JSON"], ["GRPC", "JSONRPC"], ["HTTP+JSON", "JSONRPC"], ALL])
async def test_a_card_lists_the_bindings_that_it_was_published_with_in_their_order(
    whole_site: Site, bindings: list[str]
) -> None:
    site = whole_site
    whole = {one["protocolBinding"]: one for one in (await card_of(site))["supportedInterfaces"]}
    assert list(whole) == ALL
    wanted = [{"protocolBinding": name, "protocolVersion": "1.0"} for name in bindings]
    await publish(site, {"name": "writer", "supportedInterfaces": wanted})
    assert (await card_of(site))["supportedInterfaces"] == [whole[name] for name in bindings]
    extended = await site.rpc("GetExtendedAgentCard", path="/agents/writer@lab")
    assert listed(extended) == bindings
    assert (await site.rpc("ListTasks", path="/agents/writer@lab"))["totalSize"] == 0  # what a card does not list works


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ([], "supportedInterfaces"),
        ("JSONRPC", "supportedInterfaces"),
        (["JSONRPC"], "supportedInterfaces"),
        ([{}], "protocolBinding"),
        ([{"protocolBinding": "SOAP"}], "SOAP"),
        ([{"protocolBinding": 5}], "protocolBinding"),
        ([{"protocolBinding": "JSONRPC"}, {"protocolBinding": "JSONRPC"}], "twice"),
        ([{"protocolBinding": "JSONRPC", "url": "https://elsewhere.example"}], "url"),
        ([{"protocolBinding": "GRPC", "tenant": "me"}], "tenant"),
        ([{"protocolBinding": "JSONRPC", "protocolVersion": "0.3"}], "protocolVersion"),
        ([{"protocolBinding": "JSONRPC", "protocol_version": "1.0"}], "protocol_version"),
    ],
)
async def test_interfaces_that_would_not_be_served_so_are_refused(site: Site, wanted: Any, named: str) -> None:
    said = await refusal_of(site, {"name": "writer", "supportedInterfaces": wanted})
    assert "supportedInterfaces" in said and named in said


async def test_a_card_whose_bindings_are_not_served_here_is_not_shown() -> None:
    """The binding may be one of another daemon of the same store."""
    async with httpx.AsyncClient() as client:
        site = await start_site(client, {"name": "writer", "supportedInterfaces": [{"protocolBinding": "GRPC"}]})
        response = await site.client.get(f"{site.url}/agents/writer@lab{PATH}")
        await site.daemon.stop()
    assert (response.status_code, "GRPC" in response.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize(
    "mode", ["", " ", "json", "nonsense//x", "text/", "/plain", "text/pl ain", "*/json", "a/b/c", ";q=1"]
)
async def test_a_media_type_that_no_part_can_have_is_refused(site: Site, mode: str) -> None:
    """Else the card is taken, and every message to its agent is refused."""
    skill = {"id": "s", "name": "s", "description": "s", "tags": ["s"], "inputModes": ["text/plain", mode]}
    for said in ({"defaultInputModes": [mode]}, {"skills": [skill]}, {"extended": {"skills": [skill]}}):
        assert repr(mode) in await refusal_of(site, {"name": "writer", **said})


async def test_the_forms_of_media_types_that_cards_have_are_taken(site: Site) -> None:
    for mode in ("text", "Image", "*", "*/*", "image/*", " text/plain ; charset=utf-8", "application/vnd.a-b.c+json"):
        await publish(site, {"name": "writer", "defaultInputModes": [mode]})
        assert (await card_of(site))["defaultInputModes"] == [mode]


@pytest.mark.parametrize("uri", [None, "", " ", "urn:a,urn:b", "urn:a b", "urn:\u00e9", "urn:a\n"])
async def test_a_required_extension_that_no_client_can_name_is_refused(site: Site, uri: str | None) -> None:
    """The header in which it is named is a list, separated by commas."""
    listed: list[dict[str, Any]] = [
        {"uri": "urn:covenant:generation", "required": True},
        {"uri": uri, "required": True},
    ]
    assert repr(uri) in await refusal_of(site, {"name": "writer", "capabilities": {"extensions": listed}})
    listed[1]["required"] = False
    await publish(site, {"name": "writer", "capabilities": {"extensions": listed}})
