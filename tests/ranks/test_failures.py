"""A rank that fails ends the run: soon, with one message, and with nothing left behind.

The real command starts real ranks here. While one of them fails, the others wait for it in a
collective, as they would in training.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

LIMIT = 120  # seconds, for a machine that is busy with other things; a hang is what it catches
TWO = (sys.executable, "-m", "tarantella.cli", "-n", "2", "--no-gpu")
COMMAND = (*TWO, "--")
ALL_OUTPUT = (*TWO, "--output-on-all-devices", "--")
READY = ["[rank 0] ready\n", "[rank 1] ready\n"]
START = """
import os, signal, sys, threading, time
from tarantella.runtime import world
rank = world.get_rank()
barrier = world.communicator("control").Barrier
"""


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """An environment with a variable that no process may have after the run."""
    mark = f"TEST_RUN={uuid.uuid4()}"
    yield {**os.environ, "TEST_RUN": mark.partition("=")[2]}
    assert processes_with(mark) == []


@pytest.fixture
def plain_environ() -> Iterator[dict[str, str]]:
    """The same for plain mpiexec, which does not wait for the end of what it has killed."""
    mark = f"TEST_RUN={uuid.uuid4()}"
    yield {**os.environ, "TEST_RUN": mark.partition("=")[2]}
    wait_for_end(mark)
    assert processes_with(mark) == []


def processes_with(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_for_end(mark: str) -> None:
    deadline = time.monotonic() + 30
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.1)


def write(folder: Path, text: str, start: str = START) -> str:
    path = folder / "script.py"
    path.write_text(start + text)
    return str(path)


def run(
    command: tuple[str, ...], script: str, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, script], env=environ, capture_output=True, text=True, timeout=LIMIT
    )


@pytest.mark.parametrize(
    ("failure", "status", "cause"),
    [
        ("raise ValueError('bad value')", 1, "ValueError: bad value (exit status 1)"),
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("raise SystemExit(3)", 3, "sys.exit(3)"),
        ("exit(3)", 3, "sys.exit(3)"),
        ("sys.exit('sorry')", 1, "sorry (exit status 1)"),
        ("os._exit(3)", 3, "exit status 3"),
        ("os._exit(0)", 1, "before its script reached the end"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
        ("os.abort()", 134, "SIGABRT"),
    ],
)
def test_rank_that_fails(
    failure: str, status: int, cause: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    script = write(tmp_path, f"barrier()\nif rank == 1:\n    {failure}\nbarrier()\n")
    result = run(COMMAND, script, environ)
    assert result.returncode == status
    messages = [line for line in result.stderr.splitlines() if line.startswith("tarantella: ")]
    assert len(messages) == 1
    assert f"rank 1 on host {socket.gethostname()} failed: " in messages[0]
    assert cause in messages[0]
    assert re.search(r"; the other ranks were ended \(\d{4}-\d\d-\d\d [\d:]{8}\)\.$", messages[0])
    assert result.stderr.count("Traceback") == ("raise ValueError" in failure)
    for noise in ("BAD TERMINATION", "MPI_Abort(", "mpiexec@", "\x1e"):
        assert noise not in result.stdout + result.stderr


STACK = """F0000 00:00:1795012490.827499 env.cc:84] Check failed: ret == 0 (11 vs. 0)
*** Check failure stack trace: ***
    @     0x7fb587ace564  absl::lts_20250814::log_internal::LogMessage::SendToLog()
    @     0x7fb587742949  tsl::(anonymous namespace)::PosixEnv::StartThread()
"""


@pytest.mark.parametrize(
    ("failure", "status", "cause"),
    [
        ("bytearray(1 << 40)", 1, "memory ran out, as {}: MemoryError (exit status 1)"),
        (
            f"os.write(2, {STACK.encode()!r}); os.abort()",
            134,
            "it was killed by signal 6 (SIGABRT: probably because memory ran out, as {})",
        ),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_memory(
    failure: str, status: int, cause: str, rank: int, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Under `ulimit -v`: our message is the last, and TensorFlow's C++ functions are not shown."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, time\nif os.environ['PMI_RANK'] == '{rank}':\n    {failure}\ntime.sleep(60)\n"
    )
    limited = ["bash", "-c", 'ulimit -v 4000000; exec "$@"', "bash", *COMMAND]
    result = run(limited, str(script), environ)
    assert result.returncode == status
    *before, last = result.stderr.splitlines()
    limit = "`ulimit -v` allows each process 4.1 GB"
    assert f"rank {rank} on host {socket.gethostname()} failed: {cause.format(limit)}" in last
    assert any("Check failed: " in line or "bytearray(" in line for line in before)
    assert "SendToLog" not in result.stderr
    assert "stack trace" not in result.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_aborts(rank: int, tmp_path: Path, environ: dict[str, str]) -> None:
    """The launcher may kill what would tell us who it was, if it is not the master rank."""
    text = f"barrier()\nif rank == {rank}:\n    world.communicator('losses').Abort(7)\nbarrier()\n"
    result = run(COMMAND, write(tmp_path, text), environ)
    assert result.returncode == 7
    known = f"rank {rank} on host {socket.gethostname()} failed: it called MPI_Abort"
    unknown = "the run failed: mpiexec ended all ranks" if rank else known
    assert known in result.stderr or unknown in result.stderr
    assert result.stderr.count("\n") == 1
    assert "MPI_Abort(" not in result.stdout + result.stderr


def test_killed_supervisor(tmp_path: Path, environ: dict[str, str]) -> None:
    text = "if rank == 1:\n    os.kill(os.getppid(), signal.SIGKILL)\nbarrier()\n"
    result = run(COMMAND, write(tmp_path, text), environ)
    assert result.returncode == 137
    assert f"rank on host {socket.gethostname()} failed: " in result.stderr
    assert result.stdout == ""


def test_traceback_shows_the_script_only(tmp_path: Path, environ: dict[str, str]) -> None:
    script = write(
        tmp_path, "def f():\n    raise ValueError('bad')\n\nif rank == 1:\n    f()\nbarrier()\n"
    )
    lines = run(COMMAND, script, environ).stderr.splitlines()
    places = [line for line in lines if line.startswith("[rank 1]   File ")]
    assert len(places) == 2
    assert all(f'File "{script}"' in place for place in places)


def test_all_ranks_raise_and_one_traceback_is_shown(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    script = write(tmp_path, "barrier()\nraise ValueError('the same')\n")
    result = run(COMMAND, script, environ)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("rank 0 on host") == 1


@pytest.mark.parametrize("error", ["import no_such_module", "this is no Python"])
def test_script_that_does_not_get_as_far_as_mpi(
    error: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    result = run(COMMAND, write(tmp_path, error, start=""), environ)
    assert result.returncode == 1
    assert result.stderr.count("Error") == 2  # in Python's words, and in the message
    assert "runtime" not in result.stderr


def test_one_rank_that_does_not_get_as_far_as_mpi(tmp_path: Path, environ: dict[str, str]) -> None:
    early = "import os\nif os.environ['PMI_RANK'] == '1':\n    import no_such_module\n"
    result = run(COMMAND, write(tmp_path, "barrier()\n", early + START), environ)
    assert result.returncode == 1
    assert "rank 1 on host" in result.stderr


def test_error_of_ours_is_a_status_of_2(tmp_path: Path, environ: dict[str, str]) -> None:
    text = "from tarantella.errors import InputError\nraise InputError('no such thing')\n"
    script = write(tmp_path, text)
    result = run(COMMAND, script, environ)
    assert result.returncode == 2
    assert result.stderr.count("Traceback") == 1
    assert "InputError: no such thing" in result.stderr


def test_data_that_fail_on_one_rank_are_the_cause(tmp_path: Path, environ: dict[str, str]) -> None:
    """The other rank sees that there are no more of them, and could take it for the cause."""
    text = """
import keras, numpy as np
import tarantella as tnt
model = tnt.Model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
model.compile(loss="mse")
def batches():
    for step in range(9):
        if step == 4 and tnt.get_rank() == 1:
            raise RuntimeError("bad file")
        yield np.ones((4, 2)), np.ones((4, 1))
model.fit(batches(), verbose=0)
"""
    result = run(COMMAND, write(tmp_path, text, start=""), environ)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "rank 1" in last
    assert "RuntimeError: bad file" in last


def test_an_error_in_a_callback_is_that_of_the_rank_that_has_it(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """It is raised on all."""
    text = """
import keras
import numpy as np
import tarantella as tnt
class Failing(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if rank == 1:
            raise RuntimeError("not here")
model = tnt.Model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=[Failing()])
"""
    result = run(COMMAND, write(tmp_path, text), environ)
    assert result.returncode == 1
    assert f"rank 1 on host {socket.gethostname()} failed: RuntimeError: not here" in result.stderr
    assert 'raise RuntimeError("not here")' in result.stderr


def test_failure_while_another_thread_communicates(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
if rank == 1:
    threading.Thread(target=barrier, daemon=True).start()
    time.sleep(0.5)
    raise ValueError("bad")
time.sleep(600)
"""
    result = run(COMMAND, write(tmp_path, text), environ)
    assert result.returncode == 1
    assert "ValueError: bad" in result.stderr


def test_output_before_a_failure_is_not_lost(tmp_path: Path, environ: dict[str, str]) -> None:
    text = "if rank == 0:\n    print('x' * 500_000)\n    raise ValueError('bad')\nbarrier()\n"
    result = run(COMMAND, write(tmp_path, text), environ)
    assert result.stdout.count("x") == 500_000


@pytest.mark.parametrize("failure", ["raise ValueError('bad')", "os.kill(os.getpid(), 9)"])
def test_what_a_hidden_rank_printed_last_is_shown(
    failure: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    text = f"""
print("hello from", rank)
if rank == 1:
    for number in range(5000):
        print("line", number)
    print("last on the error stream", file=sys.stderr)
    {failure}
barrier()
"""
    result = run(COMMAND, write(tmp_path, text), environ)
    assert result.stdout == "hello from 0\n"
    shown = [line for line in result.stderr.splitlines() if not line.startswith("tarantella: ")]
    assert all(line.startswith("[rank 1] ") for line in shown)
    assert "[rank 1] line 4999" in shown
    assert "[rank 1] last on the error stream" in shown
    assert len(shown) < 2000


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("stubborn", [False, True])
def test_signal_ends_every_rank(
    number: signal.Signals, status: int, stubborn: bool, tmp_path: Path, environ: dict[str, str]
) -> None:
    text = "print('ready', flush=True)\nif rank == 0:\n    barrier()\ntime.sleep(600)\n"
    if stubborn:
        ignore = "for number in (1, 2, 15):\n    signal.signal(number, signal.SIG_IGN)\n"
        text = ignore + text
    process = subprocess.Popen(
        [*ALL_OUTPUT, write(tmp_path, text)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run under nohup hand down an ignored SIGHUP, which the command respects.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == READY
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert time.monotonic() - sent < 30
    assert process.returncode == status
    assert out == ""
    assert err == f"tarantella: ended by {number.name}; all ranks were ended.\n"


def test_killed_command_takes_its_ranks_along(tmp_path: Path, environ: dict[str, str]) -> None:
    text = "print('ready', flush=True)\ntime.sleep(600)\n"
    process = subprocess.Popen(
        [*ALL_OUTPUT, write(tmp_path, text)], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == READY
    process.kill()
    process.wait()
    mark = f"TEST_RUN={environ['TEST_RUN']}"
    wait_for_end(mark)
    process.stdout.close()


def test_workers_that_a_script_leaves_behind(tmp_path: Path, environ: dict[str, str]) -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    assert run(COMMAND, write(tmp_path, text), environ).returncode == 0


def test_forked_process_is_no_rank(tmp_path: Path, environ: dict[str, str]) -> None:
    text = """
if os.fork() == 0:
    try:
        barrier()
    except Exception as error:
        print("refused" if "not a rank" in str(error) else error, flush=True)
    sys.exit(5)
print("status", os.waitstatus_to_exitcode(os.wait()[1]))
world.communicator("gradients").Barrier()
"""
    text = text.replace("barrier()", 'world.communicator("control").Barrier()', 1)
    result = run(ALL_OUTPUT, write(tmp_path, text), environ)
    assert result.returncode == 0
    seen = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    assert seen == ["refused"] * 2 + ["status 5"] * 2
    assert result.stderr == ""


def plain(ranks: int) -> tuple[str, ...]:
    from tarantella.cli.mpi import find_mpiexec

    return (str(find_mpiexec().path), "-n", str(ranks), sys.executable)


@pytest.mark.parametrize(
    ("failure", "status", "shown"),
    [
        ("raise ValueError('bad value')", 1, "ValueError: bad value"),
        ("sys.exit(3)", 3, ""),
        ("exit(3)", 3, ""),
        ("sys.exit('sorry')", 1, "sorry"),
    ],
)
def test_failure_under_plain_mpiexec(
    failure: str, status: int, shown: str, tmp_path: Path, plain_environ: dict[str, str]
) -> None:
    script = write(tmp_path, f"barrier()\nif rank == 1:\n    {failure}\nbarrier()\n")
    result = run(plain(2), script, plain_environ)
    assert result.returncode == status
    assert shown in result.stderr
    assert result.stderr.count("Traceback") == ("raise" in failure)


def test_exit_that_is_caught_under_plain_mpiexec(
    tmp_path: Path, plain_environ: dict[str, str]
) -> None:
    text = "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nbarrier()\nsys.exit(0)\n"
    assert run(plain(2), write(tmp_path, text), plain_environ).returncode == 0


def test_all_ranks_raise_under_plain_mpiexec(tmp_path: Path, plain_environ: dict[str, str]) -> None:
    result = run(plain(2), write(tmp_path, "barrier()\nraise ValueError('same')\n"), plain_environ)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
