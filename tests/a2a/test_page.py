"""The page about the protocol is followed to the letter, command by command, in one shell."""

from __future__ import annotations

import re
from pathlib import Path

from covenant.a2a import fault
from tests.docs.shell import typed_beside_a_daemon
from tests.docs.support import names_in, page, rows


async def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    said = await typed_beside_a_daemon("a2a.md", tmp_path)
    assert '"parts":[{"text":"Dear all, "},{"text":"the brief."}]' in said
    assert re.findall(r"id: (\d+)\n", said) == ["2", "3", "4", "5", "6"]
    assert '"totalSize":1' in said


def test_the_table_of_errors_is_the_one_in_force() -> None:
    """What only agents or other bindings can cause is left out."""
    kinds = [kind for kind in vars(fault).values() if isinstance(kind, fault.Kind)]
    told = {names_in(row[3])[0]: (row[1], row[2]) for row in rows(page("a2a.md")) if len(row) == 4 and names_in(row[3])}
    left_out = {fault.BAD_AGENT.reason, fault.NO_EXTENDED_CARD.reason}
    assert set(told) == {kind.reason for kind in kinds} - left_out
    for kind in kinds:
        if kind.reason in told and kind is not fault.CONTENT_TYPE:
            jsonrpc, http = told[kind.reason]
            assert jsonrpc in ("", str(kind.jsonrpc)) and http in ("", str(kind.http)), kind
