"""Bearer tokens: shown once, kept as a digest. Only the operator's is also kept itself, where the operator finds it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Final, Protocol

from covenant.model.agent import base58

_PREFIX: Final = "cov_"
_BYTES: Final = 32


def make_token() -> str:
    return _PREFIX + base58(secrets.token_bytes(_BYTES))


def digest_of(token: str) -> str:
    """A token is random and long: a plain hash cannot be guessed back."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


class Keeper(Protocol):
    """Keeps the operator's token. A new one is laid ready, then a commit makes it good, then it is put in its place: a
    kill in between leaves both, and the store says which of them is good."""

    def found(self) -> Sequence[str]:
        """What is there, a token that was laid ready first."""

    def lay_ready(self, token: str) -> None: ...
    def settle(self, token: str) -> None:
        """This one of those found is good: it stands in its place, and no other is left."""
