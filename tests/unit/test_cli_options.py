"""The command line: what is understood, and what a user is told about a mistake."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tarantella.cli.command_line import make_parser, parse
from tarantella.cli.options import Options
from tarantella.errors import InputError
from tarantella.runtime.configuration import Configuration, read_configuration
from tarantella.runtime.settings import Group, settings_of


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text("")
    return path


def test_script_and_its_arguments_follow_two_dashes() -> None:
    options = parse(["-n", "2", "--", "script.py", "--epochs", "3", "--", "-n", "4"])
    assert options.program == ("script.py", "--epochs", "3", "--", "-n", "4")
    assert options.ranks == 2


def test_two_dashes_may_be_left_out() -> None:
    options = parse(["-n", "2", "--no-gpu", "-x", "A=1", "B=2", "script.py", "-n", "4"])
    assert options.program == ("script.py", "-n", "4")
    assert options.ranks == 2
    assert options.environment == (("A", "1"), ("B", "2"))


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_module_and_its_arguments_follow_its_flag(dashes: list[str]) -> None:
    options = parse(["-n", "2", "-x", "A=1", *dashes, "-m", "json.tool", "-n", "4", "--", "-m"])
    assert (options.module, options.ranks) == (True, 2)
    assert options.program == ("json.tool", "-n", "4", "--", "-m")


def test_nothing_asked_for() -> None:
    assert parse(["script.py"]) == Options(program=("script.py",))


def test_every_option() -> None:
    assert parse(
        [
            *("-n", "3", "--no-gpus", "--log-level", "debug", "--log-on-all-devices"),
            *("--output-on-all-devices", "--fusion-threshold=0", "-x", "A=1", "-x", "B=2"),
            *("--python-interpreter", f"{sys.executable} -X dev", "--dry-run"),
            *("--timeline", "trace.json", "--", "script.py"),
        ]
    ) == Options(
        program=("script.py",),
        ranks=3,
        no_gpu=True,
        log_level="DEBUG",
        log_on_all_devices=True,
        output_on_all_devices=True,
        fusion_threshold_kb=0,
        timeline="trace.json",
        given=frozenset(
            (
                "no_gpu",
                "log_level",
                "log_on_all_devices",
                "output_on_all_devices",
                "fusion_threshold_kb",
                "timeline",
            )
        ),
        environment=(("A", "1"), ("B", "2")),
        interpreter=(sys.executable, "-X", "dev"),
        dry_run=True,
    )


GIVEN_FOR_RANKS: dict[str, tuple[list[str], Any]] = {
    "log_level": (["--log-level", "warn"], "WARNING"),
    "log_on_all_devices": (["--log-on-all-devices"], True),
    "output_on_all_devices": (["--output-on-all-devices"], True),
    "quiet": (["--quiet"], True),
    "output_dir": (["--output-dir", "kept here"], "kept here"),
    "fusion_threshold_kb": (["--fusion-threshold", "256"], 256),
    "gradient_type": (["--gradient-type", "BFloat16"], "bfloat16"),
    "strict": (["--strict"], True),
    "timeline": (["--timeline", " a b"], " a b"),
    "stall_seconds": (["--stall-timeout", "0"], 0),
    "grace_seconds": (["--grace-period", "7"], 7),
    "gpu": (["--gpu"], True),
    "no_gpu": (["--no-gpu"], True),
    "gpu_sums": (["--gpu-sums", "HOST"], "host"),
}


def test_ranks_read_what_the_command_line_says(tmp_path: Path) -> None:
    """Each row of the table with an option and a variable, also with its default value."""
    rows = settings_of(Configuration)
    both = [name for name, row in rows.items() if row.variable and row.option]
    assert sorted(both) == sorted(GIVEN_FOR_RANKS)
    for name, (arguments, value) in GIVEN_FOR_RANKS.items():
        options = parse([*arguments, "--", "script.py"])
        assert getattr(options, name) == value
        assert list(options.variables) == [rows[name].variable]
        expected = str(tmp_path / value) if name == "output_dir" else value
        assert getattr(read_configuration(options.variables), name) == expected
    assert parse(["script.py"]).variables == {}


def test_every_row_with_an_option_is_offered_once() -> None:
    names = [n for row in settings_of(Options).values() if row.option for n in row.option.names]
    assert sorted(make_parser().known) == sorted([*names, "--version", "-h", "--help"])


def test_help_has_groups_and_examples_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = make_parser().format_help().splitlines()
    assert max(map(len, lines)) <= 80
    titles = [line[:-1] for line in lines if re.fullmatch(r"\w.*:", line)]
    assert titles == [*(group.value for group in Group), "examples"]
    examples = [line for line in lines if line.startswith("  tarantella ")]
    assert len(examples) > 5
    Path("train.py").touch()
    Path("package").mkdir()
    for line in examples:
        _, *arguments = re.split(r" {3,}", line.strip())[0].split()
        parse(arguments)


def test_variables_keep_their_order_and_every_byte() -> None:
    values = ["a b", "'q' \"d\"", "$HOME;`id`", "x=y=z", "", "two\nlines", "\udcff"]
    given = [f"V{number}={value}" for number, value in enumerate(values)]
    options = parse(["-x", *given[:3], "-x", *given[3:], "--", "script.py"])
    assert options.environment == tuple((f"V{i}", value) for i, value in enumerate(values))


@pytest.mark.parametrize("too", [[], ["--n-per-node", "2"]])
def test_ranks_with_a_hostfile_are_those_of_each_host(too: list[str]) -> None:
    options = parse(["-n", "2", "--hostfile", "hosts", *too, "--", "script.py"])
    assert (options.ranks, options.ranks_per_host) == (None, 2)
    assert options.notes == ("-n 2 with --hostfile means 2 on each host, as --n-per-node 2 does.",)


@pytest.mark.parametrize("name", ["WARN", "warn", "Warning"])
def test_another_name_for_warnings(name: str) -> None:
    assert parse(["--log-level", name, "--", "script.py"]).log_level == "WARNING"


def test_no_interpreter_takes_a_program_as_it_is() -> None:
    assert parse(["--python-interpreter", "", "--", "sh", "-c", "exit"]).interpreter == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script"),
        (["-n", "2"], "no script"),
        (["-n", "0", "--", "script.py"], "-n: '0'"),
        (["-n", "1000000", "--", "script.py"], "-n: 1000000 ranks are more than 1024"),
        (["-n", "-1", "--", "script.py"], "-n"),
        (["-n", "two", "--", "script.py"], "-n: 'two'"),
        (["--fusion-threshold", "-1", "--", "script.py"], "--fusion-threshold"),
        (["--fusion-threshold", "1.5", "--", "script.py"], "--fusion-threshold: '1.5'"),
        (["--timeline", "", "--", "script.py"], "--timeline: '' is not the name of a file"),
        (["--log-level", "LOUD", "--", "script.py"], "--log-level: 'LOUD'"),
        (["--no-gup", "--", "script.py"], "--no-gup is not an option.*--no-gpu"),
        (
            ["-n", "2", "--hostfile", "hosts", "--n-per-node", "4", "--", "script.py"],
            "-n 2 and --n-per-node 4 contradict each other",
        ),
        (["-n", "2", "--n-per-node", "2", "--", "script.py"], "exclude each other"),
        (["--gpu", "--no-gpu", "--", "script.py"], "--gpu and --no-gpu exclude each other"),
        (["--devices-per-node", "0", "--", "script.py"], "--devices-per-node: '0'"),
        (["--force", "--", "script.py"], "--force needs --cleanup"),
        (["--allow-fewer-hosts", "--", "script.py"], "--allow-fewer-hosts needs --max-rest"),
        (["--max-restarts", "-1", "--", "script.py"], "--max-restarts: '-1' is not a whole number"),
        (["--stall-timeout", "soon", "--", "script.py"], "--stall-timeout: 'soon' is not a whole"),
        (["--output-dir", "", "--", "script.py"], "--output-dir: '' is not the name of a folder"),
        (["--cleanup", "--dry-run", "--", "script.py"], "use one of them"),
        (["-x", "A", "--", "script.py"], "-x: 'A' has no '='"),
        (["-x", "A=1", "B", "--", "script.py"], "-x: 'B' has no '='"),
        (["-x", "script.py"], "-x: 'script.py' has no '='"),
        (["-x", "1A=2", "--", "script.py"], "'1A' is not a name"),
        (["-x", "=2", "--", "script.py"], "'' is not a name"),
        (["--", "missing.py"], "no script missing.py"),
        (
            ["--", "python", "train.py"],
            "no script python: leave it out, as the command starts Python",
        ),
        (["--", "."], "directory"),
        (["-m"], "-m needs the name of a module"),
        (["-m", "nothing.here"], "There is no module nothing.here: .* has nothing.$"),
        (["--cleanup", "-m", "nothing"], "There is no module nothing: "),
        (["-m", "script.py"], "script.py is a file: leave out -m, or write -m script.$"),
        (["--python-interpreter", "", "-m", "script"], "-m needs Python"),
        (["--python-interpreter", "no-such-python", "--", "script.py"], "'no-such-python'"),
        (["--python-interpreter", "'", "--", "script.py"], "--python-interpreter"),
        (["--python-interpreter", "", "--", "script.py"], "script.py is not a program"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(arguments)


def test_script_that_cannot_be_read(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"script\.py cannot be read: Permission denied"):
        parse(["--", "script.py"])
