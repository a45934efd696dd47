"""Peers and capabilities from the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from covenant import AgentId
from tests.cli.conftest import Served
from tests.cli.support import Client, run, serving


def test_a_peer_comes_in_and_is_thrown_out(covenant: Client) -> None:
    key = AgentId.named("carol@lab").pubkey
    said = covenant.text("peers", "enroll", "carol@lab", "--key", key, "--grant", "a2a.send.bob")
    assert key in said and "a2a.send.bob@local" in said and "The token is shown this once." in said
    token = next(line.split()[1] for line in said.splitlines() if line.startswith("token"))

    carol = Client(covenant.home, token)
    assert carol.json("capabilities", "check", "a2a.send.bob")["passed"]
    assert carol.refused("peers", "list") == "missing_capability"
    rotated = carol.json("peers", "rotate")
    assert rotated["kind"] == "peer_token_rotated" and rotated["display"] == "carol@lab"
    assert "shown this once" in covenant.text("peers", "rotate", "carol@lab")

    listed = {peer["display"]: peer for peer in covenant.json("peers", "list")["peers"]}
    assert listed["operator@local"]["role"] == "operator" and listed["carol@lab"]["pubkey"] == key
    assert f"revoked carol@lab ({key})" in covenant.text("peers", "revoke", "carol@lab", "--reason", "left")
    assert "revoked" in covenant.text("peers", "list")

    covenant("peers", "enroll", "dave")
    assert covenant.json("peers", "revoke", "dave")["display"] == "dave@local"


def test_who_lacks_a_right_or_names_nobody_is_told_what_to_type(covenant: Client, bob: Client) -> None:
    told = bob("a2a", "compact", code=1).err.splitlines()
    assert told[1] == f"the operator gives it: covenant --home {bob.home} capabilities grant NAME store.compact"
    told = covenant("a2a", "send", "nobody", "work", code=1).err.splitlines()
    assert told[1] == f"who is enrolled: covenant --home {covenant.home} peers list"


def test_a_right_is_given_and_taken(covenant: Client, bob: Client) -> None:
    assert bob.refused("a2a", "compact") == "missing_capability"
    checked = bob("capabilities", "check", "store.compact", code=1)
    assert checked.out == "no: bob@local may not store.compact (missing_capability)\n"

    scope = json.dumps({"max_uses": 2})
    said = covenant.text("capabilities", "grant", "bob", "store.compact", "--scope", scope, "--expires-in", "30d")
    assert "used 0 of 2 times" in said and "expires in 29 days" in said
    grant_id = said.split()[1]
    assert grant_id in bob.text("capabilities", "check", "store.compact")
    assert "used 0 of 2 times" in covenant.text("capabilities", "list", "--subject", "bob")
    assert "revoked" in covenant.text("capabilities", "revoke", grant_id, "--reason", "enough")

    granted = covenant.json("capabilities", "grant", "bob", "a2a.repair.requeue", "--delegable")["capability"]
    assert granted["action"] == "a2a.repair.requeue" and granted["delegable"]
    listed = covenant.json("capabilities", "list", "--subject", "bob", "-n", "100")
    assert granted["id"] in [one["id"] for one in listed["capabilities"]]
    revoked = covenant.json("capabilities", "revoke", granted["id"])
    assert revoked["kind"] == "capability_revoked" and revoked["capability"]["revoked_ms"]


def test_the_operators_new_token_stays_in_its_home(home: Path) -> None:
    file = home / "operator.token"
    with serving(home) as (_, told):
        operator = Client(home)
        old = file.read_text().strip()
        assert f"the new one is in {file}" in operator.text("peers", "rotate")
        new = file.read_text().strip()
        assert new != old and file.stat().st_mode & 0o777 == 0o600

        # The daemon keeps it, so it is the same from anywhere.
        over_http = run("peers", "rotate", "operator", "--json", "--url", told["http"], COVENANT_TOKEN=new)
        assert over_http.json["token"] == file.read_text().strip() != new

        (home / "operator.token.next.making").mkdir()  # in the way of every write, also of root's
        assert operator.refused("peers", "rotate") == "store_unavailable"
        assert operator.json("a2a", "status")["kind"] == "a2a_status"


def test_a_rotation_over_http_is_not_undone_by_a_restart(home: Path) -> None:
    with serving(home) as (daemon, told):
        old = (home / "operator.token").read_text().strip()
        there = {"COVENANT_URL": told["http"]}
        said = run("peers", "rotate", COVENANT_TOKEN=old, COVENANT_HOME=f"{home}/elsewhere", **there)
        assert "shown this once:\ncov_" in said.out
        new = said.out.splitlines()[-1]
        daemon.signal(signal.SIGTERM)
        daemon.rest()
    with serving(home):
        assert Client(home).json("a2a", "status")["kind"] == "a2a_status"
        assert Client(home, new).json("a2a", "status")["kind"] == "a2a_status"
        assert Client(home, old).refused("a2a", "status") == "unauthenticated"


def test_the_daemon_is_reached_by_url_too(served: Served) -> None:
    by_option = run("--url", served.url, "--token", served.token, "a2a", "status", "--json")
    assert by_option.json["kind"] == "a2a_status"
    by_variable = run("a2a", "status", "--json", COVENANT_URL=served.url, COVENANT_TOKEN=served.bob)
    assert by_variable.json["kind"] == "a2a_status"
    by_socket = run("version", "--json", "--url", f"unix:{served.home}/sock")
    assert by_socket.json["daemon"]["realm"] == served.told["realm"]
    without_a_token = run("--url", served.url, "a2a", "status", COVENANT_HOME=str(served.home))
    assert without_a_token.code == 1 and "(unauthenticated)" in without_a_token.err


def test_the_daemon_of_a_folder_is_listed(covenant: Client, bob: Client, served: Served) -> None:
    (one,) = covenant.json("daemons", "list")["daemons"]
    assert one["state"] == "alive" and one["pubkey"] == served.told["realm"] and one["lanes"] == 1
    assert one["seen_ms"] >= one["started_ms"]
    assert "alive" in covenant.text("daemons", "list")
    assert bob.refused("daemons", "list") == "missing_capability"


def test_who_is_not_there_is_told_by_the_name_that_was_typed(covenant: Client) -> None:
    for command in (("peers", "revoke"), ("peers", "rotate"), ("agents", "publish")):
        assert covenant(*command, "nobody", code=1).err.startswith("error: no peer nobody (unknown_peer)\n")
