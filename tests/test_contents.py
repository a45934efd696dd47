"""The table of contents: what `import covenant` offers, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import covenant


def _imported_for_types() -> set[tuple[str, str]]:
    tree = ast.parse(Path(covenant.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    return {
        (str(statement.module), name.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }


def test_types_and_programs_find_the_same_names() -> None:
    """mypy reads the imports, a program the table: they must not part."""
    assert {(module, name) for name, module in covenant._MODULE_OF.items()} == _imported_for_types()
    assert sorted(covenant._MODULE_OF) == sorted(covenant.__all__)


def test_every_name_is_there_and_listed() -> None:
    for name in covenant.__all__:
        assert getattr(getattr(covenant, name), "__name__", name) == name
    assert set(covenant.__all__) <= set(dir(covenant))
    assert dir(covenant) == sorted(dir(covenant))


def test_what_is_not_there_is_told_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'covenant' has no attribute 'Post'"):
        covenant.Post  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    assert covenant.__version__ == version("covenant-exchange")


@pytest.mark.parametrize("name", ["InvalidInput", "ManualClock", "Release", "StoreError", "Thresholds", "read_block"])
def test_what_a_program_needs_beside_the_mailbox_is_listed(name: str) -> None:
    assert name in covenant.__all__


def _python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_star_brings_every_name() -> None:
    said = _python("from covenant import *; import covenant; print(all(n in globals() for n in covenant.__all__))")
    assert said == "True"


def test_the_package_alone_imports_nothing_of_itself() -> None:
    said = _python("import sys, covenant; print([name for name in sys.modules if name.startswith('covenant.')])")
    assert said == "[]"
