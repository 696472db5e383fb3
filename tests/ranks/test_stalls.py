"""Ranks wait for others that do not arrive: a warning names them, and no rank waits forever."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HOST = socket.gethostname()
LIMIT = 120  # seconds, for a machine that is busy with other things; a hang is what it catches
START = """
import os, signal, sys, time
import tarantella as tnt
rank = tnt.get_rank()
tnt.barrier()
"""


def run(folder: Path, text: str, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(START + text)
    command = [sys.executable, "-m", "tarantella.cli", "-n", str(ranks), "--no-gpu", *options]
    return subprocess.run(
        [*command, "--", str(script)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT,
    )


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "time.sleep(600)",
            "Rank 1 on host {host} has not arrived: it is at script.py:6. Ranks 0, 2 are in "
            "allreduce (script.py:7), rank 1 is not: all ranks must call it; ",
        ),
        (
            "sys.exit(0)",
            "Rank 1 on host {host} has not arrived: it is at the end of its script. Ranks 0, 2 are "
            "in allreduce (script.py:7), rank 1 is not: call it on all ranks; ",
        ),
        (
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "has not arrived: it is stopped by SIGSTOP: `kill ",
        ),
    ],
)
def test_run_that_does_not_move_on_is_ended(what: str, said: str, tmp_path: Path) -> None:
    text = f"if rank == 1: {what}\ntnt.allreduce(1.0)\n"
    result = run(tmp_path, text, "--stall-timeout", "1", ranks=3)
    assert result.returncode == 1
    *_, warning, failure = result.stderr.splitlines()
    assert warning.startswith("tarantella WARNING: Ranks 0, 2 have been waiting for ")
    assert "Rank 1 on host" in warning
    assert failure.startswith(f"tarantella: rank 1 on host {HOST} failed: others have waited for")
    assert said.format(host=HOST) in failure


STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize(
    "text",
    [
        f"if rank == 0: {STOP}\n",
        # What is registered first is called last: the other rank is gone by then.
        f"""
import atexit
from tarantella.runtime import ending
atexit.unregister(ending._finalize)
atexit.register(lambda: {STOP} if rank == 0 else None)
atexit.register(ending._finalize)
""",
    ],
    ids=["at its end", "after the other one"],
)
def test_a_rank_that_is_stopped_when_nobody_waits_for_it(text: str, tmp_path: Path) -> None:
    result = run(tmp_path, text, "--stall-timeout", "1")
    assert result.returncode == 1
    warning, failure = result.stderr.splitlines()
    assert f"Rank 0 on host {HOST} is stopped by SIGSTOP: `kill -CONT " in warning
    assert failure.startswith(f"tarantella: rank 0 on host {HOST} failed: it has been stopped for ")


def test_a_rank_that_skips_a_step_of_a_custom_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SHARED_CORES", "true")  # both wait for long
    text = """
import keras
import tensorflow as tf
weights = [keras.Variable(tf.ones(3))]
optimizer = tnt.keras.optimizers.Optimizer(keras.optimizers.SGD())
for step in range(3):
    if (rank, step) != (1, 1):
        optimizer.apply([tf.ones(3)], weights)
tnt.allreduce(1.0)
"""
    result = run(tmp_path, text, "--stall-timeout", "1")
    assert result.returncode == 1
    failure = result.stderr.splitlines()[-1]
    seconds = r"has been waiting for 1\d seconds, in a"
    assert re.search(
        f"Rank 0 {seconds} sum of gradients, in apply .script.py:13.; "
        f"Rank 1 {seconds} collective of the script, in allreduce .script.py:14.. "
        "So all ranks wait for each other",
        failure,
    )


def test_evaluate_on_the_master_alone(tmp_path: Path) -> None:
    """The others are at their end, or wait for a file that the master is to write."""
    text = """
import keras, numpy as np
x = np.ones((4, 3))
model = tnt.Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
if rank == 0:
    model.evaluate(x, x[:, :1])
elif rank == 2:
    model.save("model.keras")
"""
    result = run(tmp_path, text, "--stall-timeout", "1", ranks=3)
    assert result.returncode == 1
    failure = result.stderr.splitlines()[-1]
    assert "in a check that all ranks agree, in evaluate (script.py:12); " in failure
    assert "in a file that the master rank writes, in save (script.py:14). " in failure
    assert f"Rank 1 on host {HOST} has not arrived: it is at the end of its script; " in failure


def test_a_rank_that_comes_late_is_named_once_and_the_run_continues(tmp_path: Path) -> None:
    text = "if rank == 1: time.sleep(6)\nprint(tnt.allreduce(1.0))\n"
    result = run(tmp_path, text, "--stall-timeout", "1")
    assert (result.returncode, result.stdout) == (0, "2.0\n")
    assert result.stderr.count("tarantella WARNING: Rank 0 has been waiting for ") == 1
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("options", [["--stall-timeout", "0"], []])
def test_patience(options: list[str], tmp_path: Path) -> None:
    text = "if rank == 1: time.sleep(3)\ntnt.allreduce(1.0)\n"
    result = run(tmp_path, text, *options)
    assert (result.returncode, result.stderr) == (0, "")


def test_time_in_which_the_ranks_were_stopped_does_not_count(tmp_path: Path) -> None:
    """As by a scheduler that suspends a job."""
    text = """
import subprocess
me = os.getpid()
subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {me}; sleep 13; kill -CONT {me}"])
if rank == 1:
    time.sleep(2)
tnt.allreduce(1.0)
"""
    result = run(tmp_path, text, "--stall-timeout", "1")
    assert result.returncode == 0, result.stderr
    assert "failed" not in result.stderr


def test_a_rank_that_never_begins_to_communicate(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['PMI_RANK'] == '1': time.sleep(600)\nimport tarantella\n"
    )
    command = [
        sys.executable,
        "-m",
        "tarantella.cli",
        "-n",
        "2",
        "--no-gpu",
        "--stall-timeout",
        "1",
    ]
    result = subprocess.run(
        [*command, "--", str(script)], capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 1
    assert f"rank 1 on host {HOST} failed: others have waited for it" in result.stderr
    assert "in the start of communication" in result.stderr


def test_without_the_command(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(START + "if rank == 1: time.sleep(600)\ntnt.allreduce(1.0)\n")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    result = subprocess.run(
        [str(mpiexec), "-n", "2", sys.executable, str(script)],
        env={**os.environ, "TNT_STALL_TIMEOUT": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert result.returncode != 0
    assert (
        "Rank 0 has been waiting for 1 seconds, in a collective of the script, in all"
        in result.stderr
    )
    assert "ending the run" in result.stderr


def test_output_of_each_rank_is_kept(tmp_path: Path) -> None:
    text = """
print("first", rank, flush=True)
print("second", rank, file=sys.stderr, flush=True)
os.write(1, b"\\xff")
tnt.barrier()
if rank == 1:
    raise ValueError("bad")
tnt.barrier()
"""
    folder = tmp_path / "new" / "kept"
    result = run(tmp_path, text, "--output-dir", str(folder))
    assert result.returncode == 1
    assert "first 0" in result.stdout
    assert "second 0" in result.stderr
    assert "[rank 1] ValueError: bad" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    for rank in (0, 1):
        kept = (folder / f"rank-{rank}.txt").read_bytes()
        assert {b"first %d" % rank, b"second %d" % rank} <= set(
            kept.replace(b"\xff", b"").split(b"\n")
        )
        assert kept.count(b"\xff") == 1
        assert b"\x1e" not in kept
        assert (b"ValueError: bad" in kept) == (rank == 1)


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(tmp_path, "", "--output-dir", str(tmp_path / "file"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"tarantella: --output-dir {tmp_path}/file cannot be used (")
    assert result.stderr.count("\n") == 1
