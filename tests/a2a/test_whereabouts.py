"""Where a card says that the daemon is: never a place that is not ours, whatever a request says."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from covenant.exchange.realm import Realm
from covenant.model.error import BadSetting
from covenant.rules.whereabouts import Listening, Reached, where
from covenant.serve.daemon import Daemon, Settings
from tests.daemons import OPERATOR_TOKEN

EVERYWHERE = Listening(http=("0.0.0.0", 8421), grpc=("0.0.0.0", 8422), names=frozenset({"box"}))


@pytest.mark.parametrize(
    ("host", "local", "named"),
    [
        ("box:8421", "192.0.2.7", "box"),
        ("BOX:8421", "192.0.2.7", "box"),
        ("localhost:8421", "127.0.0.1", "localhost"),
        ("192.0.2.7:8421", "192.0.2.7", "192.0.2.7"),
        ("[::1]:8421", "::1", "[::1]"),
        # What follows is not known to be ours.
        ("localhost:8421", "192.0.2.7", "192.0.2.7"),
        ("evil.example:8421", "192.0.2.7", "192.0.2.7"),
        ("198.51.100.1:8421", "192.0.2.7", "192.0.2.7"),
        ("box:9999", "192.0.2.7", "192.0.2.7"),
        ("box", "192.0.2.7", "192.0.2.7"),
        ("box:8421/x", "192.0.2.7", "192.0.2.7"),
        ("box:8421, evil.example", "192.0.2.7", "192.0.2.7"),
        ("user@box:8421", "192.0.2.7", "192.0.2.7"),
        ("box:8421\n", "192.0.2.7", "192.0.2.7"),
        ("", "2001:db8::7", "[2001:db8::7]"),
        (None, None, "0.0.0.0"),
    ],
)
def test_a_daemon_that_listens_everywhere_is_where_it_was_reached(
    host: str | None, local: str | None, named: str
) -> None:
    here = where(EVERYWHERE, Reached(host, local))
    assert (here.url, here.grpc) == (f"http://{named}:8421", f"{named}:8422")


def test_a_daemon_that_listens_somewhere_is_there_whatever_host_is_named() -> None:
    listening = Listening(http=("127.0.0.1", 8421), grpc=("::1", 8422), names=frozenset({"box"}))
    here = where(listening, Reached("box:8421", "127.0.0.1"))
    assert (here.url, here.grpc) == ("http://127.0.0.1:8421", "[::1]:8422")
    assert where(Listening(grpc=("::1", 8422)), Reached()).url is None


def test_the_usual_port_need_not_be_said() -> None:
    listening = Listening(scheme="https", http=("::", 443), names=frozenset({"box"}))
    assert where(listening, Reached("box", "::1")).url == "https://box:443"


def test_the_operators_word_goes_before_everything() -> None:
    said = Listening(http=("0.0.0.0", 8421), grpc=("127.0.0.1", 8422), public_url="https://agents.example/covenant")
    here = where(said, Reached("evil.example:8421", "192.0.2.7"))
    assert (here.url, here.grpc) == ("https://agents.example/covenant", "agents.example:8422")
    grpc = Listening(grpc=("0.0.0.0", 8422), public_grpc="grpc.example:443")
    assert where(grpc, Reached()).grpc == "grpc.example:443"


def test_a_daemon_knows_its_own_name_and_those_in_its_certificate(certified: tuple[Path, Path]) -> None:
    cert, key = certified
    plain = Daemon(Settings(store="memory:"), Realm.throwaway(), OPERATOR_TOKEN)
    assert plain.listening().names == {socket.gethostname().lower()}
    tls = Daemon(Settings(store="memory:", tls_cert=cert, tls_key=key), Realm.throwaway(), OPERATOR_TOKEN)
    assert tls.listening().names == {socket.gethostname().lower(), "covenant.test"}


@pytest.mark.parametrize(
    "settings",
    [
        {"public_url": "agents.example"},
        {"public_url": "ftp://agents.example"},
        {"public_url": "https://"},
        {"public_url": "https://user@agents.example"},
        {"public_url": "https://agents.example/?x=1"},
        {"public_url": "https://agents.example/#x"},
        {"public_url": "https://agents.example:99999"},
        {"public_url": "https://agents.example/a b"},
        {"public_url": "https://[::1"},
        {"public_url": "https://agents.example", "http": None, "grpc": "127.0.0.1:0"},
        {"public_grpc": "grpc.example", "grpc": "127.0.0.1:0"},
        {"public_grpc": "grpc.example:443"},
    ],
)
def test_a_public_address_that_is_none_stops_the_start(settings: dict[str, Any]) -> None:
    with pytest.raises(BadSetting):
        Daemon(Settings(store="memory:", **settings), Realm.throwaway(), OPERATOR_TOKEN)
