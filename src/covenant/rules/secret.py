"""What of a store's URL may be shown, in messages, logs and greetings: all but its passwords."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

_SECRET: Final = re.compile(r"([?&](?:ssl)?password=)[^&#]*", re.IGNORECASE)


def without_passwords(url: str) -> str:
    password = urlsplit(url).password
    if password is not None:
        url = url.replace(f":{password}@", ":***@", 1)
    return _SECRET.sub(r"\1***", url)
