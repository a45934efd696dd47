"""The pages, and the parts of them that can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_CODE: Final = re.compile(r"`([^`]+)`")


def page(name: str) -> Path:
    return ROOT / "docs" / name


def title(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> Iterator[str]:
    """The code of each fenced block, moved down to the line where it stands, so that a failure names the right one."""
    text = path.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        if found[1] == language:
            yield "\n" * text.count("\n", 0, found.start(2)) + found[2]


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def rows(path: Path) -> list[list[str]]:
    """The cells of each row of each table."""
    lines = [line for line in prose(path).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names_in(cell: str) -> list[str]:
    """What a cell has in code."""
    return _CODE.findall(cell)


def links(path: Path) -> list[str]:
    return _LINK.findall(prose(path))


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names_of_tests() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)}
