"""The page about PostgreSQL is followed to the letter, on a server of its own, command by command, in one shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.support import blocks, page
from tests.postgres import started_server
from tests.postgres.servers import forget, over_tcp, programs


def test_every_command_of_the_page_runs() -> None:
    server = started_server()
    folder = Path(tempfile.mkdtemp(prefix="cov-"))  # short: sockets have to fit into it
    script = "\n".join(blocks(page("postgres.md"), "sh"))
    assert script.count("covenant ") > 25
    (grants,) = blocks(page("postgres.md"), "sql")
    (folder / "grants.sql").write_text(grants)
    with over_tcp(server) as port:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("COVENANT_", "PG"))},
            "PATH": os.pathsep.join((str(programs()), str(Path(sys.executable).parent), os.environ["PATH"])),
            "DB": f"127.0.0.1:{port}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(port),
            "PGUSER": "postgres",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"trap 'jobs -p | xargs -r kill; wait' EXIT\n{script}"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
        )
    told = "\n".join(file.read_text() for file in sorted(folder.glob("*.err")))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}\n{told[-3000:]}"
    assert done.stdout.count("is sound") == 3 and "(target)" in done.stdout
    assert done.stdout.count("alive") >= 4 and "sent before" in done.stdout
    shutil.rmtree(folder)
    forget(server)
