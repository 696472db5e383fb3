"""From a plan to a command line and an environment."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tarantella.cli.description import describe
from tarantella.cli.gpus import Gpu
from tarantella.cli.host import Host
from tarantella.cli.launch import make_launch
from tarantella.cli.mpi import Mpiexec, describe_mpiexec, environment_without_run, find_mpiexec
from tarantella.cli.options import Options
from tarantella.cli.plan import make_plan
from tarantella.errors import InputError
from tarantella.runtime.colons import escaped, unescaped

HOST = Host("node", (tuple(range(16)), tuple(range(16, 32))), tuple([Gpu("H100")] * 4))
MPIEXEC = Mpiexec(Path("/opt/mpi/bin/mpiexec"), ("-local",))
ASKED = Options(program=("script.py", "a b", ":"), ranks=2)


def test_command_line_runs_the_script_on_every_rank() -> None:
    launch = make_launch(make_plan(ASKED, [HOST]), ASKED, MPIEXEC, {})
    assert launch.command[:4] == ("/opt/mpi/bin/mpiexec", "-local", "-n", "2")
    assert launch.command[-4:] == ("script", "script.py", "a b", "\\:")
    assert sys.executable in launch.command
    assert ":" not in launch.command


def test_program_without_interpreter_is_run_as_it_is() -> None:
    options = replace(ASKED, interpreter=())
    launch = make_launch(make_plan(options, [HOST]), options, MPIEXEC, {})
    assert launch.command[-4:] == ("supervisor", "script.py", "a b", "\\:")


def test_tool_in_front_of_the_interpreter() -> None:
    options = replace(ASKED, interpreter=("tool", "-v", "python3"))
    command = make_launch(make_plan(options, [HOST]), options, MPIEXEC, {}).command
    start = command.index("tool")
    assert command[start : start + 3] == ("tool", "-v", "python3")


def test_environment_on_gpus() -> None:
    launch = make_launch(make_plan(ASKED, [HOST]), ASKED, MPIEXEC, {})
    assert launch.environment["TNT_GPUS"] == "0,1"
    assert launch.environment["TNT_THREADS"] == "16"
    assert "TNT_NO_GPU" not in launch.environment


def test_environment_of_options() -> None:
    options = replace(
        ASKED,
        no_gpu=True,
        log_level="INFO",
        log_on_all_devices=True,
        output_on_all_devices=True,
        fusion_threshold_kb=64,
    )
    environment = make_launch(make_plan(options, [HOST]), options, MPIEXEC, {}).environment
    assert environment == {
        "TNT_LOG_LEVEL": "INFO",
        "TNT_LOG_ON_ALL_DEVICES": "true",
        "TNT_OUTPUT_ON_ALL_DEVICES": "true",
        "TNT_FUSION_THRESHOLD": "64",
        "TNT_NO_GPU": "true",
        "TNT_THREADS": "16",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def test_the_last_value_of_a_variable_counts() -> None:
    options = replace(ASKED, environment=(("A", "1"), ("TNT_THREADS", "3"), ("B", "2"), ("A", "4")))
    environment = make_launch(make_plan(options, [HOST]), options, MPIEXEC, {}).environment
    assert list(environment.items())[-3:] == [("TNT_THREADS", "3"), ("B", "2"), ("A", "4")]


def test_what_the_user_has_set_for_tensorflow_stays() -> None:
    launch = make_launch(make_plan(ASKED, [HOST]), ASKED, MPIEXEC, {"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert "TF_CPP_MIN_LOG_LEVEL" not in launch.environment
    assert not launch.quiet_tensorflow


def test_description_ends_with_a_line_for_the_shell() -> None:
    options = replace(ASKED, environment=(("A", "it's $HOME;"),))
    plan = make_plan(options, [HOST])
    launch = make_launch(plan, options, MPIEXEC, {})
    text = describe(plan, launch)
    assert "host node: 32 cores, 4 GPUs" in text
    assert "rank 1: GPU 1 (H100), cores 16-31, 16 threads" in text
    words = shlex.split(text.splitlines()[-1])
    assert words[0] == "env"
    assert "A=it's $HOME;" in words
    assert tuple(words[-len(launch.command) :]) == launch.command


@pytest.mark.parametrize("argument", [":", "\\:", "\\\\:", "a:b", "", "\\", "::"])
def test_colons_arrive_as_they_were(argument: str) -> None:
    assert escaped([argument]) != [":"]
    assert unescaped(escaped([argument])) == [argument]


def test_mpiexec_beside_the_library_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/libmpi.so").write_text("")
    mpiexec = tmp_path / "bin/mpiexec"
    mpiexec.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0'")
    mpiexec.chmod(0o755)
    found = find_mpiexec({"MPI4PY_LIBMPI": str(tmp_path / "lib/libmpi.so"), "PATH": ""})
    assert found == mpiexec
    assert "--bind-to" in describe_mpiexec(found).local


def test_no_mpiexec_anywhere(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pip install mpich"):
        find_mpiexec({"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so"), "PATH": str(tmp_path)})


def test_a_run_inside_of_a_rank_knows_nothing_of_it() -> None:
    environ = {"PMI_RANK": "1", "TNT_RANK_PROCESS": "5:1/2", "OMPI_MCA_btl": "tcp", "A": "1"}
    assert environment_without_run(environ) == {"OMPI_MCA_btl": "tcp", "A": "1"}
