"""Bounds of the options, as the rules have them.

A value that the rules would always refuse is wrong usage, and `--help` names the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from covenant.cli.option import F
from covenant.cli.words import size
from covenant.model.limits import (
    KEY_BYTES_MAX,
    MESSAGES_MAX,
    PAGE_MAX,
    SPAN_MS_MAX,
    STEP_RECORDS_MAX,
    TASK_KIND_BYTES_MAX,
    TEXT_BYTES_MAX,
)
from covenant.model.protocol import GENERATION_MAX

_EXACT_MAX: Final = 2**53  # integers up to here are exact in every reader of JSON

TIME_MS: Final = click.IntRange(0, _EXACT_MAX - 1)
AGE_MS: Final = click.IntRange(0, _EXACT_MAX)
SPAN_MS: Final = click.IntRange(0, SPAN_MS_MAX)
SEQ: Final = click.IntRange(1, _EXACT_MAX)
NUMBER: Final = click.IntRange(0, _EXACT_MAX)
GENERATION: Final = click.IntRange(0, GENERATION_MAX)
MESSAGE: Final = click.IntRange(0, MESSAGES_MAX)
ATTEMPTS: Final = click.IntRange(1, 2**31)
REQUEUES: Final = click.IntRange(1, STEP_RECORDS_MAX)
PAGE: Final = click.IntRange(1, PAGE_MAX)


class BoundedText(click.ParamType[str]):
    """Text of at most `bytes_max` bytes in UTF-8."""

    name = "text"

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if len(text.encode(errors="surrogatepass")) > self.bytes_max:
            self.fail(f"at most {size(self.bytes_max)} are taken", param, ctx)
        return text


def _bounded(bytes_max: int) -> Callable[..., Callable[[F], F]]:
    """Return a decorator like `click.option` for text of this size, which `meaning` explains in the help."""

    def option(*names: str, meaning: str, **more: Any) -> Callable[[F], F]:
        return click.option(*names, type=BoundedText(bytes_max), help=f"{meaning} At most {size(bytes_max)}.", **more)

    return option


key_option: Final = _bounded(KEY_BYTES_MAX)
kind_option: Final = _bounded(TASK_KIND_BYTES_MAX)
text_option: Final = _bounded(TEXT_BYTES_MAX)
reason_option: Final = text_option("--reason", required=True, meaning="Why; it is kept in the audit.")
