"""Where a card says that the daemon is: where its operator says; else where it listens; and if that is everywhere, at
the address by which whoever asks has reached it.

A card is signed, and clients take their tokens to the places that it names. So what a request calls its host counts
only where it is known to be ours: this machine's name, or one in its certificate, with the port on which it listens.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from covenant.model.error import BadSetting

Address: TypeAlias = tuple[str, int]
_HOST: Final = re.compile(r"([A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORTS: Final = {"http": 80, "https": 443}


class Listening(Struct, frozen=True, kw_only=True):
    """What the daemon knows of itself. `public_url` and `public_grpc` are its operator's word."""

    scheme: str = "http"
    http: Address | None = None
    grpc: Address | None = None
    public_url: str | None = None
    public_grpc: str | None = None
    names: frozenset[str] = frozenset()


class Reached(Struct, frozen=True, gc=False):
    """How somebody got here: the host that the request names, and the address of ours at which it came in."""

    host: str | None = None
    local: str | None = None


class Whereabouts(Struct, frozen=True):
    url: str | None
    grpc: str | None


def where(listening: Listening, reached: Reached) -> Whereabouts:
    url = listening.public_url
    if url is None and listening.http is not None:
        host, port = listening.http
        host = _host_of_ours(listening, reached) or host if is_everywhere(host) else host
        url = f"{listening.scheme}://{joined(host, port)}"
    return Whereabouts(url, _grpc(listening, url))


def _grpc(listening: Listening, url: str | None) -> str | None:
    """On the host of HTTP, where it is not said better."""
    if listening.public_grpc is not None or listening.grpc is None:
        return listening.public_grpc
    host, port = listening.grpc
    if url is not None and (listening.public_url is not None or is_everywhere(host)):
        host = urlsplit(url).hostname or host
    return joined(host, port)


def _host_of_ours(listening: Listening, reached: Reached) -> str | None:
    said = _HOST.fullmatch(reached.host or "")
    if said is not None and listening.http is not None:
        name, port = said[1].lower(), int(said[2] or _PORTS[listening.scheme])
        is_ours = name in listening.names or (name == "localhost" and is_loopback(reached.local or ""))
        if is_ours and port == listening.http[1]:
            return name
    return reached.local


def is_everywhere(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str, option: str) -> Address:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadSetting(f"{address!r} is not HOST:PORT", name=option)
    return host.strip("[]"), int(port)


def check_public_url(url: str, option: str) -> str:
    """The URL without a slash at its end, as paths are put behind it."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        is_one = False
    if not is_one or " " in url or "@" in parts.netloc or "?" in url or "#" in url:
        raise BadSetting(f"{url!r} is not http(s)://HOST[:PORT][/PATH]", name=option)
    return url.rstrip("/")
