"""The folder of a daemon: its key, the operator's token, its data, its socket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from covenant.client.remote import OPERATOR_TOKEN
from covenant.exchange.realm import Realm, move_secret, read_secret, write_secret
from covenant.model.error import BadSetting

HOME_VARIABLE: Final = "COVENANT_HOME"


class Home:
    def __init__(self, folder: Path | str | None = None) -> None:
        chosen = folder or os.environ.get(HOME_VARIABLE) or "~/.covenant"
        self.folder = Path(chosen).expanduser().absolute()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def socket(self) -> Path:
        return self.folder / "sock"

    @property
    def token_file(self) -> Path:
        return self.folder / OPERATOR_TOKEN

    @property
    def alerts_file(self) -> Path:
        return self.folder / "alerts.json"

    def make(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as failed:
            raise BadSetting(f"{self.folder} cannot be a home: {failed.strerror}", name="--home") from failed

    @property
    def has_key(self) -> bool:
        """Whether a daemon ever began here."""
        return self._key_file.exists()

    def realm(self) -> Realm:
        return Realm.at(self._key_file)

    @property
    def _key_file(self) -> Path:
        return self.folder / "identity" / "realm.key"

    @property
    def tokens(self) -> TokenFile:
        return TokenFile(self.token_file)


class TokenFile:
    """The operator's token in its file; one that is laid ready lies beside it. (A `Keeper`.)"""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ready = file.with_name(f"{file.name}.next")

    def found(self) -> Sequence[str]:
        tokens = (_token_in(file) for file in (self._ready, self._file) if file.exists())
        return [token for token in tokens if token]

    def lay_ready(self, token: str) -> None:
        write_secret(self._ready, token.encode() + b"\n")

    def settle(self, token: str) -> None:
        if self._ready.exists() and _token_in(self._ready) == token:
            move_secret(self._ready, self._file)
        else:
            self._ready.unlink(missing_ok=True)


class KeptFile:
    """Bytes for the next daemon. (The `Notes` of the alerts.)"""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __str__(self) -> str:
        return str(self._file)

    async def read(self) -> bytes | None:
        return self._file.read_bytes() if self._file.exists() else None

    async def write(self, data: bytes) -> None:
        write_secret(self._file, data)


def _token_in(file: Path) -> str:
    return read_secret(file).decode(errors="replace").strip()
