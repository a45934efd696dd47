"""Rules for HTTP headers and gRPC metadata: the names that a request gives only once, and white space around values.

A proxy that reads the first of two `Authorization` headers and a daemon that reads the last disagree on the caller. So
a request that repeats a single-valued header is refused before any of its headers is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from covenant.model.error import Malformed

OWS: Final = " \t"  # optional white space around a value, which is no part of it (RFC 9110, 5.6.3)
SINGLE: Final = frozenset(
    ("host", "authorization", "content-type", "idempotency-key", "last-event-id", "a2a-version")
)  # in small letters; other headers, such as a2a-extensions, may be repeated


def headers_fault(names: Sequence[str], needs_host: bool = False) -> Malformed | None:
    """Return the refusal of a request whose headers have these names, or None. A request of HTTP/1.1 needs a host."""
    for name, count in Counter(names).items():
        if name in SINGLE and count > 1:
            return Malformed(f"the header {name} is given {count} times", field=name)
    if needs_host and "host" not in names:
        return Malformed("a request of HTTP/1.1 has a host header", field="host")
    return None
