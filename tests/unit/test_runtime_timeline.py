"""What a timeline records, and the file that it becomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tarantella.runtime import timeline
from tarantella.runtime.timeline import STEPS, Timeline

SERIAL = """
from tarantella.runtime import world
from tarantella.runtime.timeline import now, timeline
import os
os.chdir("/")
begin = now()
timeline().phase("forward")
timeline().add("bucket 1", "reducing", begin, begin + 2000, bytes=12)
"""


def run(path: str, folder: Path, script: str = SERIAL) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "TNT_TIMELINE": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_phases_follow_each_other() -> None:
    recorded = Timeline()
    recorded.phase("forward")
    recorded.phase("backward")
    first, second = recorded.spans
    assert (first.lane, first.name, second.name) == (STEPS, "forward", "backward")
    assert first.begin <= first.end == second.begin <= second.end


def test_a_long_run_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MOST_SPANS", 2)
    recorded = Timeline()
    recorded.phase("one")
    recorded.add("lane", "two", 0, 1)
    assert not recorded.is_full
    recorded.phase("three")
    assert recorded.is_full
    assert [span.name for span in recorded.spans] == ["one", "two"]


def test_file_of_a_serial_run(tmp_path: Path) -> None:
    result = run("trace.json", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert set(lanes.values()) == {STEPS, "bucket 1"}
    assert lanes[spans["reducing"]["tid"]] == "bucket 1"
    assert spans["reducing"]["dur"] == 2
    assert spans["reducing"]["args"] == {"bytes": 12}
    assert spans["forward"]["ts"] + spans["forward"]["dur"] >= spans["reducing"]["ts"]


def test_nothing_is_written_where_nothing_was_recorded(tmp_path: Path) -> None:
    script = "from tarantella.runtime import world"
    assert run("trace.json", tmp_path, script).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [("missing/trace.json", "No such file or directory"), (".", "it is not a file")],
)
def test_a_file_that_cannot_be_written_is_found_out_at_once(
    tmp_path: Path, path: str, problem: str
) -> None:
    result = run(path, tmp_path, SERIAL.replace("begin = now()", "print('trained')"))
    assert result.returncode != 0
    assert result.stdout == ""
    assert "The timeline cannot be written to" in result.stderr
    assert problem in result.stderr
