"""What of a store's URL may be shown, in messages, logs and greetings: all but its passwords."""

from __future__ import annotations

import re
from typing import Final

_LOGIN: Final = re.compile(r"(//[^:/?#]*:)[^/?#]*@")
_SECRET: Final = re.compile(r"([?&](?:ssl)?password=)[^&#]*", re.IGNORECASE)


def without_passwords(url: str) -> str:
    """Also of one that does not read as a URL."""
    return _SECRET.sub(r"\1***", _LOGIN.sub(r"\1***@", url, count=1))
