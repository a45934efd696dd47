"""The examples run, every name has its row, and every link leads somewhere."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from covenant import CovenantError, Limits, Outcome, RetryPolicy, SkipReason, TaskState
from covenant.model import error
from covenant.model.event import Event
from tests.docs.support import PAGES, ROOT, anchors, blocks, links, names_in, page, prose, rows, title

NOUNS = (
    "task",
    "lease",
    "idempotency",
    "repair-and-retry",
    "journal",
    "errors",
    "coverage",
    "generation",
    "a2a_client",
    "agents",
)


@pytest.mark.parametrize("path", [path for path in PAGES if any(blocks(path, "python"))], ids=title)
async def test_the_examples_of_a_page_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in blocks(path, "python"):
        code = compile(block, title(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        running = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            await running


@pytest.mark.parametrize("noun", NOUNS)
def test_a_page_opens_with_an_example_that_runs(noun: str) -> None:
    text = page(f"{noun}.md").read_text(encoding="utf-8")
    opening = text.partition("\n## ")[0]
    assert "```python\n" in opening


def error_codes() -> list[str]:
    kinds = [kind for kind in vars(error).values() if isinstance(kind, type) and issubclass(kind, CovenantError)]
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes)), "two errors share a code"
    return codes


def event_types() -> list[str]:
    return [str(kind.__struct_config__.tag) for kind in Event.__args__]


# the page, the column, and what must stand there
NAMED: dict[str, tuple[str, int, list[str]]] = {
    "state": ("task.md", 0, [state.value for state in TaskState]),
    "outcome": ("task.md", 0, [outcome.value for outcome in Outcome]),
    "limit": ("task.md", 0, list(Limits.__struct_fields__)),
    "skip reason": ("repair-and-retry.md", 1, [reason.value for reason in SkipReason]),
    "policy field": ("repair-and-retry.md", 0, list(RetryPolicy.__struct_fields__)),
    "error code": ("errors.md", 0, error_codes()),
    "event type": ("journal.md", 0, event_types()),
}


@pytest.mark.parametrize("kind", NAMED)
def test_every_name_has_its_row(kind: str) -> None:
    name, column, wanted = NAMED[kind]
    listed = [word for row in rows(page(name)) for word in names_in(row[column])]
    assert wanted
    assert [word for word in wanted if word not in listed] == []


def test_no_row_names_an_error_that_is_not_there() -> None:
    listed = [word for row in rows(page("errors.md")) for word in names_in(row[0])]
    assert sorted(listed) == sorted(error_codes())


@pytest.mark.parametrize(
    ("name", "defaults"),
    [("task.md", Limits()), ("repair-and-retry.md", RetryPolicy())],
    ids=["limits", "policy"],
)
def test_a_default_is_the_one_in_the_table(name: str, defaults: Limits | RetryPolicy) -> None:
    fields = defaults.__struct_fields__
    told = {names_in(row[0])[0]: row[1] for row in rows(page(name)) if names_in(row[0]) and len(row) == 3}
    shown = {field: told[field].strip("`").split(" ")[0] for field in fields}
    assert shown == {field: str(getattr(defaults, field)) for field in fields}


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_every_relative_link_resolves(path: Path) -> None:
    for link in links(path):
        if link.startswith(("https:", "http:")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT) and target.exists(), f"{title(path)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{title(path)} links to {link}"


def test_the_readme_leads_to_every_page() -> None:
    led_to = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    assert {title(path) for path in PAGES if path.name != "README.md"} <= led_to


def test_the_readme_starts_with_what_it_is_and_two_commands() -> None:
    what, commands, first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[:3]
    assert len(what.partition("\n\n")[2].strip().splitlines()) == 5
    assert "make run" in commands and "make test" in commands
    assert "```python" in first


@pytest.mark.parametrize("path", PAGES, ids=title)
def test_a_page_has_no_table_out_of_shape(path: Path) -> None:
    width = 0
    for line in prose(path).splitlines():
        cells = len(line.replace("\\|", "").split("|")) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, f"{title(path)}: {line}"
        width = cells


def test_the_page_about_ipc_has_every_verb() -> None:
    from covenant.serve.places import PLACES

    told = {row[0].strip("`"): row[1].strip("`") for row in rows(page("ipc.md")) if row[0].startswith("`")}
    assert told == {str(place.request.__struct_config__.tag): f"{place.method} {place.path}" for place in PLACES}


def test_the_page_about_trust_has_every_action() -> None:
    from covenant.rules.grant import ACTIONS, PEER_ACTIONS

    told = {word.partition("<")[0] for row in rows(page("trust.md")) for word in names_in(row[0])}
    assert {*ACTIONS, *PEER_ACTIONS} <= told
