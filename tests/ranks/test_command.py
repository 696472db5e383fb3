"""The real command with real ranks when all goes well, and its messages when it cannot start."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tarantella.cli.mpi import find_mpiexec

LIMIT = 120  # seconds, for a machine that is busy with other things
COMMAND = (sys.executable, "-m", "tarantella.cli")
TWO = (*COMMAND, "-n", "2", "--no-gpu")
BOTH = (*TWO, "--output-on-all-devices")
START = "from tarantella.runtime import world\n"


def run(*command: str | bytes, **settings: object) -> subprocess.CompletedProcess[str]:
    settings = {"capture_output": True, **settings}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command, text=True, timeout=LIMIT, **settings
    )


def unmarked(output: str) -> list[str]:
    """The lines of all ranks, without the prefixes that say whose they are."""
    lines = output.splitlines()
    assert all(line.startswith("[rank ") for line in lines)
    return sorted(line.partition("] ")[2] for line in lines)


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(START + text)
    return str(path)


WHO = """
import os
numbers = (world.get_rank(), world.get_size(), world.get_local_rank(), world.get_local_size())
os.write(1, (" ".join(map(str, numbers)) + "\\n").encode())
"""


def test_ranks_of_the_command(tmp_path: Path) -> None:
    result = run(*BOTH, "--", write(tmp_path, WHO))
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[rank 0] 0 2 0 2", "[rank 1] 1 2 1 2"]
    assert result.stderr == ""


def test_only_the_master_rank_is_shown(tmp_path: Path) -> None:
    text = WHO + "os.write(2, b'error stream of %d\\n' % world.get_rank())\n"
    result = run(*TWO, "--", write(tmp_path, text))
    assert result.returncode == 0
    assert result.stdout == "0 2 0 2\n"
    assert result.stderr == "error stream of 0\n"


def test_ranks_of_a_host_have_cores_of_their_own(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    text = "import os\nprint(*sorted(os.sched_getaffinity(0)))\n"
    first, second = (set(line.split()) for line in unmarked(
        run(*BOTH, "--", write(tmp_path, text)).stdout))  # fmt: skip
    assert first
    assert second
    assert not first & second
    unbound = run(*BOTH, "-x", "TNT_CORES=", "--", str(tmp_path / "script.py"))
    assert len(set(unmarked(unbound.stdout))) == 1


def test_no_rank_waits_for_input(tmp_path: Path) -> None:
    result = run(*BOTH, "--", write(tmp_path, "import sys\nprint(repr(sys.stdin.read()))\n"))
    assert result.returncode == 0
    assert unmarked(result.stdout) == ["''"] * 2


def test_ranks_of_plain_mpiexec(tmp_path: Path) -> None:
    result = run(str(find_mpiexec().path), "-n", "2", sys.executable, write(tmp_path, WHO))
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["0 2 0 2", "1 2 1 2"]


def test_more_ranks_than_cores_are_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(3)\n")
    one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    result = run(*one_core, *TWO, "--max-restarts", "1", "--", "script.py", cwd=tmp_path)
    told = f"Host {socket.gethostname()} has 1 core for 2 ranks: ranks that share a core take turns"
    assert result.stderr.startswith(f"tarantella WARNING: {told}")
    assert result.stderr.count("WARNING") == 1


def test_serial_run_does_not_touch_mpi(tmp_path: Path) -> None:
    result = run(
        sys.executable, write(tmp_path, WHO + "import sys\nprint('mpi4py.MPI' in sys.modules)\n")
    )
    assert result.stdout.splitlines() == ["0 1 0 1", "False"]


def test_the_command_loads_no_numpy() -> None:
    """It would take as long as all the rest."""
    code = (
        "import tarantella.cli.main, tarantella.launch.script, sys; print('numpy' in sys.modules)"
    )
    assert run(sys.executable, "-c", code).stdout == "False\n"


def test_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))
    }
    environ |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    result = run(sys.executable, write(tmp_path, WHO), env=environ)
    assert result.returncode == 2
    for expected in ("Open MPI", "4 ranks", "MPICH", "MPI4PY_LIBMPI"):
        assert expected in result.stderr


def test_script_sees_what_plain_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("value = 5\n")
    (tmp_path / "script.py").write_text(
        """from __future__ import annotations
import json, sys
import neighbour
data = [sys.argv, sys.path, __file__, __name__, __package__, sys.modules["__main__"].__file__]
data += [neighbour.value, sorted(globals()), "tarantella" in sys.modules]
print(json.dumps(data))
"""
    )
    seen, expected = (
        run(*start, "script.py", "--a", "b c", cwd=tmp_path).stdout
        for start in ((*COMMAND, "-n", "1", "--no-gpu", "--"), (sys.executable,))
    )
    assert json.loads(seen) == json.loads(expected)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package" / "inner"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "broken.py"):
        (tmp_path / "package" / name).touch()
    (folder / "neighbour.py").write_text("value = 5\n")
    (tmp_path / "package" / "broken.py").write_text("import not_there\n")
    (folder / "train.py").write_text(
        """from __future__ import annotations
import json, sys
from .neighbour import value
from ..inner import neighbour
data = [sys.argv, sys.path, __file__, __name__, __package__, __spec__.name, __spec__.origin]
data += [__cached__, sys.modules["__main__"].__file__, value, sorted(globals())]
print(json.dumps(data))
"""
    )
    (folder / "__main__.py").write_text((folder / "train.py").read_text())
    return tmp_path


@pytest.mark.parametrize("name", ["package.inner.train", "package.inner"])
def test_module_sees_what_plain_python_shows_it(name: str, package: Path) -> None:
    seen, expected = (
        run(*start, "-m", name, "--a", "b c", cwd=package).stdout
        for start in (TWO, (sys.executable,))
    )
    assert json.loads(seen) == json.loads(expected)


@pytest.mark.parametrize(
    ("name", "status", "cause"),
    [
        ("package.nothing", 2, "There is no module package.nothing: check its name"),
        ("package", 2, "package is a package without a module __main__: name a module in it"),
        ("package.broken", 1, "ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_module_that_cannot_run(name: str, status: int, cause: str, package: Path) -> None:
    result = run(*TWO, "-m", name, cwd=package)
    assert (result.returncode, result.stdout) == (status, "")
    *before, last = result.stderr.splitlines()
    assert last.startswith("tarantella: rank 0 on host ")
    assert f" failed: {cause}" in last
    assert bool(before) == (status == 1)  # the traceback of the user's own mistake


ODD = [
    b"a b",
    b"'q' \"d\"",
    b"$HOME;`id`",
    b"x=y=z",
    b"",
    b"two\nlines\n",
    b"\xff\xfe",
    b" * ",
    b"\\",
]


def test_variables_and_arguments_arrive_byte_for_byte(tmp_path: Path) -> None:
    text = """
import os, sys
values = [os.environb[f"V{i}".encode()] for i in range(9)]
if world.get_rank() == 1:
    arguments = [os.fsencode(argument) for argument in sys.argv[1:]]
    open(os.environ["SEEN"], "w").write(str([values, arguments]))
"""
    variables = [f"V{number}=".encode() + value for number, value in enumerate(ODD)]
    arguments = [*ODD, b":", b"\\:", b"--", b"-n", b"-x"]
    script = write(tmp_path, text)
    seen = tmp_path / "seen"
    run(*TWO, "-x", "V0=old", f"SEEN={seen}", "-x", *variables, "--", script, *arguments)
    assert seen.read_text() == str([ODD, arguments])


def test_bytes_and_half_lines_pass_at_once(tmp_path: Path) -> None:
    text = r"""
import os, time
if world.get_rank() == 0:
    for descriptor in (1, 2):
        os.write(descriptor, b"\r 10% \xff")
    time.sleep(600)
"""
    with subprocess.Popen(
        [*TWO, "--", write(tmp_path, text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(7) == b"\r 10% \xff"
        assert process.stderr.read(7) == b"\r 10% \xff"
        process.terminate()


def test_lines_of_ranks_are_not_mixed(tmp_path: Path) -> None:
    text = (
        "for number in range(200):\n    print('one', 'line', 'of', world.get_rank(), 'x' * 9000)\n"
    )
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    lines = run(*BOTH, "--", write(tmp_path, text), env=environ).stdout.splitlines()
    expected = [f"[rank {rank}] one line of {rank} {'x' * 9000}" for rank in (0, 1)]
    assert sorted(lines) == [expected[0]] * 200 + [expected[1]] * 200


def test_dry_run_says_what_would_be_run_and_runs_nothing(tmp_path: Path) -> None:
    script = write(tmp_path, "print('it runs')\n")
    result = run(*TWO, "--dry-run", "-x", "A=b c", "--", script)
    assert result.returncode == 0
    assert "rank 1: CPU" in result.stdout
    assert "it runs" not in result.stdout
    again = run("sh", "-c", result.stdout.splitlines()[-1])
    assert again.stdout == "it runs\n"


def test_ranks_with_a_hostfile_are_those_of_each_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    script = write(tmp_path, "")
    command = [*COMMAND, "--hostfile", str(tmp_path / "hosts"), "-n", "2", "--no-gpu", "--dry-run"]
    result = run(*command, "--", script)
    assert result.stdout.count("  rank ") == 4
    assert result.stderr == (
        "tarantella: -n 2 with --hostfile means 2 on each host, as --n-per-node 2 does.\n"
    )
    assert run(*command, "--log-level", "ERROR", "--", script).stderr == ""
    refused = run(*command, "--n-per-node", "3", "--", script)
    assert refused.returncode == 2
    assert "-n 2 and --n-per-node 3 contradict each other" in refused.stderr


def test_warning_without_gpus(tmp_path: Path) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    script = write(tmp_path, WHO)
    result = run(*COMMAND, "--", script, env=environ)
    assert result.stdout == "0 1 0 1\n"
    first, last = result.stderr.splitlines()
    assert first.startswith("tarantella WARNING: No GPU was found on host ")
    assert last.startswith("tarantella WARNING: The run used the CPU: no GPU was found on host ")
    assert "idle" not in last
    quiet = run(*COMMAND, "--log-level", "ERROR", "--dry-run", "--", script, env=environ)
    assert quiet.stderr == ""


@pytest.fixture
def two_gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with two GPUs, which no TensorFlow can use."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    names = ("GPU-simulated-0", "GPU-simulated-1")
    lines = "".join(f"{name}, 00000000:00:00.0, Simulated\\n" for name in names)
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ",".join(names)}


def without_cores(output: str) -> str:
    """What was printed, apart from a warning of fewer cores than ranks, as some machines have."""
    return "".join(line for line in output.splitlines(True) if " share a core " not in line)


IDLE = r"has 2 GPUs for 3 ranks, so 2 GPUs on host \S+ stood idle\. Use --gpu to make this an error"


def test_gpus_that_stood_idle_are_named_after_all_output(
    tmp_path: Path, two_gpus: dict[str, str]
) -> None:
    both = {"stderr": subprocess.STDOUT, "stdout": subprocess.PIPE, "capture_output": False}
    script = write(tmp_path, "print('it runs')\n")
    result = run(*COMMAND, "-n", "3", "--", script, env=two_gpus, **both)
    first, output, last = without_cores(result.stdout).splitlines()
    assert result.returncode == 0
    assert re.match(r"tarantella WARNING: Host \S+ has 2 GPUs for 3 ranks: they run on", first)
    assert output == "it runs"
    assert re.match(rf"tarantella WARNING: The run used the CPU: host \S+ {IDLE}", last)
    for quiet in ("--no-gpu", "--log-level=ERROR"):
        silent = run(*COMMAND, "-n", "3", quiet, "--", script, env=two_gpus)
        assert (silent.stdout, without_cores(silent.stderr)) == ("it runs\n", "")


def test_gpus_that_stood_idle_are_named_once_before_the_failure(
    tmp_path: Path, two_gpus: dict[str, str]
) -> None:
    script = write(tmp_path, "raise SystemExit(3)\n")
    result = run(*COMMAND, "-n", "3", "--max-restarts", "1", "--", script, env=two_gpus)
    assert result.returncode == 3
    lines = without_cores(result.stderr).splitlines()
    assert [" GPUs for " in line for line in lines] == [True, False, False, True, False]
    assert re.search(IDLE, lines[-2])
    assert "restart 1 of 1" in lines[2]
    assert " failed: " in lines[1]
    assert " failed: " in lines[-1]


def test_gpus_or_an_error(tmp_path: Path, two_gpus: dict[str, str]) -> None:
    script = write(tmp_path, "print('it runs')\n")
    enough = run(*COMMAND, "--gpu", "--", script, env=two_gpus)
    assert (enough.returncode, enough.stdout, enough.stderr) == (0, "it runs\n", "")
    refused = run(*COMMAND, "--gpu", "-n", "3", "--", script, env=two_gpus)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(
        r"tarantella: --gpu needs a GPU for each rank, but host \S+ has 2 GPUs for 3 ranks: start "
        r"fewer ranks, or use --no-gpu to run on the CPU\.\n",
        refused.stderr,
    )


USES_TENSORFLOW = "import tarantella, tensorflow\nprint('it runs')\n"


@pytest.mark.parametrize("launcher", ["command", "mpiexec"])
def test_gpus_that_tensorflow_does_not_find_are_an_error(
    launcher: str, tmp_path: Path, two_gpus: dict[str, str]
) -> None:
    script = write(tmp_path, USES_TENSORFLOW)
    command = (*COMMAND, "--gpu", "--max-restarts", "1", "--")
    if launcher == "mpiexec":
        two_gpus["TNT_GPU"] = "true"
        command = ("mpiexec", "-n", "2", sys.executable)
    result = run(*command, script, env=two_gpus)
    assert (result.returncode, result.stdout) == (2, "")
    asked = "--gpu" if launcher == "command" else "TNT_GPU"
    message = f"InputError: {asked} needs a GPU for each rank, but TensorFlow finds no GPU for 2 "
    assert result.stderr.count(f"tarantella.errors.{message}") == 1
    files = re.findall(r'File "(.*?)"', result.stderr)
    assert [Path(file).name for file in files] == ["script.py"]  # nothing of the library
    assert "restart" not in result.stderr
    assert "idle" not in result.stderr


def test_gpus_that_tensorflow_does_not_find_stood_idle(
    tmp_path: Path, two_gpus: dict[str, str]
) -> None:
    result = run(*COMMAND, "--", write(tmp_path, USES_TENSORFLOW), env=two_gpus)
    assert (result.returncode, result.stdout) == (0, "it runs\n")
    assert re.fullmatch(
        r"tarantella WARNING: 2 ranks on host \S+ used the CPU, and 2 GPUs stood idle: TensorFlow "
        r"found no GPU there\. Use --gpu to make this an error\.",
        result.stderr.splitlines()[-1],
    )


def test_other_program_than_python() -> None:
    result = run(*BOTH, "--python-interpreter", "", "--", "sh", "-c", "echo $PMI_RANK; exit 0")
    assert result.returncode == 0
    assert unmarked(result.stdout) == ["0", "1"]


def test_tool_in_front_of_python(tmp_path: Path) -> None:
    tool = f"env A=b {shlex.quote(sys.executable)} -X dev"
    script = write(tmp_path, "import os, sys\nprint(os.environ['A'], sys.flags.dev_mode)\n")
    result = run(*BOTH, "--python-interpreter", tool, "--", script)
    assert unmarked(result.stdout) == ["b True"] * 2


def test_ranks_that_start_other_programs(tmp_path: Path) -> None:
    """A program started by a rank runs serially, a spawned worker belongs to its rank."""
    text = """
import multiprocessing, subprocess, sys
def worker(queue):
    queue.put((world.get_rank(), world.get_size()))
if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(f"program {world.get_rank()} {world.get_size()}\\n")  # in one piece
    else:
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=worker, args=(queue,))
        process.start()
        sys.stdout.write("worker {} {}\\n".format(*queue.get()))
        process.join()
        subprocess.run([sys.executable, __file__, "alone"], check=True)
"""
    result = run(*BOTH, "--", write(tmp_path, text))
    assert result.returncode == 0
    expected = ["program 0 1", "program 0 1", "worker 0 2", "worker 1 2"]
    assert unmarked(result.stdout) == expected


def test_reader_that_goes_away(tmp_path: Path) -> None:
    script = write(tmp_path, "while True:\n    print('line')\n")
    command = shlex.join([*TWO, "--", script])
    result = run("sh", "-c", f"{command} | head -1")
    assert result.stdout == "line\n"
    assert result.stderr == ""


def test_reader_that_takes_its_time(tmp_path: Path) -> None:
    script = write(tmp_path, "for number in range(3000):\n    print('x' * 99)\n")
    command = shlex.join([*TWO, "--", script])
    result = run("sh", "-c", f"{command} | (sleep 6; cat)")
    assert result.stdout == ("x" * 99 + "\n") * 3000


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(stream: str, tmp_path: Path) -> None:
    script = write(tmp_path, "print('line')\n")
    result = run("sh", "-c", f"{shlex.join([*TWO, '--', script])} {stream}")
    assert result.returncode == 0
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--", "missing.py"], "missing.py"),
        (["-n", "0", "--", "script.py"], "-n"),
        (["--no-gup", "--", "script.py"], "--no-gup"),
        ([], "script"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], named: str, tmp_path: Path) -> None:
    write(tmp_path, "")
    result = run(*COMMAND, *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("tarantella: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr


@pytest.mark.parametrize("command", [COMMAND, (str(Path(sys.executable).with_name("tarantella")),)])
def test_setting_without_sense_is_told_in_one_line(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    script = write(tmp_path, "")
    environ = {**os.environ, "TNT_FUSION_THRESHOLD": "much"}
    result = run(*command, "--", script, env=environ)
    assert result.returncode == 2
    assert result.stderr.startswith("tarantella: ")
    assert result.stderr.count("\n") == 1
    assert "TNT_FUSION_THRESHOLD" in result.stderr
    assert run(*command, "--help", env=environ).returncode == 0


def test_version_and_help() -> None:
    assert run(*COMMAND, "--version").stdout.startswith("tarantella ")
    help_text = run(*COMMAND, "--help").stdout
    for option in ("-n N", "--hostfile FILE", "--n-per-node", "--devices-per-node", "--no-gpu",
                   "--log-level", "--fusion-threshold", "-x K=V", "--dry-run", "--cleanup",
                   "--force", "--pin-to-socket", "--network-interface NAME"):  # fmt: skip
        assert option in help_text


@pytest.mark.parametrize("imported", ["", "import tarantella as tnt\n"])
def test_ranks_that_train_for_themselves_are_told_of(imported: str, tmp_path: Path) -> None:
    """As when one of the two lines was forgotten."""
    script = tmp_path / "script.py"
    script.write_text(f"{imported}import keras\nkeras.Sequential([keras.layers.Dense(1)])\n")
    result = run(*TWO, "--", str(script))
    assert result.returncode == 0
    assert result.stderr.count("WARNING: The script has not used tnt.Model: each of the 2 ra") == 1


def test_plain_model_of_a_wrapped_one_that_every_rank_trains_is_told_of(tmp_path: Path) -> None:
    """As when the result of `tnt.Model(model)` is not used; other plain models are fine."""
    script = tmp_path / "train.py"
    script.write_text("""
import keras, numpy as np
import tarantella as tnt
x = np.ones((4, 3))
def train(model):
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], verbose=0)
def new_model(name):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name=name)
used, forgotten = new_model("used"), new_model("forgotten")
train(used)
train(tnt.Model(used))
train(keras.models.clone_model(used))
if tnt.is_master_rank():
    train(used)
    print("no mistake so far", flush=True)
tnt.barrier()
tnt.Model(forgotten)
train(forgotten)
train(forgotten)
""")
    result = run(*TWO, "--", str(script))
    assert (result.returncode, result.stdout) == (0, "no mistake so far\n")
    at_fit, at_end = (line for line in result.stderr.splitlines() if line.startswith("tarantella"))
    assert at_fit == at_end
    assert at_fit.startswith(
        "tarantella WARNING: fit (train.py:7) trains the plain model 'forgotten', not the one that "
        "tnt.Model returned: each of the 2 ranks trains on all of the data by itself."
    )
