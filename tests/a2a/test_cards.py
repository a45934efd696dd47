"""Cards as anybody fetches them: where they are, when they are new, and that they are signed."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from a2a.client.card_resolver import parse_agent_card
from a2a.utils._jcs import canonicalize
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.json_format import MessageToDict

from covenant.a2a.fault import Fault
from covenant.a2a.signature import check_signed
from covenant.exchange.realm import Realm
from covenant.model import command as c
from covenant.model.agent import from_base58
from covenant.serve.a2a.codec import write_card
from covenant.serve.a2a.proto import AgentCard
from tests.a2a.served import Site, start_site

PATH = "/.well-known/agent-card.json"
RICH = {
    "name": "writer",
    "description": "schreibt schön ✓",
    "version": "2.1",
    "capabilities": {
        "streaming": True,
        "pushNotifications": False,
        "extensions": [{"uri": "urn:x", "required": False, "params": {"depth": 0, "deep": {"on": True}}}],
    },
    "skills": [{"id": "s", "name": "s", "description": "d", "tags": ["t"], "examples": []}],
    "provider": {"url": "https://example.com", "organization": "Example"},
    "iconUrl": "",
    "x-house": "not the protocol's",
    "extended": {"description": "for those who are known"},
}


async def get(site: Site, path: str = PATH, **headers: str) -> httpx.Response:
    return await site.client.get(f"{site.url}{path}", headers=headers)


async def test_the_card_is_public_and_complete(site: Site) -> None:
    response = await get(site)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    card = response.json()
    required = {"name", "description", "version", "capabilities", "defaultInputModes", "defaultOutputModes", "skills"}
    assert required < set(card)
    spoken = [(one["url"], one["protocolBinding"], one["protocolVersion"]) for one in card["supportedInterfaces"]]
    assert spoken == [(site.url, "JSONRPC", "1.0"), (site.url, "HTTP+JSON", "1.0")]
    assert card["securitySchemes"] == {"bearer": {"httpAuthSecurityScheme": {"scheme": "Bearer"}}}


async def test_each_agent_has_its_own_card(site: Site) -> None:
    for name in ("writer", "editor"):
        card = (await get(site, f"/agents/{name}@lab{PATH}")).json()
        assert card["name"] == name
        assert {one["url"] for one in card["supportedInterfaces"]} == {f"{site.url}/agents/{name}@lab"}
    assert (await get(site)).json()["name"] == "writer"
    assert (await get(site, f"/agents/nobody{PATH}")).status_code == 404
    assert (await get(site, f"/agents/carol@lab{PATH}")).status_code == 404


async def test_the_agent_at_the_root_can_be_named() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, default_agent="editor@lab")
        assert (await get(site)).json()["name"] == "editor"
        await site.daemon.stop()


async def test_a_card_names_the_public_address_of_the_daemon() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, public_url="https://agents.example/house/", grpc="127.0.0.1:0")
        port = str(site.daemon.grpc_address).rpartition(":")[2]
        cards = [
            (await get(site, f"/agents/writer@lab{PATH}", Host="evil.example")).json(),
            await site.rpc("GetExtendedAgentCard", path="/agents/writer@lab"),
        ]
        await site.daemon.stop()
    for card in cards:
        assert [one["url"] for one in card["supportedInterfaces"]] == [
            *["https://agents.example/house/agents/writer@lab"] * 2,
            f"agents.example:{port}",
        ]
        check_signed(card, [site.exchange.realm.pubkey])


async def test_a_daemon_on_all_addresses_names_the_one_by_which_it_was_reached(site: Site) -> None:
    """And signs no card that leads elsewhere, whoever asks for one."""
    port = urlsplit(site.url).port
    assert port is not None
    site.daemon.address = ("0.0.0.0", port)  # as far as it knows
    tags: dict[str, str] = {}
    for host, named in (
        (f"localhost:{port}", "localhost"),
        (f"127.0.0.1:{port}", "127.0.0.1"),
        (f"evil.example:{port}", "127.0.0.1"),
        ("localhost:1", "127.0.0.1"),
    ):
        where = f"http://127.0.0.1:{port}"
        for call in (site.client.get, site.client.head):  # the short way, and the one through ASGI
            response = await call(f"{where}{PATH}", headers={"Host": host})
            assert tags.setdefault(named, response.headers["etag"]) == response.headers["etag"]
            again = await call(f"{where}{PATH}", headers={"Host": host, "If-None-Match": tags[named]})
            assert again.status_code == 304
        card = (await site.client.get(f"{where}{PATH}", headers={"Host": host})).json()
        assert {one["url"] for one in card["supportedInterfaces"]} == {f"http://{named}:{port}"}
        check_signed(card, [site.exchange.realm.pubkey])
    assert len(set(tags.values())) == 2


async def test_a_card_that_is_known_is_not_sent_again(site: Site) -> None:
    first = await get(site)
    assert first.headers["cache-control"] == "public, max-age=60"
    for headers in (
        {"If-None-Match": first.headers["etag"]},
        {"If-None-Match": f'"other", W/{first.headers["etag"]}'},
        {"If-None-Match": "*"},
        {"If-Modified-Since": first.headers["last-modified"]},
        {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"},
    ):
        again = await get(site, **headers)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
        assert "content-length" not in again.headers
    for headers in (
        {"If-None-Match": '"other"'},
        {"If-None-Match": '"other"', "If-Modified-Since": first.headers["last-modified"]},
        {"If-Modified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"},
        {"If-Modified-Since": "nonsense"},
    ):
        assert (await get(site, **headers)).status_code == 200


async def test_a_card_that_is_published_again_is_another(site: Site) -> None:
    first = await get(site)
    writer, operator = site.writer.agent, site.exchange.operator()
    await site.exchange.run(operator, c.PublishCard(None, writer, {"name": "writer", "version": "2.0.0"}))
    again = await get(site, **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.json()["version"]) == (200, "2.0.0")
    await site.exchange.run(operator, c.WithdrawCard(None, writer))
    assert (await get(site, f"/agents/writer@lab{PATH}")).status_code == 404


async def test_the_head_of_a_card_can_be_asked_for(site: Site) -> None:
    response = await site.client.head(f"{site.url}{PATH}")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["etag"] == (await get(site)).headers["etag"]
    assert (await site.client.post(f"{site.url}{PATH}")).status_code == 405


def unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def said(value: Any) -> Any:
    """As the official SDK forms what a signature covers: nothing that is empty."""
    if isinstance(value, dict):
        return {name: told for name, inner in value.items() if (told := said(inner)) is not None} or None
    if isinstance(value, list):
        return [told for inner in value if (told := said(inner)) is not None] or None
    return None if value == "" else value


OWN: dict[str, Any] = {
    "name": "writer",
    "x-house": 1,
    "provider": {"organization": "lab", "url": "https://example.com", "x-seat": "here"},
    "capabilities": {"x-speed": 3, "extensions": [{"uri": "urn:a", "x-why": "so", "params": {"x-all": 1}}]},
    "skills": [{"id": "s", "name": "s", "description": "s", "tags": ["s"], "x-level": 5}],
}


EMPTY: dict[str, Any] = {"x-none": None, "x-list": [], "x-text": "", "x-all": {"x": {}}, "x-no": False, "x-zero": 0}
FREE: dict[str, Any] = {
    "name": "writer",
    "capabilities": {"extensions": [{"uri": "urn:a", "params": EMPTY}, {"uri": "urn:b", "params": {}}]},
}


@pytest.mark.parametrize(
    "card", [{"name": "writer"}, RICH, {"name": "writer", "iconUrl": "", "provider": {}}, OWN, FREE]
)
async def test_the_signature_covers_what_the_official_sdk_reads(card: dict[str, Any]) -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, card)
        shown = (await get(site)).json()
        await site.daemon.stop()
    parsed = MessageToDict(parse_agent_card(json.loads(json.dumps(shown))))
    signatures = parsed.pop("signatures")
    payload = base64.urlsafe_b64encode(canonicalize(said(parsed)).encode()).rstrip(b"=").decode()
    key = Ed25519PublicKey.from_public_bytes(from_base58(site.exchange.realm.pubkey))
    for signature in signatures:
        header = json.loads(unpadded(signature["protected"]))
        assert header == {"alg": "EdDSA", "kid": site.exchange.realm.pubkey, "typ": "JOSE"}
    assert any(is_good(signature, payload, key) for signature in signatures)


def is_good(signature: dict[str, str], payload: str, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(unpadded(signature["signature"]), f"{signature['protected']}.{payload}".encode())
    except InvalidSignature:
        return False
    return True


@pytest.mark.parametrize("card", [RICH, OWN, FREE])
def test_a_card_that_the_official_sdk_has_signed_is_signed(card: dict[str, Any]) -> None:
    realm = Realm.throwaway()
    form = canonicalize(said(MessageToDict(parse_agent_card(json.loads(json.dumps(card))))))
    protected, payload = (
        base64.urlsafe_b64encode(text).rstrip(b"=").decode() for text in (b'{"alg":"EdDSA"}', form.encode())
    )
    signed = base64.urlsafe_b64encode(realm.sign(f"{protected}.{payload}".encode())).decode()
    check_signed({**card, "signatures": [{"protected": protected, "signature": signed}]}, [realm.pubkey])


async def test_the_extended_card_is_for_those_who_are_known() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, RICH)
        assert (await site.rest("GET", "/extendedAgentCard", who=None)).status_code == 401
        public, extended = (await get(site)).json(), await site.rpc("GetExtendedAgentCard")
        assert public["description"] == RICH["description"]
        assert extended["description"] == "for those who are known"
        assert "extended" not in public and "extended" not in extended
        assert extended["signatures"] != public["signatures"]
        await site.daemon.stop()


@pytest.mark.parametrize(
    "card",
    [
        {"name": "writer", "documentationUrl": None, "capabilities": {"streaming": None, "extensions": None}},
        {"name": "writer", "provider": {}, "skills": [{"id": "s", "examples": None}], "x-house": {"n": 2**53 - 1}},
        {"name": "writer", "skills": [{"id": "s", "securityRequirements": [{"schemes": {"b": {"list": ["x"]}}}]}]},
        {"name": "writer", "supportedInterfaces": None, "securitySchemes": None, "signatures": None},
        {"name": "writer", "extended": {"signatures": None, "extended": None, "name": None, "version": "9"}},
    ],
)
async def test_what_is_published_is_read_by_the_official_client(card: dict[str, Any]) -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, card)
        public, extended = (await get(site)).json(), await site.rpc("GetExtendedAgentCard")
        assert parse_agent_card(public).name == "writer"
        read = parse_agent_card(extended)
        assert read.name == "writer"
        assert AgentCard.FromString(write_card(extended)).version == read.version
        await site.daemon.stop()


async def test_an_agent_may_have_no_extended_card() -> None:
    async with httpx.AsyncClient() as client:
        site = await start_site(client, {"name": "writer", "capabilities": {"extendedAgentCard": False}})
        assert (await get(site)).json()["capabilities"]["extendedAgentCard"] is False
        assert (await site.rpc("GetExtendedAgentCard"))["code"] == -32004
        assert (await site.rest("GET", "/extendedAgentCard")).status_code == 400
        await site.daemon.stop()


async def test_the_root_is_the_first_agent_that_is_still_there(site: Site) -> None:
    operator = site.exchange.operator()
    await site.exchange.run(operator, c.PublishCard(None, site.writer.agent, {"name": "writer", "version": "3"}))
    assert (await get(site)).json()["version"] == "3"
    await site.exchange.trust.revoke_peer(operator, "writer@lab", "left")
    assert (await get(site)).json()["name"] == "editor"
    await site.exchange.trust.revoke_peer(operator, "editor@lab", "left")
    assert (await get(site)).status_code == 404


async def test_an_agent_is_found_as_it_is_now_however_often_it_was_found_before(site: Site) -> None:
    directory, operator, writer = site.daemon.directory, site.exchange.operator(), site.writer.agent
    silent = {"name": "writer", "capabilities": {"streaming": False}}
    for card, streams in ((silent, False), ({"name": "writer"}, True)):
        await site.exchange.run(operator, c.PublishCard(None, writer, card))
        assert [(await directory.find(name)).streams for name in (None, "writer@lab")] == [streams, streams]
    await site.exchange.run(operator, c.WithdrawCard(None, writer))
    assert (await directory.find(None)).id.display == "editor@lab"
    await site.exchange.trust.revoke_peer(operator, "editor@lab", "left")
    with pytest.raises(Fault):
        await directory.find(None)
