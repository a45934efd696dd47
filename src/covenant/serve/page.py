"""The page to try it: one file, served as it is, that reads the API description and makes a form for each verb.

It loads nothing from anywhere else, and its Content-Security-Policy says so: only the one script and the one style that
are in the file run, by their hashes, and only this daemon is talked to.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from covenant.serve.head import Headers
from covenant.serve.http import Receive, Scope, Send

PATH: Final = "/docs"
HTML: Final = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), HTML, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash_of('script')}",
        f"style-src {_hash_of('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final[Headers] = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-length", b"%d" % len(HTML)),
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


async def page(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": HTML})
