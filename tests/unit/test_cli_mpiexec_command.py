"""From a plan to a command line and an environment."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tarantella.cli.description import describe
from tarantella.cli.gpus import Gpu
from tarantella.cli.host import Host
from tarantella.cli.mpi import (
    Hydra,
    IntelHydra,
    Mpiexec,
    OpenMpi,
    Placement,
    environment_without_run,
    find_mpiexec,
)
from tarantella.cli.mpiexec_command import MpiexecCommand, make_mpiexec_command
from tarantella.cli.options import Options
from tarantella.cli.plan import make_plan
from tarantella.cli.schedulers import Ssh
from tarantella.errors import InputError
from tarantella.launch.mpiexec_quoting import escaped, unescaped

HOST = Host("node", (tuple(range(16)), tuple(range(16, 32))), tuple([Gpu("H100")] * 4))
MPIEXEC = Hydra(Path("/opt/mpi/bin/mpiexec"))
ASKED = Options(program=("script.py", "a b", ":"), ranks=2)


def command_of(options: Options, environ: dict[str, str]) -> MpiexecCommand:
    plan = make_plan(options, [HOST])
    return make_mpiexec_command(plan, options, MPIEXEC, environ, Placement(None, plan.counts))


def test_command_line_runs_the_script_on_every_rank() -> None:
    command = command_of(ASKED, {})
    local = ("-rmk", "user", "-launcher", "fork")
    assert command.argv[:7] == ("/opt/mpi/bin/mpiexec", *local, "-n", "2")
    assert command.argv[-4:] == ("launch.script", "script.py", "a b", "\\:")
    assert sys.executable in command.argv
    assert ":" not in command.argv


def test_program_without_interpreter_is_run_as_it_is() -> None:
    options = replace(ASKED, interpreter=())
    command = command_of(options, {})
    assert command.argv[-4:] == ("launch.supervisor", "script.py", "a b", "\\:")


def test_tool_in_front_of_the_interpreter() -> None:
    options = replace(ASKED, interpreter=("tool", "-v", "python3"))
    command = command_of(options, {}).argv
    start = command.index("tool")
    assert command[start : start + 3] == ("tool", "-v", "python3")


def test_environment_on_gpus() -> None:
    command = command_of(ASKED, {})
    assert command.environment["TNT_GPUS"] == "0,1"
    assert command.environment["TNT_THREADS"] == "16"
    assert "TNT_NO_GPU" not in command.environment


def test_the_option_for_devices_counts_and_not_the_variable_against_it() -> None:
    gpu = replace(ASKED, gpu=True, given=frozenset({"gpu"}))
    environment = command_of(gpu, {"TNT_NO_GPU": "true"}).environment
    assert (environment["TNT_GPU"], environment["TNT_NO_GPU"]) == ("true", "false")
    cpu = replace(ASKED, no_gpu=True, given=frozenset({"no_gpu"}))
    environment = command_of(cpu, {"TNT_GPU": "true"}).environment
    assert (environment["TNT_GPU"], environment["TNT_NO_GPU"]) == ("false", "true")


GIVEN = (
    "no_gpu",
    "log_level",
    "log_on_all_devices",
    "output_on_all_devices",
    "fusion_threshold_kb",
    "timeline",
)


def test_environment_of_options() -> None:
    options = replace(
        ASKED,
        no_gpu=True,
        log_level="INFO",
        log_on_all_devices=True,
        output_on_all_devices=True,
        fusion_threshold_kb=64,
        timeline="a b.json",
        given=frozenset(GIVEN),
    )
    environment = command_of(options, {}).environment
    assert environment == {
        "TNT_LOG_LEVEL": "INFO",
        "TNT_LOG_ON_ALL_DEVICES": "true",
        "TNT_OUTPUT_ON_ALL_DEVICES": "true",
        "TNT_FUSION_THRESHOLD": "64",
        "TNT_TIMELINE": "a b.json",
        "TNT_NO_GPU": "true",
        "TNT_THREADS": "16",
        "TNT_CORES": "0-15:16-31",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def test_one_rank_is_bound_only_if_it_is_pinned() -> None:
    options = replace(ASKED, ranks=1, no_gpu=True)
    assert "TNT_CORES" not in command_of(options, {}).environment
    pinned = command_of(replace(options, pin_to_socket=True), {"TNT_CORES": ""})
    assert pinned.environment["TNT_CORES"] == "0-15"


def test_what_the_user_has_set_for_ranks_stays() -> None:
    environment = command_of(ASKED, {"TNT_THREADS": "3", "TNT_CORES": ""}).environment
    assert "TNT_THREADS" not in environment
    assert "TNT_CORES" not in environment


def test_the_last_value_of_a_variable_counts() -> None:
    options = replace(ASKED, environment=(("A", "1"), ("TNT_THREADS", "3"), ("B", "2"), ("A", "4")))
    environment = command_of(options, {}).environment
    assert list(environment.items())[-3:] == [("TNT_THREADS", "3"), ("B", "2"), ("A", "4")]


def test_what_the_user_has_set_for_tensorflow_stays() -> None:
    command = command_of(ASKED, {"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert "TF_CPP_MIN_LOG_LEVEL" not in command.environment


@pytest.mark.parametrize(
    ("of_environment", "of_option", "hidden"),
    [
        (None, None, True),
        ("0", None, False),
        ("", None, False),
        ("3", None, True),
        ("3", "0", False),
        ("0", "2", True),
    ],
)
def test_start_of_tensorflow_is_hidden_unless_all_of_its_log_is_wanted(
    of_environment: str | None, of_option: str | None, hidden: bool
) -> None:
    def setting(level: str | None) -> dict[str, str]:
        return {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}

    options = replace(ASKED, environment=tuple(setting(of_option).items()))
    assert command_of(options, setting(of_environment)).quiet_tensorflow == hidden


def test_description_ends_with_a_line_for_the_shell() -> None:
    options = replace(ASKED, environment=(("A", "it's $HOME;"),))
    plan = make_plan(options, [HOST])
    command = make_mpiexec_command(plan, options, MPIEXEC, {}, Placement(None, plan.counts))
    text = describe(plan, command)
    assert "host node: 32 cores, 4 GPUs" in text
    assert "rank 1: GPU 1 (H100), cores 16-31, 16 threads" in text
    words = shlex.split(text.splitlines()[-1])
    assert words[0] == "env"
    assert "A=it's $HOME;" in words
    assert tuple(words[-len(command.argv) :]) == command.argv


def test_description_says_what_is_set_on_other_ranks_only() -> None:
    def described(ranks: int, **environ: str) -> str:
        options = replace(ASKED, ranks=ranks)
        plan = make_plan(options, [HOST])
        placement = Placement(None, plan.counts)
        return describe(plan, make_mpiexec_command(plan, options, MPIEXEC, environ, placement))

    title = "environment of ranks other than the master, which opens the run of a tracker:\n"
    variables = "  WANDB_MODE=disabled\n  COMET_AUTO_LOG_DISABLE=true\n"
    assert f"{title}{variables}command:" in described(2, WANDB_MODE="offline")
    assert "WANDB_MODE" not in described(1)
    assert "WANDB_MODE" not in described(2, TNT_TRACKERS_ON_ALL_DEVICES="true")


@pytest.mark.parametrize("argument", [":", "\\:", "\\\\:", "a:b", "", "\\", "::"])
def test_colons_arrive_as_they_were(argument: str) -> None:
    assert escaped([argument]) != [":"]
    assert unescaped(escaped([argument])) == [argument]


SAYS = {
    Hydra: "HYDRA build details:",
    IntelHydra: "Intel(R) MPI Library for Linux* OS, Version 2021.18",
    OpenMpi: "mpirun (Open MPI) 5.0.11",
}


def install(folder: Path, library: str, launchers: dict[str, type[Mpiexec]]) -> dict[str, str]:
    """Makes small launchers beside a library; returns an environment that asks for it."""
    for name in ("bin", "lib"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "lib" / library).touch()
    for name, kind in launchers.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\necho '{SAYS[kind]}'\n")
        path.chmod(0o755)
    return {"MPI4PY_LIBMPI": str(folder / "lib" / library), "PATH": ""}


@pytest.mark.parametrize(
    ("library", "launchers"),
    [
        ("libmpi.so.12", {"mpiexec": Hydra, "mpiexec.hydra": Hydra}),
        ("libmpi.so.12", {"mpiexec.hydra": IntelHydra}),
        ("libmpi.so.40", {"mpiexec": OpenMpi, "ompirun_wrapper": OpenMpi}),
    ],
)
def test_mpiexec_beside_the_library_that_is_asked_for(
    library: str, launchers: dict[str, type[Mpiexec]], tmp_path: Path
) -> None:
    [kind] = set(launchers.values())
    assert type(find_mpiexec(install(tmp_path, library, launchers))) is kind


@pytest.mark.parametrize("last", [Hydra, OpenMpi])
def test_mpiexec_of_the_library_that_is_asked_for_among_two(
    last: type[Mpiexec], tmp_path: Path
) -> None:
    """MPICH and Open MPI in one folder: the one that was installed last has the name mpiexec."""
    own = {"mpiexec.hydra": Hydra, "ompirun_wrapper": OpenMpi}
    for library, kind in (("libmpi.so.12", Hydra), ("libmpi.so.40", OpenMpi)):
        environ = install(tmp_path, library, {**own, "mpiexec": last})
        assert type(find_mpiexec(environ)) is kind


def test_open_mpi_beside_another_is_told_where_it_is(tmp_path: Path) -> None:
    launchers = {"mpiexec": Hydra, "ompirun_wrapper": OpenMpi}
    found = find_mpiexec(install(tmp_path, "libmpi.so.40", launchers))
    assert found.environment(Placement(None, {"node": 2}), {})["OPAL_PREFIX"] == str(tmp_path)


def test_open_mpi_passes_on_all_variables_to_other_hosts() -> None:
    mpiexec = OpenMpi(Path("/opt/mpi/bin/mpiexec"))
    placement = Placement(Ssh(("node", "other"), "myssh"), {"node": 2, "other": 2})
    options = replace(ASKED, environment=(("A", "1"),))
    environ = {"HOME": "/root", "PWD": "/root", "OMPI_MCA_btl": "tcp"}
    command = make_mpiexec_command(make_plan(options, [HOST]), options, mpiexec, environ, placement)
    words = command.argv[: command.argv.index("-n")]
    names = [name for option, name in pairwise(words) if option == "-x"]
    assert {"HOME", "A", "TNT_RUN_ID", "TNT_HEARTBEAT", "LD_LIBRARY_PATH"} <= set(names)
    assert not {"PWD", "OMPI_MCA_btl"} & set(names)
    assert command.environment["PRTE_MCA_plm_ssh_agent"] == "myssh -o BatchMode=yes"


def test_way_to_the_hosts_that_the_user_has_told_open_mpi_stays() -> None:
    placement = Placement(Ssh(("other",)), {"other": 1})
    environ = {"PRTE_MCA_plm_ssh_agent": "rsh"}
    added = OpenMpi(Path("/opt/mpi/bin/mpiexec")).environment(placement, environ)
    assert "PRTE_MCA_plm_ssh_agent" not in added


def test_intel_mpi_reads_other_variables_than_mpich() -> None:
    placement = Placement(Ssh(("other",)), {"other": 1})
    environ = {"HYDRA_LAUNCHER_EXEC": "myssh", "HYDRA_LAUNCHER_EXTRA_ARGS": "-o BatchMode=yes"}
    added = IntelHydra(Path("/opt/mpi/bin/mpiexec")).environment(placement, environ)
    assert added["I_MPI_HYDRA_BOOTSTRAP_EXEC"] == "myssh"
    assert added["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] == "-o BatchMode=yes"


def test_no_mpiexec_anywhere(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pip install mpich"):
        find_mpiexec({"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so"), "PATH": str(tmp_path)})


def test_a_run_inside_of_a_rank_knows_nothing_of_it() -> None:
    environ = {"PMI_RANK": "1", "TNT_RANK_PROCESS": "5:1/2", "OMPI_MCA_btl": "tcp", "A": "1"}
    assert environment_without_run(environ) == {"OMPI_MCA_btl": "tcp", "A": "1"}
    planned = {"TNT_CORES": "0:1", "TNT_LOG_LEVEL": "INFO"}
    assert environment_without_run(planned) == planned
    assert environment_without_run(planned | {"TNT_RUN_ID": "x"}) == {"TNT_LOG_LEVEL": "INFO"}
