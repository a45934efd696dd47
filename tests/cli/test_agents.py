"""Agents from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.support import Client


def test_an_agent_is_published_shown_and_withdrawn(covenant: Client, bob: Client, tmp_path: Path) -> None:
    assert covenant.refused("agents", "publish", "nobody") == "unknown_peer"
    assert "published bob as bob\n" in covenant.text("agents", "publish", "bob")
    shown = bob.json("agents", "show", "bob")
    assert shown["kind"] == "agent" and shown["published"]["agent"]["display"] == "bob@local"
    assert shown["published"]["card"] == {"name": "bob", "description": "bob@local, an agent of this realm"}

    file = tmp_path / "card.json"
    card = {"name": "Bob the painter", "description": "paints \x1b[31mdoors", "capabilities": {"streaming": False}}
    file.write_text(json.dumps(card))
    assert covenant.json("agents", "publish", "bob", str(file))["published"]["card"] == card
    said = bob.text("agents", "show", "bob")
    assert '"name": "Bob the painter"' in said and "bob@local" in said
    listed = covenant.text("agents", "list")
    assert "Bob the painter" in listed and "paints" in listed and "doors" in listed
    assert [one["card"] for one in bob.json("agents", "list")["agents"]] == [card]

    assert covenant.text("agents", "withdraw", "bob") == "withdrew bob@local\n"
    assert covenant.refused("agents", "show", "bob") == "unknown_peer"
    covenant("agents", "publish", "bob", "-", stdin=json.dumps(card))
    assert covenant.json("agents", "withdraw", "bob")["display"] == "bob@local"
    assert bob.json("agents", "list") == {"kind": "agent_list", "agents": []}


def test_a_peer_publishes_itself_if_it_may(covenant: Client, bob: Client) -> None:
    assert bob.refused("agents", "publish", "bob") == "missing_capability"
    grant_id = covenant.json("capabilities", "grant", "bob", "agents.publish")["capability"]["id"]
    assert "published bob" in bob.text("agents", "publish", "bob")
    assert bob.refused("agents", "publish", "operator") == "not_permitted"
    assert bob.json("agents", "withdraw", "bob")["kind"] == "agent_withdrawn"
    covenant("capabilities", "revoke", grant_id)


def test_the_bindings_of_a_card_are_chosen(covenant: Client, bob: Client, tmp_path: Path) -> None:
    plain = covenant.json("agents", "publish", "bob", "--binding", "rest", "--binding", "jsonrpc")["published"]["card"]
    listed = [{"protocolBinding": "HTTP+JSON"}, {"protocolBinding": "JSONRPC"}]
    assert plain == {"name": "bob", "supportedInterfaces": listed}
    file = tmp_path / "card.json"
    file.write_text(json.dumps({"name": "Bob"}))
    chosen = covenant.json("agents", "publish", "bob", str(file), "--binding", "jsonrpc")["published"]["card"]
    assert chosen == {"name": "Bob", "supportedInterfaces": listed[1:]}
    file.write_text(json.dumps(chosen))
    assert "supportedInterfaces" in covenant("agents", "publish", "bob", str(file), "--binding", "rest", code=2).err
    covenant("agents", "publish", "bob", "--binding", "soap", code=2)
    file.write_text(json.dumps({"name": "Bob", "securitySchemes": {}}))
    assert covenant.refused("agents", "publish", "bob", str(file)) == "malformed"
    covenant("agents", "withdraw", "bob")


def test_what_is_no_card_is_told_in_one_line(covenant: Client, tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_text("[1]")
    assert "holds no card" in covenant("agents", "publish", "bob", str(file), code=2).err
    file.write_text("{}")
    assert covenant.refused("agents", "publish", "bob", str(file)) == "blank_text"
