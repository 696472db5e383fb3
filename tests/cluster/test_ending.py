"""Runs that are asked to end: soon, at any time, nothing of them is left on any host."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from commands import COMMAND, Cluster
from testbed import LIMIT, Process, child_of

# Told by each rank once it is up; and what ranks do then.
START = """
import os, signal, sys, time
from pathlib import Path
from tarantella.runtime import world
barrier = world.communicator("control").Barrier
barrier()
Path(f"up-{world.get_rank()}").touch()
"""
SLEEP = START + "time.sleep(600)\n"
COMMUNICATE = START + "while True:\n    barrier()\n"
STUBBORN = "import signal\nfor number in (1, 2, 15):\n    signal.signal(number, signal.SIG_IGN)\n"
SAVE = """
import keras
import numpy as np
import tarantella as tnt
from pathlib import Path
model = tnt.Model(keras.Sequential([keras.Input((2000,)), keras.layers.Dense(2000)]))
model.compile("sgd", "mse")
x = np.ones((8, 2000))
while True:
    model.fit(x, x, batch_size=8, verbose=0)
    model.save("model.keras")
    Path(f"up-{tnt.get_rank()}").touch()
"""


def wait_until_up(cluster: Cluster, ranks: int) -> None:
    deadline = time.monotonic() + LIMIT
    while not all((cluster.folder / f"up-{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


@contextmanager
def running(cluster: Cluster, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command while its ranks are up."""
    process = cluster.start(*options, "--", cluster.script(script))
    try:
        wait_until_up(cluster, ranks=2)
        yield process
    finally:
        if process.poll() is None:
            os.kill(child_of(process.pid), signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("script", "number", "status"),
    [
        (SLEEP, signal.SIGINT, 130),
        (COMMUNICATE, signal.SIGTERM, 143),
        (STUBBORN + COMMUNICATE, signal.SIGINT, 130),
        (STUBBORN + SLEEP, signal.SIGTERM, 143),
        (SAVE, signal.SIGTERM, 143),
    ],
    ids=["sleeping", "communicating", "stubborn-int", "stubborn-term", "saving"],
)
def test_signal_ends_all_ranks_on_all_hosts(
    script: str, number: int, status: int, cluster: Cluster
) -> None:
    with running(cluster, script) as process:
        asked = time.monotonic()
        os.kill(child_of(process.pid), number)
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == status
        assert errors.endswith(f"ended by {signal.Signals(number).name}; all ranks were ended.\n")
        assert cluster.left() == {}
        took = time.monotonic() - asked
    assert took < 30  # ten are promised, on a machine that has nothing else to do
    if script == SAVE:
        names = sorted(path.name for path in cluster.folder.iterdir())
        assert "model.keras" in names


@pytest.mark.parametrize("delay", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_starting(delay: float, number: int, cluster: Cluster) -> None:
    process = cluster.start("--n-per-node", "2", "--", cluster.script(SLEEP))
    command = child_of(process.pid)
    time.sleep(delay)
    os.kill(command, number)
    _, errors = process.communicate(timeout=LIMIT)
    # Before Python has got as far as to our code, the kernel ends the command, or, with status 1,
    # an interrupt does while Python and its packages are being loaded.
    loading = number == signal.SIGINT and process.returncode == 1 and "ended by" not in errors
    assert process.returncode in (128 + number, -number) or loading, errors
    cluster.wait_for_end(10)
    assert cluster.left() == {}


def test_terminal_that_is_closed(cluster: Cluster) -> None:
    ours, theirs = pty.openpty()
    process = cluster.start(
        "--", cluster.script(COMMUNICATE), stdin=theirs, stdout=theirs, stderr=theirs,
        preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(theirs)
    wait_until_up(cluster, ranks=2)
    os.close(ours)
    process.wait(LIMIT)
    cluster.wait_for_end(10)


def _take_terminal() -> None:
    import fcntl
    import termios

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_command_that_is_killed(cluster: Cluster) -> None:
    with running(cluster, COMMUNICATE) as process:
        os.kill(child_of(process.pid), signal.SIGKILL)
        process.wait(LIMIT)
        cluster.wait_for_end(10)
        assert [node.processes() for node in cluster.nodes] == [[], [], []]
    for node in cluster.nodes:  # nobody is left who could remove them
        node.run("sh", "-c", "rm -f /dev/shm/mpich_shm_* /tmp/hydra_hwloc_xmlfile_*")


@pytest.mark.parametrize(
    ("failure", "status"), [("raise ValueError('bad')", 1), ("os.kill(os.getpid(), 9)", 137)]
)
def test_rank_that_fails_on_another_host(failure: str, status: int, cluster: Cluster) -> None:
    text = f"print('last')\nif world.get_rank() == 3:\n    {failure}\ntime.sleep(600)\n"
    result = cluster.run("--n-per-node", "2", "--", cluster.script(START + text))
    assert result.returncode == status
    *printed, message = result.stderr.splitlines()
    assert message.startswith("tarantella: rank 3 on host node2 failed: ")
    assert "; the other ranks were ended (" in message
    assert "[rank 3 on node2] last" in printed
    assert all(line.startswith("[rank 3 on node2] ") for line in printed)


@pytest.mark.parametrize("rank", [0, 1])
def test_children_that_ranks_leave_behind(rank: int, cluster: Cluster) -> None:
    """On another host than that of the command, with and without its output."""
    text = (
        f"import subprocess\nif world.get_rank() == {rank}:\n"
        f"    subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('done')\n"
    )
    result = cluster.run("--", cluster.script(START + text), hosts=("node2", "node3"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_ranks_of_one_host_that_someone_else_ends(cluster: Cluster) -> None:
    with running(cluster, SLEEP) as process:
        script = str(cluster.folder / "script.py")
        cluster["node2"].run(*COMMAND, "--cleanup", "--", script)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert (
        "rank 1 on host node2 failed: it was killed by signal 15 (SIGTERM: asked to end, perhaps by"
        in errors
    )


def test_output_that_nobody_reads(cluster: Cluster) -> None:
    text = "while True:\n    os.write(1, b'x' * 999 + b'\\n')\n"
    with running(cluster, START + text) as process:
        time.sleep(1)
        os.kill(child_of(process.pid), signal.SIGTERM)
        process.wait(LIMIT)
    assert process.returncode == 143


def test_host_that_dies(cluster: Cluster) -> None:
    """Its cables are cut. The processes there notice, too, as nothing can tell them."""
    with running(cluster, COMMUNICATE) as process:
        cluster["node2"].cut()
        try:
            cut = time.monotonic()
            _, errors = process.communicate(timeout=LIMIT)
            took = time.monotonic() - cut
            assert cluster["node1"].processes() == []
            while [each for each in cluster["node2"].processes() if not _is_of_ssh(each)]:
                assert time.monotonic() - cut < LIMIT
                time.sleep(0.2)
        finally:
            cluster["node2"].cut(False)
    assert process.returncode == 1
    assert "rank 1 on host node2 failed: nothing was heard" in errors
    assert "processes may still be running on host node2, which cannot be reached" in errors
    assert took < 60


CONTINUE = """
print(os.environ["TNT_RESTARTS"], world.get_host_names())
while os.environ["TNT_RESTARTS"] == "0":
    barrier()
"""


def test_run_that_continues_without_a_host(cluster: Cluster) -> None:
    script = START + CONTINUE
    with running(cluster, script, "--max-restarts", "1", "--allow-fewer-hosts") as process:
        cluster["node2"].refuse_key()
        try:
            for each in cluster["node2"].processes():
                if "launch.script" in each.command and "supervisor" not in each.command:
                    os.kill(each.outer_pid, signal.SIGKILL)
            output, errors = process.communicate(timeout=LIMIT)
        finally:
            cluster["node2"].refuse_key(False)
    assert process.returncode == 0
    assert output.splitlines() == ["0 ('node1', 'node2')", "1 ('node1',)"]
    assert "rank 1 on host node2 failed: it was killed by signal 9" in errors
    assert (
        "tarantella: restart 1 of 1.\ntarantella WARNING: The run continues without host" in errors
    )
    cluster["node2"].run("sh", "-c", "rm -f /dev/shm/mpich_shm_* /tmp/hydra_hwloc_xmlfile_*")


def _is_of_ssh(process: Process) -> bool:
    """Whether it waits for the other side of a connection that is gone."""
    return "hydra_pmi_proxy" in process.command


def cleanup(cluster: Cluster, script: str, *options: str, on: str = "node1") -> tuple[int, str]:
    result = cluster.run("--cleanup", *options, "--", script, on=on)
    assert result.stdout == ""
    return result.returncode, result.stderr


def test_cleanup_ends_the_runs_of_a_script_and_nothing_else(cluster: Cluster) -> None:
    script = cluster.script(SLEEP)
    other = cluster.script(SLEEP.replace("up-", "other-"), "other.py")
    assert cleanup(cluster, script) == (
        0,
        f"tarantella: no process of {script} is running on host node1.\n"
        f"tarantella: no process of {script} is running on host node2.\n",
    )
    beside = cluster["node1"].start(
        *cluster.command("--", other), stdout=subprocess.DEVNULL, cwd=cluster.folder
    )
    editor = cluster["node2"].start("tail", "-f", script, stdout=subprocess.DEVNULL)
    nobody = cluster["node2"].start(
        "setpriv", "--reuid=65534", "--clear-groups", "env", f"TNT_SCRIPT={script}",
        "TNT_RUN_ID=x", "sleep", "600", stdout=subprocess.DEVNULL,
    )  # fmt: skip
    with running(cluster, SLEEP) as process:
        _wait_for(lambda: (cluster.folder / "other-1").exists())
        # From another host, and another folder.
        status, said = cleanup(cluster, "script.py", on="node2")
        assert status == 0
        lines = said.splitlines()
        assert [line.split()[1] for line in lines] == ["ended", "ended"]
        assert [line.split()[-1] for line in lines] == ["node1.", "node2."]
        process.communicate(timeout=LIMIT)
        assert process.returncode != 0
    assert beside.poll() is None
    assert editor.poll() is None
    assert nobody.poll() is None
    for each in (editor, nobody):
        os.kill(child_of(each.pid), signal.SIGKILL)
        each.wait()
    status, said = cleanup(cluster, "other.py", "--force")
    assert status == 0
    assert beside.wait(LIMIT) != 0


def test_module_runs_on_all_hosts_and_is_found_by_its_name(cluster: Cluster) -> None:
    package = cluster.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "place.py").write_text("folder = __file__\n")
    (package / "train.py").write_text(
        "import os, pathlib, socket, sys, time\nfrom . import place\n"
        "pathlib.Path(f'up-{socket.gethostname()}').write_text(sys.argv[0] + sys.argv[1])\n"
        "time.sleep(600)\n"
    )
    process = cluster.start("-m", "package.train", "-n")
    files = [cluster.folder / f"up-{name}" for name in ("node1", "node2")]
    _wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    assert [file.read_text() for file in files] == [f"{package / 'train.py'}-n"] * 2
    result = cluster.run("--cleanup", "-m", "package.train", on="node2")
    assert result.returncode == 0
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["ended", "ended"]
    process.communicate(timeout=LIMIT)
    assert process.returncode != 0


def test_cleanup_by_force_of_ranks_that_ignore_signals(cluster: Cluster) -> None:
    """Started by mpiexec itself, as an advanced user would."""
    from tarantella.cli.mpi import find_mpiexec

    script = cluster.script(STUBBORN + SLEEP)
    command = [str(find_mpiexec().path), "-hosts", "node1,node2", "-n", "2", COMMAND[0], script]
    process = cluster["node1"].start(*command, cwd=cluster.folder, stderr=subprocess.DEVNULL)
    wait_until_up(cluster, ranks=2)
    status, said = cleanup(cluster, script)
    assert status == 1
    assert "did not end: use --force" in said
    status, said = cleanup(cluster, script, "--force")
    assert (status, said.count("ended 1 process of")) == (0, 2)
    process.wait(LIMIT)


def test_cleanup_on_this_machine_never_ends_itself(cluster: Cluster) -> None:
    """A script that cleans up is a process of its own run."""
    script = cluster.script(
        START + "import subprocess\nsubprocess.Popen(['sleep', '600'])\n"
        f"end = subprocess.run({[*COMMAND, '--cleanup', '--force', '--']} + [sys.argv[0]],"
        " capture_output=True, text=True)\n"
        "Path('said').write_text(f'{end.returncode} {end.stderr}')\n"
    )
    command = [*COMMAND, "-n", "1", "--no-gpu", "--", script]
    cluster["node1"].run(*command, check=False, cwd=cluster.folder)
    said = (cluster.folder / "said").read_text()
    assert said.startswith(f"0 tarantella: ended 1 process of {script} on host node1.")


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
