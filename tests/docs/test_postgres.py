"""The page about PostgreSQL runs, on a server of its own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.docs.shell import environment_without, typed
from tests.docs.support import blocks, page
from tests.postgres import started_server
from tests.postgres.servers import forget, over_tcp, programs


async def test_every_command_of_the_page_runs() -> None:
    server = started_server()
    folder = Path(tempfile.mkdtemp(prefix="cov-"))  # short: sockets have to fit into it
    script = "\n".join(blocks(page("postgres.md"), "sh"))
    assert script.count("covenant ") > 25
    (grants,) = blocks(page("postgres.md"), "sql")
    (folder / "grants.sql").write_text(grants)
    with over_tcp(server) as port:
        environment = {
            **environment_without("COVENANT_", "PG"),
            "DB": f"127.0.0.1:{port}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(port),
            "PGUSER": "postgres",
        }
        try:
            said = await typed(script, folder, environment, [programs()])
        except AssertionError as failed:
            told = "\n".join(file.read_text() for file in sorted(folder.glob("*.err")))
            raise AssertionError(f"{failed}\n{told[-3000:]}") from failed
    assert said.count("is sound") == 3 and "(target)" in said
    assert said.count("alive") >= 4 and "sent before" in said
    shutil.rmtree(folder)
    forget(server)
