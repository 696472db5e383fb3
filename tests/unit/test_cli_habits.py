"""What people type for other launchers: one message has our spelling of exactly that."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tarantella.cli import main as command
from tarantella.cli.command_line import make_parser, parse
from tarantella.cli.habits import HABITS, SUBCOMMANDS
from tarantella.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "train.ipynb"):
        (tmp_path / name).touch()


def told(line: str) -> str:
    with pytest.raises(InputError) as raised:
        parse(shlex.split(line))
    return str(raised.value)


LISTED = "with a file hosts that lists a, b, one per line"


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("-np 2", "-n 2"),
        ("-np=2", "-n 2"),
        ("--np 2", "-n 2"),
        ("--gpus 2", "-n 2 --gpu"),
        ("--num-gpus=2", "-n 2 --gpu"),
        ("--gpus 0", "--no-gpu"),
        ("--gpus all", "--gpu"),
        ("--gpus -1", "--gpu"),
        ("--gpus v100:2", "-n 2 --gpu"),
        ("--gpus a100:2,v100:2", "-n N --gpu"),
        ("-G 2", "-n 2 --gpu"),
        ("--gres=gpu:2", "--n-per-node 2 --gpu"),
        ("--gres gpu:v100:2", "--n-per-node 2 --gpu"),
        ("--gpus-per-node v100:2", "--n-per-node 2 --gpu"),
        ("--gpus 0,2", "-x CUDA_VISIBLE_DEVICES=0,2 --gpu"),
        ("--gpus-per-node 4", "--n-per-node 4 --gpu"),
        ("--gpus-per-node=auto", "--gpu"),
        ("--nproc_per_node 2", "--n-per-node 2"),
        ("--nproc-per-node=2", "--n-per-node 2"),
        ("-ppn 2", "--n-per-node 2"),
        ("-hostfile f", "--hostfile f"),
        ("--machinefile 'my hosts'", "--hostfile 'my hosts'"),
        ("--host localhost:2", "--n-per-node 2"),
        ("-genv A 'b c'", "-x 'A=b c'"),
        ("-genv A b=c", "-x A=b=c"),
        ("--cpu", "--no-gpu"),
        ("-np", "-n N"),
    ],
)
def test_one_option(typed: str, ours: str) -> None:
    message = (
        f"{typed} is not an option of tarantella: write `tarantella {ours} -- train.py --a b`."
    )
    if typed != "-np":
        assert told(f"{typed} train.py --a b") == message
    assert told(f"{typed} -- train.py --a b") == message


@pytest.mark.parametrize(
    ("typed", "ours", "remark"),
    [
        ("-H a:4,b:4", "--hostfile hosts --n-per-node 4", LISTED),
        ("--hosts a,b", "--hostfile hosts", LISTED),
        (
            "-H a:4,b:2",
            "--hostfile hosts --n-per-node N",
            f"{LISTED}, where N, the number of ranks, is the same on each host",
        ),
        ("--nnodes 1", "", "as one host needs no option"),
        (
            "--nnodes=2",
            "--hostfile hosts",
            "with a file hosts that lists them, one per line; in a Slurm, PBS or LSF job, leave "
            "out --hostfile",
        ),
        ("--nproc_per_node=gpu", "", "as there is one rank for each GPU without a number"),
        ("--master_port 29500", "", "as the ranks find their hosts, and each other, without it"),
    ],
)
def test_one_option_with_more_to_say(typed: str, ours: str, remark: str) -> None:
    written = " ".join(filter(None, ["tarantella", ours, "-- train.py"]))
    message = f"{typed} is not an option of tarantella: write `{written}`, {remark}."
    assert told(f"{typed} train.py") == message


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("-np 8 -H a:4,b:4", "--hostfile hosts --n-per-node 4"),
        ("-np 6 --hosts a,b", "--hostfile hosts --n-per-node 3"),
        ("--nnodes 2 --nproc_per_node 4", "--hostfile hosts --n-per-node 4"),
        ("-hosts a,b -n 6", "--hostfile hosts --n-per-node 3"),
        ("-np 4 --gpus 0", "-n 4 --no-gpu"),
        ("--gpus 8 -H a,b", "--hostfile hosts --n-per-node 4 --gpu"),
        ("--hostfile=hosts -np 4", "--n-per-node N --hostfile=hosts"),
        ("--hostfile hosts -np 4", "--n-per-node N --hostfile hosts"),
        ("--no-gpu -np 2 --timeline t.json", "-n 2 --no-gpu --timeline t.json"),
    ],
)
def test_several_options_are_told_of_together(typed: str, ours: str) -> None:
    for python in ("", "python ", "/usr/bin/python3 "):
        assert f" of tarantella: write `tarantella {ours} -- train.py`" in told(
            f"{typed} {python}train.py"
        )
    assert f"write `tarantella {ours} -m pkg.train 3`" in told(f"{typed} -m pkg.train 3")


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--no-gpu --gpus 2", "-n 2 --no-gpu"),
        ("--gpus 2 --cpu", "-n 2 --no-gpu"),
        ("--gpu --cpu", "--no-gpu"),
        ("--no-gpu --gpus 0", "--no-gpu"),
        ("--gpu --gpus 2", "-n 2 --gpu"),
        ("-n 4 --gpus 4", "--gpu -n 4"),
        ("-n 4 --gpus 2", "--gpu -n 4"),
        ("-n 4 --gpus-per-node 2", "--gpu -n 4"),
        ("--n-per-node=4 --gpus 8", "--gpu --n-per-node=4"),
        ("-np 4 --gpus 2", "-n 4 --gpu"),
        ("--ntasks 4 --gpus-per-node 2", "-n 4 --gpu"),
        ("--hostfile hosts -H a:4,b:4", "--n-per-node 4 --hostfile hosts"),
    ],
)
def test_what_is_written_can_be_run_where_options_overlap(typed: str, ours: str) -> None:
    message = told(f"{typed} train.py")
    assert message.endswith(f" of tarantella: write `tarantella {ours} -- train.py`.")
    parse(shlex.split(f"{ours} -- train.py"))


def test_the_command_says_it_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["-np", "2", "python", "train.py"]) == 2
    printed = capfd.readouterr()
    line = (
        "tarantella: -np 2 is not an option of tarantella: write `tarantella -n 2 -- train.py`.\n"
    )
    assert (printed.out, printed.err) == ("", line)


def test_no_habit_is_an_option_of_ours() -> None:
    assert not set(HABITS) & set(make_parser().known)


def test_options_that_come_too_late() -> None:
    assert told("--strict train.py --a -n 2 --no-gpu b") == (
        "-n 2 --no-gpu after train.py would be for the script: write `tarantella --strict -n 2 "
        "--no-gpu -- train.py --a b` if it is for tarantella, and `tarantella --strict -- train.py "
        "--a -n 2 --no-gpu b` if it is not."
    )
    for line in ("-- train.py -n 2", "-n 2 train.py -n 3", "train.py --help --log-level INFO"):
        assert parse(line.split()).program[0] == "train.py"


def test_options_of_other_launchers_in_front_of_options_that_come_too_late() -> None:
    assert told("-np 2 train.py --no-gpu --a") == (
        "-np 2 is not an option of tarantella: write `tarantella -n 2 --no-gpu -- train.py --a` if "
        "--no-gpu is for tarantella, and `tarantella -n 2 -- train.py --no-gpu --a` if it is not."
    )
    assert "write `tarantella -n 4 -- train.py` if -n 4 is" in told("-np 2 python train.py -n 4")
    assert told("-np 2 -- train.py --no-gpu").endswith("`tarantella -n 2 -- train.py --no-gpu`.")


def test_python_in_front_of_the_script() -> None:
    assert told("-n 2 python train.py 3").endswith(
        "leave it out, as the command starts Python: tarantella [options] -- train.py 3"
    )


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("run train.py --a b", "tarantella -- train.py --a b"),
        ("run -n 2 train.py", "tarantella -n 2 -- train.py"),
        ("-n 2 launch --no-gpu python train.py", "tarantella -n 2 --no-gpu -- train.py"),
        ("exec -m pkg.train", "tarantella -m pkg.train"),
        ("run", "tarantella -- script.py"),
        ("help", "tarantella --help"),
        ("help run", "tarantella --help"),
        ("version", "tarantella --version"),
        ("run --help", "tarantella --help"),
        ("-n 2 run -h", "tarantella -h"),
        ("run --version train.py", "tarantella --version"),
        ("run train.py --help", "tarantella -- train.py --help"),
        ("run -- train.py -n 2", "tarantella -- train.py -n 2"),
    ],
)
def test_a_subcommand_of_another_command_is_told_of(typed: str, ours: str) -> None:
    word = next(each for each in typed.split() if each in SUBCOMMANDS)
    assert told(typed) == f"tarantella has no subcommand `{word}`: write `{ours}`."


def test_options_that_come_too_late_after_a_subcommand_are_told_of() -> None:
    assert told("run train.py -n 2 --no-gpu --a") == (
        "tarantella has no subcommand `run`: write `tarantella -n 2 --no-gpu -- train.py --a` if "
        "-n 2 --no-gpu is for tarantella, and `tarantella -- train.py -n 2 --no-gpu --a` if it is "
        "not."
    )


def test_options_of_other_launchers_after_a_subcommand_are_translated() -> None:
    assert told("run -np 2 train.py") == (
        "-np 2 is not an option of tarantella: write `tarantella -n 2 -- train.py`."
    )


def test_a_script_may_have_the_name_of_a_subcommand(tmp_path: Path) -> None:
    assert told("-- run x") == "There is no script run: check its path."
    (tmp_path / "run").touch()
    assert parse(["run", "x"]).program == ("run", "x")


def test_notebook() -> None:
    assert told("-n 2 train.ipynb") == (
        "train.ipynb is a notebook: call tnt.run in it, or make a script of it with `jupyter "
        "nbconvert --to script train.ipynb` and run `tarantella [options] -- train.py`."
    )
