"""The page for operators is followed to the letter, command by command, in one shell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.support import blocks, page


def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    script = "\n".join(blocks(page("operations.md"), "sh"))
    assert script.count("covenant ") > 25
    home = tempfile.mkdtemp(prefix="cov-")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COVENANT_")},
        "COVENANT_HOME": home,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'jobs -p | xargs -r kill' EXIT\n{script}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "is sound" in done.stdout
