"""Which headers of HTTP, and entries of gRPC's metadata, a request has once, and what surrounds their values.

A proxy that reads the first of two values and a daemon that reads the last disagree on who is calling, so a request
with two of them is refused before any of them is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from covenant.model.error import Malformed

OWS: Final = " \t"  # optional white space around a value, which is no part of it (RFC 9110, 5.6.3)
SINGLE: Final = frozenset(
    ("host", "authorization", "content-type", "idempotency-key", "last-event-id", "a2a-version")
)  # in small letters; what may come several times, such as a2a-extensions, is a list


def ambiguity(names: Sequence[str], needs_host: bool = False) -> Malformed | None:
    """Return why a request with these single-valued headers is refused, or None. HTTP/1.1 needs a host."""
    for name, count in Counter(names).items():
        if name in SINGLE and count > 1:
            return Malformed(f"the header {name} is given {count} times", field=name)
    if needs_host and "host" not in names:
        return Malformed("a request of HTTP/1.1 has a host header", field="host")
    return None
