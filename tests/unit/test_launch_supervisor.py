"""What a supervisor keeps of a rank's output, and how it knows that its host is cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tarantella.cli.rank_prefix import RankPrefix
from tarantella.launch import entry
from tarantella.launch.lost_connection import is_cut_off
from tarantella.launch.output_tail import OutputTail
from tarantella.runtime.announce import PRINTED, Announcement, announce, parse, prints


def test_everything_is_kept_if_it_is_little() -> None:
    words = OutputTail()
    words.add(1, b"out\n")
    words.add(2, b"err")
    assert words.take() == [(1, b"out\n"), (2, b"err")]
    assert words.take() == []


@pytest.mark.parametrize("size", [10, 3000, 100_000])
def test_of_much_the_last_lines_are_kept(size: int) -> None:
    words = OutputTail()
    text = b"".join(b"line %d\n" % number for number in range(20_000))
    for start in range(0, len(text), size):
        words.add(1, text[start : start + size])
    kept = b"".join(piece for _, piece in words.take())
    assert text.endswith(kept)
    assert kept.startswith(b"line ")
    assert 1000 < len(kept) < 20_000


def test_a_line_without_end() -> None:
    words = OutputTail()
    words.add(1, b"x" * 1_000_000)
    [(_, kept)] = words.take()
    assert 1000 < len(kept) < 20_000


def test_what_is_printed_arrives_in_marked_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TNT_RUN_ID", "run")
    text = bytes(range(256)) * 40 + b"\nlast"
    with (tmp_path / "news").open("wb") as file:
        for each in prints(PRINTED, 3, "node", 1, text):
            announce(each, file.fileno())
    lines = (tmp_path / "news").read_bytes().splitlines(keepends=True)
    assert max(map(len, lines)) <= 4096  # what a pipe takes in one piece
    prefixed = RankPrefix(name_hosts=True)
    shown = b"".join(prefixed.add(parse(line, "run")) for line in lines) + prefixed.finish(1)
    expected = [b"[rank 3 on node] " + line + b"\n" for line in text.split(b"\n")]
    assert shown == b"".join(expected)


def test_lines_of_ranks_are_put_together_and_noise_is_left_out() -> None:
    def piece(rank: int, text: bytes) -> Announcement:
        [news] = prints(PRINTED, rank, "node", 2, text)
        return news

    prefixed = RankPrefix(name_hosts=False, hidden=[b"noise"])
    assert prefixed.add(piece(0, b"half ")) == b""
    assert prefixed.add(piece(1, b"noise of TensorFlow\nwhole\n")) == b"[rank 1] whole\n"
    assert prefixed.add(piece(0, b"line\n")) == b"[rank 0] half line\n"


def test_a_longer_cause_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TNT_RUN_ID", "run")
    with (tmp_path / "news").open("wb") as file:
        announce(Announcement("failed", 0, "node", 1, cause="ä" * 5000), file.fileno())
    line = (tmp_path / "news").read_bytes()
    assert len(line) <= 4096
    assert json.loads(line.partition(b"run:")[2])["cause"] == "ä" * 500


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode
   0: 01004D0A:9C40 02004D0A:1F90 01 00000010:00000000 01:00000019 0000000{repeats} 0 0 {inode} 1
"""


@pytest.mark.parametrize(
    ("repeats", "inode", "cut_off"), [("0", "77", False), ("9", "77", True), ("9", "78", False)]
)
def test_connection_that_nobody_confirms(
    repeats: str, inode: str, cut_off: bool, tmp_path: Path
) -> None:
    (tmp_path / "5" / "fd").mkdir(parents=True)
    (tmp_path / "5" / "fd" / "3").symlink_to("socket:[77]")
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TABLE.format(repeats=repeats, inode=inode))
    assert is_cut_off(5, tmp_path) == cut_off


def test_where_nobody_can_tell(tmp_path: Path) -> None:
    assert not is_cut_off(5, tmp_path)


SLOW_SUPERVISOR = """
import os, runpy, sys, time
def fork(fork=os.fork):
    pid = fork()
    time.sleep(0.5 if pid else 0)
    return pid
os.fork = fork
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("end", ["exit 3", "kill -TERM $PPID; wait"])
@pytest.mark.parametrize("options", [[], ["-c", SLOW_SUPERVISOR]], ids=["quick", "slow"])
def test_what_a_rank_has_started_ends_with_it(end: str, options: list[str], tmp_path: Path) -> None:
    """Also where no command comes to look after it, and no scheduler does."""
    program = ["sh", "-c", f"sleep 600 & echo $! > pid; {end}"]
    command = [sys.executable, *options, entry.__file__, "launch.supervisor", *program]
    environ = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2"}
    result = subprocess.run(command, cwd=tmp_path, env=environ, timeout=60)
    assert result.returncode != 0
    started = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    deadline = time.monotonic() + 10
    while started.exists() and started.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not started.exists() or not started.read_bytes()  # gone, or about to be
