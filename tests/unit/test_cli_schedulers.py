"""The hosts that schedulers give, in environments recorded in their jobs, and the way there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tarantella.cli.schedulers import SCHEDULERS, Ssh, find_allocation
from tarantella.cli.schedulers.lsf import Lsf
from tarantella.cli.schedulers.pbs import Pbs
from tarantella.cli.schedulers.slurm import Slurm, expand
from tarantella.errors import InputError
from tarantella.launch import entry

NO_JOB = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", "HOSTNAME": "login"}

# sbatch --nodes=1 --cpus-per-task=2
SLURM_ONE_HOST = {
    **NO_JOB,
    "SLURMD_NODENAME": "node1",
    "SLURM_CLUSTER_NAME": "testbed",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_JOBID": "1",
    "SLURM_JOB_CPUS_PER_NODE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "node1",
    "SLURM_NODE_ALIASES": "(null)",
    "SLURM_PROCID": "0",
    "SLURM_SUBMIT_HOST": "node1",
    "SLURM_TASKS_PER_NODE": "1",
}

# sbatch --nodes=3 --exclude=node2 --ntasks-per-node=2 --gpus-per-task=1 --cpus-per-task=1
SLURM_GPUS_BY_TASK = {
    **NO_JOB,
    "SLURMD_NODENAME": "node1",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_JOBID": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2(x3)",
    "SLURM_JOB_GPUS": "0,1",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "node[1,3-4]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_NODELIST": "node[1,3-4]",
    "SLURM_NPROCS": "6",
    "SLURM_NTASKS": "6",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}

# salloc --nodes=2 --ntasks-per-node=2
SLURM_INTERACTIVE = {
    **NO_JOB,
    "SLURM_JOBID": "10",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "10",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}

# srun --jobid=1 --overlap --nodes=1, from outside of the job
SLURM_SECOND_SHELL = {
    **NO_JOB,
    "SLURMD_NODENAME": "node2",
    "SLURM_JOBID": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "node2",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "node[2-3]",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NODELIST": "node2",
}

PBS = {
    **NO_JOB,
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "4711.head",
    "PBS_JOBNAME": "train",
    "PBS_O_HOST": "login",
    "PBS_O_WORKDIR": "/home/me/run",
    "PBS_QUEUE": "workq",
}

LSF = {
    **NO_JOB,
    "LSB_BATCH_JID": "815",
    "LSB_DJOB_NUMPROC": "4",
    "LSB_HOSTS": "gpu02 gpu02 gpu01 gpu01",
    "LSB_JOBID": "815",
    "LSB_MCPU_HOSTS": "gpu02 2 gpu01 2 ",
    "LSB_QUEUE": "normal",
}

AWKWARD = [
    "printf",
    "<%s>",
    "a b",
    "",
    "$HOME",
    "`ls`",
    "'",
    '"',
    "a\nb",
    "*",
    ":",
    "-n",
    "\\",
    "é",
]
PRINTED = "".join(f"<{word}>" for word in AWKWARD[2:])


def printed_by(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, encoding="utf-8").stdout


def test_outside_of_all_jobs_there_is_no_allocation() -> None:
    assert find_allocation(NO_JOB) is None


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        (SLURM_ONE_HOST, ("node1",)),
        (SLURM_GPUS_BY_TASK, ("node1", "node3", "node4")),
        (SLURM_INTERACTIVE, ("node1", "node2")),
        ({**NO_JOB, "SLURM_NODELIST": "node7"}, ("node7",)),
        (SLURM_SECOND_SHELL, ("node2", "node3")),
    ],
)
def test_slurm_gives_the_hosts_of_the_job(environ: dict[str, str], hosts: tuple[str, ...]) -> None:
    allocation = find_allocation(environ)
    assert isinstance(allocation, Slurm)
    assert allocation.hosts == hosts
    assert (allocation.name, allocation.launcher) == ("Slurm", "slurm")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", "login"),
        ("a,b.example.org", "a b.example.org"),
        ("node[1-3,07-10]", "node1 node2 node3 node07 node08 node09 node10"),
        ("gpu[01-02]-ib,login", "gpu01-ib gpu02-ib login"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[9-11]", "n9 n10 n11"),
        ("rack[1-2]node[1-2]", "rack1node1 rack1node2 rack2node1 rack2node2"),
        ("r[1-2][08,10]x", "r108x r110x r208x r210x"),
        ("[1-2]", "1 2"),
        ("n[2-3],n1,n[1-2]", "n2 n3 n1"),
    ],
)
def test_a_list_of_slurm_is_expanded_in_its_order(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    [
        "node[1-3",
        "node1-3]",
        "node[]",
        "node[3-1]",
        "node[a-b]",
        "node[1-]",
        "node[1,]",
        "node[1-2-3]",
        "node[[1]]",
        "node[٣]",
        "node1,,node2",
        "node1,",
        ",",
        "node1 node2",
        "-node1",
        "node1\n",
        "bgl[000x133]",
    ],
)
def test_a_list_that_slurm_never_writes_is_shown_to_the_user(text: str) -> None:
    with pytest.raises(InputError) as caught:
        find_allocation({**SLURM_ONE_HOST, "SLURM_JOB_NODELIST": text})
    assert "SLURM_JOB_NODELIST" in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "--hostfile" in str(caught.value)


def test_srun_shares_all_of_the_job_on_one_host_and_needs_no_shell() -> None:
    command = Slurm(("node1", "node2")).on_host("node2", ["python", "-c", "1;2"], 7)
    options = command[command.index("srun") + 1 : command.index("--")]
    assert set(options) >= {"--overlap", "--cpu-bind=none", "--nodelist=node2", "--immediate=7"}
    assert command[command.index("--") + 1 :] == ["python", "-c", "1;2"]
    assert "--unset=SRUN_CPUS_PER_TASK" in command[: command.index("srun")]


def test_srun_does_not_see_a_word_that_would_separate_commands() -> None:
    command = Slurm(("node1",)).on_host("node1", AWKWARD, 7)
    assert ":" not in command
    assert printed_by(command[command.index("--") + 1 :]) == PRINTED


def test_gpus_of_tasks_are_asked_for_by_host() -> None:
    allocation = find_allocation(SLURM_GPUS_BY_TASK)
    assert allocation is not None
    assert "--gpus-per-node=2" in allocation.launcher_options
    assert "--gpus-per-node=2" in allocation.on_host("node3", ["hostname"], 7)
    others = find_allocation({**SLURM_ONE_HOST, "SLURM_GPUS_ON_NODE": "2"})
    assert others is not None
    assert not any("gpus" in option for option in others.launcher_options)


def test_the_environment_of_mpiexec_lets_hydra_have_all_of_the_job() -> None:
    user = {**SLURM_GPUS_BY_TASK, "HYDRA_LAUNCHER_EXTRA_ARGS": "--quiet", "SLURM_EXACT": "1"}
    allocation = find_allocation(user)
    assert allocation is not None
    environ = allocation.launcher_environment(user)
    options = environ.pop("HYDRA_LAUNCHER_EXTRA_ARGS")
    assert options == "--quiet --overlap --mem=0 --cpu-bind=none --mpi=none --gpus-per-node=2"
    gone = {"SLURM_EXACT", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK"}
    assert environ == {
        name: value for name, value in SLURM_GPUS_BY_TASK.items() if name not in gone
    }


def test_the_gpus_that_slurm_gives_to_a_host_are_not_those_of_another() -> None:
    own = {**SLURM_INTERACTIVE, "CUDA_VISIBLE_DEVICES": "1"}
    for environ, kept in ((own, True), ({**own, "SLURM_JOB_GPUS": "1"}, False)):
        allocation = find_allocation(environ)
        assert allocation is not None
        assert ("CUDA_VISIBLE_DEVICES" in allocation.launcher_environment(environ)) is kept


def test_srun_says_when_a_job_is_over() -> None:
    allocation = Slurm(("node1",))
    assert allocation.is_over("srun: error: Slurm job 16 has expired\n")
    assert not allocation.is_over("srun: error: Invalid node name specified\n")


def test_pbs_gives_each_host_of_its_file_once(tmp_path: Path) -> None:
    file = tmp_path / "4711.head"
    file.write_text("n02\nn02\nn01\n\nn01\nn02\n")
    allocation = find_allocation({**PBS, "PBS_NODEFILE": str(file)})
    assert isinstance(allocation, Pbs)
    assert allocation.hosts == ("n02", "n01")
    assert (allocation.name, allocation.launcher) == ("PBS", "ssh")
    assert allocation.on_host("n01", ["hostname"], 7)[0] == "ssh"


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_hosts_is_named_with_a_way_out(
    variable: str, content: bytes | None, tmp_path: Path
) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        find_allocation({**NO_JOB, variable: str(file)})
    for words in (variable, str(file), "--hostfile"):
        assert words in str(caught.value)


def test_lsf_gives_each_host_once_wherever_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "815.hostfile"
    file.write_text("gpu02\ngpu02\ngpu01\ngpu01\n")
    without_counts = {name: value for name, value in LSF.items() if name != "LSB_MCPU_HOSTS"}
    for environ in ({**NO_JOB, "LSB_DJOB_HOSTFILE": str(file)}, LSF, without_counts):
        allocation = find_allocation(environ)
        assert isinstance(allocation, Lsf)
        assert allocation.hosts == ("gpu02", "gpu01")
        assert (allocation.name, allocation.launcher) == ("LSF", "lsf")


@pytest.mark.parametrize("text", ["gpu02 2 gpu01", "gpu02 gpu01", "2 gpu02"])
def test_a_list_that_lsf_never_writes_is_shown_to_the_user(text: str) -> None:
    with pytest.raises(InputError, match="LSB_MCPU_HOSTS.*--hostfile") as caught:
        find_allocation({**LSF, "LSB_MCPU_HOSTS": text})
    assert repr(text) in str(caught.value)


def test_blaunch_gets_the_command_as_it_is() -> None:
    command = Lsf(("gpu01",)).on_host("gpu01", AWKWARD, 7)
    assert command == ["blaunch", "-z", "gpu01", "-no-shell", *AWKWARD]


def test_ssh_asks_nothing_and_takes_no_host_for_an_option() -> None:
    command = Ssh(("-oProxyCommand=x",)).on_host("-oProxyCommand=x", ["hostname"], 7)
    assert command[-3:] == ["--", "-oProxyCommand=x", "hostname"]
    assert {"BatchMode=yes", "ConnectTimeout=7"} <= set(command[:-3])


def test_the_shell_that_ssh_runs_interprets_nothing() -> None:
    command = Ssh(("node1",)).on_host("node1", AWKWARD, 7)
    assert printed_by(["/bin/sh", "-c", command[-1]]) == PRINTED


def test_ssh_is_the_program_that_hydra_would_take() -> None:
    allocation = Ssh.to(["b", "a", "b"], {"HYDRA_LAUNCHER_EXEC": "/opt/bin/ssh"})
    assert allocation.hosts == ("b", "a")
    assert allocation.on_host("a", ["hostname"], 7)[0] == "/opt/bin/ssh"
    assert Ssh.to(["a"], {}).on_host("a", ["hostname"], 7)[0] == "ssh"


def test_what_stands_in_for_ssh_runs_a_command_of_a_shell_by_srun(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$*"\nuntil [ "$1" = -- ]; do shift; done\nshift\nexec "$@"\n')
    srun.chmod(0o755)
    agent = [sys.executable, "-I", "-S", entry.__file__, "cli.agent"]
    environ = {**SLURM_INTERACTIVE, "PATH": f"{tmp_path}:{NO_JOB['PATH']}"}
    words = ["node2", "VALUE='a  b';", 'printf "<%s>"', '"$VALUE"']
    result = subprocess.run([*agent, *words], env=environ, capture_output=True, text=True)
    options, printed = result.stdout.split("\n")
    assert "--nodelist=node2" in options
    assert printed == "<a  b>"


def test_an_allocation_never_changes() -> None:
    for allocation in (*(scheduler(("a",)) for scheduler in SCHEDULERS), Ssh(("a",))):
        with pytest.raises(AttributeError):
            allocation.hosts = ("b",)  # type: ignore[misc]
