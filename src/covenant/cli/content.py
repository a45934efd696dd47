"""Content that is given on the command line: a JSON value, or content blocks in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from covenant.cli.option import F
from covenant.model.content import Content, read_block

_BLOCKS: Final = "content blocks"


def value_of(text: str) -> Any:
    """JSON; what is none is a text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    except UnicodeEncodeError as wrong:
        raise click.BadParameter(f"this is no text: {wrong}") from None


def file_option(what: str) -> Callable[[F], F]:
    return click.option(
        "--file",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
        help=f"{what}: a JSON file with the content blocks, or - for stdin.",
    )


def blocks_in(file: Path) -> tuple[Content, ...]:
    read: dict[str, Any] | list[dict[str, Any]] = json_in(
        file, dict[str, Any] | list[dict[str, Any]], _BLOCKS, "--file"
    )
    try:
        return tuple([read_block(members) for members in (read if isinstance(read, list) else [read])])
    except msgspec.ValidationError as wrong:
        raise click.BadParameter(f"{file} holds no {_BLOCKS}: {wrong}", param_hint="--file") from None


def json_in(file: Path, kind: Any, what: str, hint: str) -> Any:
    """What is in the file, or comes from stdin."""
    if str(file) != "-":
        data = file.read_bytes()
    elif sys.stdin is not None:
        data = sys.stdin.buffer.read()
    else:
        raise click.BadParameter("stdin is closed", param_hint=hint)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise click.BadParameter(f"{file} holds no {what}: {wrong}", param_hint=hint) from None
