"""Whatever users type or write into a file works, or one message says what is wrong."""

from __future__ import annotations

import contextlib
import io
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tarantella.cli import main as command
from tarantella.cli.command_line import make_parser
from tarantella.cli.habits import HABITS
from tarantella.cli.hostfile import read_hostfile
from tarantella.errors import InputError
from tarantella.runtime import configuration
from tarantella.runtime.settings import settings_of

FUZZ = settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# What the system lets through as an argument, or as the value of a variable: no zero bytes.
TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"]),
    max_size=20,
)
NUMBERS = st.sampled_from(["0", "1", "-1", "2", "1.5", "1e3", "٣", "9" * 5000, "0x10", " 2", ""])
NAMES = st.text(string.ascii_letters + string.digits + "-._", min_size=1, max_size=80)
LINES = st.one_of(NAMES, NAMES.map(lambda name: f" {name} # {name}"), TEXT, st.just(""))
VARIABLES = sorted(row.variable for row in settings_of(configuration.Configuration).values())


@FUZZ
@given(
    content=st.one_of(
        st.binary(max_size=300),
        st.tuples(st.lists(LINES, max_size=20), st.sampled_from(["\n", "\r\n", "\r"])).map(
            lambda made: made[1].join(made[0]).encode(errors="surrogateescape")
        ),
    ),
    bom=st.booleans(),
)
def test_hostfile(content: bytes, bom: bool, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbf" * bom + content)
    hosts, problem = (), ""
    try:
        hosts = read_hostfile(str(path))
    except InputError as error:
        problem = str(error)
    assert hosts or "hostfile" in problem
    assert len({host.lower() for host in hosts}) == len(hosts)
    assert not [host for host in hosts if host.startswith("-") or set(host) & set(" \t;$`'\"/")]


def test_long_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("".join(f"node{number}\r\n" for number in range(10_000)))
    assert len(read_hostfile(str(path))) == 10_000


def words() -> st.SearchStrategy[list[str]]:
    options = st.sampled_from(sorted([*make_parser().known, *HABITS, "-m"]))
    values = st.one_of(
        TEXT, NUMBERS, st.sampled_from(["A=b", "--", "script.py", "x" * 5000, ".", "json"])
    )
    together = st.builds(lambda option, value: f"{option}={value}", options, values)
    misspelt = options.map(lambda option: option[:-1])
    return st.lists(st.one_of(options, values, together, misspelt), max_size=8)


@FUZZ
@given(arguments=words())
def test_command_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            status = command.main(["--dry-run", *arguments])
        except SystemExit as end:  # of --help and --version
            status = int(end.code or 0)
    assert status in (0, 2)
    if status == 2:
        message = errors.getvalue()
        assert message.startswith("tarantella: ")
        assert "Traceback" not in message
        # Some have what was typed, and up to two commands with the same words.
        assert message.count("\n") <= 1 + 3 * sum(word.count("\n") for word in arguments)


@FUZZ
@given(name=st.sampled_from(VARIABLES), value=st.one_of(TEXT, NUMBERS))
def test_variables(name: str, value: str) -> None:
    problem = name
    try:
        configuration.read_configuration({name: value})
    except InputError as error:
        problem = str(error)
    assert name in problem
