"""What a newcomer types first: the sessions of the readme and of the page about the command line, with a daemon."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.cli.support import serving
from tests.docs.shell import environment_without, typed
from tests.docs.support import ROOT, blocks, page, title

TYPED = re.compile(r"^(?:COVENANT_TOKEN=\S+ )?(?:covenant|curl) .*$", re.MULTILINE)
LEARNED = {  # from what is said
    "TOKEN": re.compile(r"^token +(\S+)", re.MULTILINE),
    "TASK_ID": re.compile(r"^sent (\S+)", re.MULTILINE),
    "LEASE": re.compile(r"^lease +(\S+)", re.MULTILINE),
}


@pytest.mark.parametrize(
    ("path", "count", "said_last"),
    [(ROOT / "README.md", 5, '"name":"writer"'), (page("cli.md"), 7, "It is over: answered")],
    ids=lambda given: title(given) if isinstance(given, Path) else "",
)
async def test_a_first_session_goes_as_it_is_printed(path: Path, count: int, said_last: str) -> None:
    lines = [line.group() for block in blocks(path, "") for line in TYPED.finditer(block)]
    lines = [line for line in lines if not line.startswith("covenant serve")]
    assert len(lines) == count
    home = Path(tempfile.mkdtemp(prefix="cov-"))  # short: sockets have to fit into it
    environment = {**environment_without("COVENANT_"), "COVENANT_HOME": str(home)}
    learned: dict[str, str] = {}
    said = ""
    with serving(home) as (_, where):
        for line in lines:
            line = line.replace("http://127.0.0.1:8421", where["http"]).replace("wait_ms=20000", "wait_ms=1")
            line = line.replace("$TOKEN", "TOKEN").replace("cov_…", "TOKEN").replace("curl ", "curl --fail -s ")
            for name, value in learned.items():
                line = re.sub(rf"\b{name}\b", value, line)
            said = await typed(line, home, environment)
            learned.update({name: found[1] for name, pattern in LEARNED.items() if (found := pattern.search(said))})
    assert said_last in said
