"""The kinds of audit rows: a closed list, by which they can be asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import covenant.rules
from covenant.rules.audit import ROW_KINDS

RULES = Path(covenant.rules.__file__).parent


def _written() -> set[str]:
    """The kinds of the rows that the rules write."""
    kinds: set[str] = set()
    for file in RULES.rglob("*.py"):
        tree = ast.parse(file.read_text())
        named = {
            ast.unparse(node.target): ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "AuditRow" and call.args:
                kind = ast.unparse(call.args[0])
                kinds.add(named.get(kind, kind).strip("'"))
    return {kind for kind in kinds if kind.isidentifier()}


def test_every_row_that_the_rules_write_can_be_asked_for() -> None:
    written = _written()
    assert len(written) >= 14
    assert written <= ROW_KINDS


def test_every_kind_stands_on_the_page() -> None:
    """Those that tell of a change are named there as the events of a task."""
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    told = {kind for kind in ROW_KINDS if f"`{kind}`" in page}
    assert _written() - told == set()
