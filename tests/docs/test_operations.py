"""The page for operators runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.docs.shell import environment_without, typed
from tests.docs.support import blocks, page


async def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    script = "\n".join(blocks(page("operations.md"), "sh"))
    assert script.count("covenant ") > 25
    home = tempfile.mkdtemp(prefix="cov-")
    said = await typed(script, tmp_path, {**environment_without("COVENANT_"), "COVENANT_HOME": home})
    assert "is sound" in said
