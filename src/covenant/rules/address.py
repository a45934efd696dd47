"""Which hosts somebody may have us call: those out in the world, and none on this machine or in its network."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

_TRANSLATED: Final = IPv6Network("64:ff9b::/96")  # the IPv4 internet, as a network without IPv4 sees it
_TUNNELED: Final = (IPv6Network("2002::/16"), IPv6Network("2001::/32"))  # 6to4 and Teredo: an IPv4 address inside


def is_public(address: str) -> bool:
    """Whether this address is anybody's on the internet: not loopback, private, shared, link-local, multicast, reserved
    or unspecified, nor a way of writing one of those."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped
        if inner is None and ip in _TRANSLATED:
            inner = IPv4Address(ip.packed[-4:])
        if inner is not None:
            ip = inner
        elif any(ip in network for network in _TUNNELED) or ip.is_site_local:
            return False
    return ip.is_global and not (
        ip.is_private or ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_reserved or ip.is_unspecified
    )


def is_surely_private(host: str) -> bool:
    """What the name alone tells; where any other leads is known when it is looked up."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = _literal(name)
    return address is not None and not is_public(address)


def _literal(name: str) -> str | None:
    """The address that a name spells out: also as one number, in octal or in part, as resolvers read it."""
    try:
        return str(ip_address(name.partition("%")[0]))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(name))
    except (OSError, UnicodeError):
        return None
