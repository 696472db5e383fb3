"""`tnt.run`: real ranks, started from this process, or from a script of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tarantella as tnt
from tarantella.errors import InputError, RankError, RankTraceback

LIMIT = 120  # seconds, for a machine that is busy with other things


@pytest.fixture(autouse=True)
def serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the shard that runs these tests."""
    monkeypatch.delenv("TNT_TERMINAL", raising=False)


def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return tnt.run(function, args, no_gpu=True, **options)


def test_closure_runs_on_ranks_and_the_master_returns(capsys: pytest.CaptureFixture[str]) -> None:
    here = [3]

    def add(number: int) -> tuple[int, int, int]:
        print(f"rank {tnt.get_rank()} prints ü")
        return tnt.get_rank(), tnt.get_size(), tnt.allreduce(here[0] + number)

    assert run(add, 4) == (0, 2, 14)
    assert capsys.readouterr().out == "rank 0 prints ü\n"
    assert run(add, 4, ranks=3, all_results=True) == [(rank, 3, 21) for rank in range(3)]


def test_large_data_go_both_ways_from_a_thread_and_with_one_rank() -> None:
    data = os.urandom(1 << 20) * 3
    results = []
    thread = threading.Thread(
        target=lambda: results.append(run(lambda: (tnt.get_size(), data[::-1]), ranks=1))
    )
    thread.start()
    thread.join(LIMIT)
    assert results == [(1, data[::-1])]


def test_options_and_variables_reach_the_ranks() -> None:
    value = run(lambda: os.environ["VALUE"], x={"VALUE": "a $b"}, log_level="INFO")
    assert value == "a $b"


def test_exception_of_a_rank_is_raised_here(capsys: pytest.CaptureFixture[str]) -> None:
    class UnluckyError(ValueError):
        pass

    def fail() -> None:
        if tnt.get_rank() == 1:
            raise UnluckyError("thirteen")
        tnt.barrier()

    with pytest.raises(UnluckyError, match="^thirteen$") as raised:
        run(fail)
    assert isinstance(raised.value.__cause__, RankTraceback)
    assert str(raised.value.__cause__).startswith("rank 1 on host ")
    assert 'raise UnluckyError("thirteen")' in str(raised.value.__cause__)
    shown = capsys.readouterr().err
    assert "tarantella: rank 1 on host " in shown
    assert "Traceback" not in shown  # it is in the exception


def test_exception_that_cannot_be_pickled_is_one_of_ours() -> None:
    class OddError(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    def fail() -> None:
        raise OddError("a", "b")

    with pytest.raises(
        RankError, match=r"rank 0 on host .* cannot be pickled: .*OddError: ab"
    ) as raised:
        run(fail, ranks=1)
    assert 'raise OddError("a", "b")' in str(raised.value.__cause__)


def test_result_that_cannot_be_pickled_is_explained() -> None:
    with pytest.raises(RankError, match="function returns, a generator, cannot be pickled"):
        run(lambda: (number for number in range(3)), ranks=1)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "failed: it was killed by signal 9"),
        (lambda: sys.exit(3), r"failed: sys.exit\(3\) \(exit status 3\)"),
        (lambda: sys.exit(), "^Rank 0 has exited before the function returned"),
    ],
)
def test_rank_that_ends_is_named(end: Callable[[], None], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run(end, ranks=1)


def test_result_of_every_rank_is_one_of_every_rank() -> None:
    with pytest.raises(RankError, match="Rank 1 has exited before the function returned"):
        run(lambda: sys.exit() if tnt.get_rank() == 1 else 0, all_results=True)


def test_run_inside_of_a_run_is_refused() -> None:
    with pytest.raises(InputError, match="this process belongs to a run already"):
        run(lambda: tnt.run(int), ranks=1)


def test_bad_input_of_the_command_is_raised_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="^output_dir /dev/null/x cannot be used"):
        run(int, output_dir="/dev/null/x")
    assert capsys.readouterr().err == ""


def test_a_warning_of_the_command_has_keywords_for_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tnt.run(int, ranks=1)
    shown = capsys.readouterr().err
    assert "Use no_gpu=True to run on the CPU without this warning." in shown
    assert "Use gpu=True to make this an error." in shown


def test_a_report_has_the_name_of_the_function(tmp_path: Path) -> None:
    pytest.importorskip("plotly")

    def train_a_little() -> None:
        pass

    run(train_a_little, ranks=1, report=tmp_path / "run.html")
    assert "<h1>train_a_little on 1 rank</h1>" in (tmp_path / "run.html").read_text()


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("[0-9]*")]


def test_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    def wait() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(LIMIT)

    def interrupt() -> None:
        wait_until(lambda: len(pids_in(tmp_path)) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(wait)
    assert not any(map(is_running, pids_in(tmp_path)))


def test_ranks_end_with_the_process_that_called(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("""
import os, pathlib, time
import tarantella as tnt
def wait():
    pathlib.Path(str(os.getpid())).touch()
    time.sleep(600)
tnt.run(wait, no_gpu=True)
""")
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)
    wait_until(lambda: len(pids_in(tmp_path)) == 2)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, pids_in(tmp_path))))


SCRIPT = """
import neighbour
import tarantella as tnt

def total(op):
    return tnt.allreduce(neighbour.NUMBER, op=op)

print(tnt.run(total, ["sum"], no_gpu=True))
tnt.run(total, ["most"], ranks=1, no_gpu=True)
"""


def test_script_needs_no_guard_and_shows_where_a_rank_failed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NUMBER = 5\n")
    (temporary := tmp_path / "temporary").mkdir()
    result = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert result.stdout == "10\n"
    assert result.returncode == 2
    on_rank, _, here = result.stderr.partition("The above exception was the direct cause of")
    assert "rank 0 on host " in on_rank
    assert "return tnt.allreduce(neighbour.NUMBER, op=op)" in on_rank
    assert 'tnt.run(total, ["most"]' in here
    assert "src/tarantella" not in result.stderr  # no frame of ours
    assert list(temporary.iterdir()) == []


def test_a_python_shell_continues_after_a_mistake() -> None:
    lines = ["import tarantella as tnt", "tnt.run(print, strikt=True)", "print('still here')"]
    shell = subprocess.run(
        [sys.executable, "-i"],
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Did you mean strict?" in shell.stderr
    assert (shell.returncode, shell.stdout) == (0, "still here\n")
