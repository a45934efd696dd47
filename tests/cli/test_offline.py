"""What reads the folder itself: the audit and the journal, while a daemon runs on it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Served
from tests.cli.support import Client, run, serving


def test_the_audit_is_read_back(covenant: Client, served: Served) -> None:
    task_id = served.stale.kept
    rows = covenant.json("audit", "recent", "--task", task_id)["rows"]
    assert [row["kind"] for row in rows] == ["leased", "sent"]
    assert rows[1]["actor"] == "alice@lab"
    said = covenant.text("audit", "recent", "-n", "5", "--kind", "peer_enrolled", "--actor", "operator")
    assert "bob@local" in said and "peer_enrolled" in said and task_id not in said


def test_the_record_is_verified_and_exported_beside_a_running_daemon(covenant: Client, served: Served) -> None:
    assert f"{served.home}/data is sound" in covenant.text("audit", "verify")
    found = covenant.json("audit", "verify", "--store", f"file:{served.home}/data")
    assert found["kind"] == "audit_integrity" and found["valid"] and found["report"]["damage"] == []

    lines = [json.loads(line) for line in covenant.text("audit", "export").splitlines()]
    assert [row["seq"] for row in lines] == sorted(row["seq"] for row in lines)
    assert {"sent", "leased", "peer_enrolled"} <= {row["kind"] for row in lines}
    exported = covenant.json("audit", "export", "--after", "3")
    assert exported["kind"] == "audit_export"
    assert exported["rows"] == [row for row in lines if row["seq"] > 3]


def test_a_folder_that_is_not_there_is_not_called_damaged(tmp_path: Path) -> None:
    nowhere = Client(tmp_path)
    for command in (("audit", "verify"), ("journal", "verify"), ("audit", "export")):
        done = nowhere(*command, "--json", code=1)
        assert done.json["code"] == "store_unavailable"
        assert (
            done.err == f"error: there is no journal in {tmp_path}/data; --store says where it is (store_unavailable)\n"
        )


def test_a_home_whose_store_is_elsewhere_says_so(home: Path) -> None:
    with serving(home, "--store", "memory:"):
        pass
    for command in (("audit", "verify"), ("journal", "verify"), ("audit", "export")):
        (line,) = Client(home)(*command, code=1).err.splitlines()
        assert line.startswith(f"error: there is no journal in {home}/data: the daemon of this home")
        assert "--store" in line and line.endswith("(store_unavailable)")


def test_a_folder_that_is_no_journal_is_not_called_sound(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for command in (("audit", "verify"), ("journal", "verify"), ("audit", "export")):
        refused = run(*command, "--store", f"file:{tmp_path}", "--json")
        assert (refused.code, refused.json["code"]) == (1, "store_unavailable")
        assert f"there is no journal in {tmp_path}" in refused.json["message"]
    for dry_run in ((), ("--dry-run",)):
        refused = run("journal", "repair", *dry_run, "--store", f"file:{tmp_path}", "--json")
        assert (refused.code, refused.json["code"]) == (1, "repair_refused")
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_what_is_no_key_is_not_called_damage(covenant: Client) -> None:
    for command in (("audit", "verify"), ("journal", "verify")):
        (line,) = covenant(*command, "--realm", "nobody", code=2).err.splitlines()
        assert "'nobody' is no key" in line and line.endswith("(bad_setting)")


def test_an_export_that_lacks_something_is_not_told_as_whole(covenant: Client, tmp_path: Path) -> None:
    covenant("journal", "backup", str(tmp_path / "backup"))
    whole = run("audit", "export", "--store", f"file:{tmp_path}/backup")
    (segment,) = (tmp_path / "backup").glob("journal-*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join([*lines[:3], b"#" + lines[3][1:], *lines[4:]]))
    cut = run("audit", "export", "--store", f"file:{tmp_path}/backup")
    assert (cut.code, whole.code) == (1, 0)
    assert whole.out.startswith(cut.out) and "(store_damaged)" in cut.err
    assert run("audit", "export", "--store", f"file:{tmp_path}/backup", "--json").json["code"] == "store_damaged"


def test_a_journal_is_backed_up_damaged_and_mended(covenant: Client, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert f"to {copy}: 1 file" in covenant.text("journal", "backup", str(copy))
    assert covenant.json("journal", "backup", str(tmp_path / "other"))["report"]["files"] == 1

    data = tmp_path / "home" / "data"
    elsewhere = Client(tmp_path / "home")
    assert f"restored {copy} to {data}" in elsewhere.text("journal", "restore", str(copy))
    restored = run("journal", "restore", str(copy), "--store", f"file:{tmp_path}/again", "--json")
    assert restored.json["kind"] == "journal_restore"
    assert elsewhere.refused("journal", "restore", str(copy)) == "backup_failed"
    assert "nothing to repair" in elsewhere.text("journal", "repair")

    segment = next(data.glob("journal-*.jsonl"))
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[-2] = lines[-2].replace(b'"seq"', b'"sEq"')
    segment.write_bytes(b"".join(lines))
    damaged = elsewhere.json("journal", "verify", code=1)
    assert not damaged["valid"] and damaged["report"]["damage"]

    before = segment.read_bytes()
    preview = elsewhere.text("journal", "repair", "--dry-run")
    assert "would be cut off" in preview and segment.read_bytes() == before
    report = elsewhere.json("journal", "repair")["report"]
    assert report["done"] and (data / report["moved_to"]).is_dir()
    assert "is sound" in elsewhere.text("journal", "verify")
