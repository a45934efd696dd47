"""Bearer tokens: shown once, kept as a digest."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from covenant.model.agent import base58

_PREFIX: Final = "cov_"
_BYTES: Final = 32


def make_token() -> str:
    return _PREFIX + base58(secrets.token_bytes(_BYTES))


def digest_of(token: str) -> str:
    """A token is random and long: a plain hash cannot be guessed back."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
