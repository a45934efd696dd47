"""The folder of a daemon: its key, the operator's token, its data, its socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from covenant.client.remote import OPERATOR_TOKEN
from covenant.exchange.realm import Realm, read_secret, write_secret
from covenant.exchange.token import make_token

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

    def make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def realm(self) -> Realm:
        return Realm.at(self.folder / "identity" / "realm.key")

    def operator_token(self) -> str:
        """Made at the first start."""
        if not self.token_file.exists():
            write_secret(self.token_file, make_token().encode() + b"\n")
        return read_secret(self.token_file).decode().strip()

    def keep_operator_token(self, token: str) -> None:
        write_secret(self.token_file, token.encode() + b"\n")
