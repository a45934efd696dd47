"""The examples do what they promise, on both engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.support import ROOT

PATIENCE_S = 60
CITIES = ("Aarhus", "Bergen", "Cork", "Delft", "Évora")
URLS = ("memory:", "file:./box")


def run(example: str, url: str, cwd: Path) -> str:
    command = [sys.executable, "-X", "utf8", str(ROOT / "examples" / example), url]
    done = subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("url", URLS)
def test_the_fan_out_collects_every_result_and_prints_the_tree(url: str, tmp_path: Path) -> None:
    lines = [line.strip() for line in run("fan_out.py", url, tmp_path).splitlines()]
    for city in CITIES:
        answer = f"ok      {city} has {len(city)} letters  (generation 5, attempt 1)"
        assert lines.count(answer) == 1
        assert sum(f"resolved  'describe {city}'" in line for line in lines) == 1
    assert lines.count("partial looking it up  (generation 3, attempt 1)") == len(CITIES)
    assert f"tree of {len(CITIES)} tasks:" in lines


def test_the_fan_out_is_answered_from_the_cache_the_second_time(tmp_path: Path) -> None:
    first, second = (run("fan_out.py", "file:./box", tmp_path) for _ in range(2))
    assert "answered from the cache" not in first
    assert second.count("(answered from the cache)") == len(CITIES)
    assert second.count("replayed)") == len(CITIES)
    assert "looking it up" not in second


@pytest.mark.parametrize("url", URLS)
def test_the_pipeline_reads_its_answers_in_order(url: str, tmp_path: Path) -> None:
    assert run("pipeline.py", url, tmp_path).splitlines() == [f"answer {n:2}: {n * n}" for n in range(12)]


def test_an_example_says_which_store_it_cannot_open(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "pipeline.py"), "nowhere:"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.startswith("unknown_store: ")
