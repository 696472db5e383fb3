"""What shells complete: real ones, at a terminal, when somebody presses Tab."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tarantella.cli.command_line import make_parser
from tarantella.cli.completion import completion_script

LIMIT = 60  # seconds; a hang is what it catches
STARTS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
BEFORE = {
    "bash": "bind 'set completion-query-items 0'; bind 'set page-completions off'",
    "zsh": "autoload -Uz compinit; compinit -u -D; LISTMAX=1000",
}


class Shell:
    """A shell at a terminal, in which `tarantella` prints its arguments."""

    def __init__(self, name: str, folder: Path) -> None:
        script = folder / "completion"
        script.write_text(completion_script(name))
        self._terminal, inner = pty.openpty()
        environ = {**os.environ, "TERM": "dumb", "PS1": "", "HISTFILE": ""}
        self._process = subprocess.Popen(
            STARTS[name],
            cwd=folder,
            env=environ,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self._type(f"{BEFORE[name]}; source {script}\n")
        self._type("tarantella() { printf '(%s)' \"$@\"; }\n")
        self._type("printf '%s\\n' rea''dy\n")
        self._read_until("ready\r\n")

    def run(self, line: str) -> str:
        """The arguments of the command, after all that was completed; `\t` is the Tab key."""
        self._type(f"tarantella {line} ; printf '%s\\n' do''ne\n")
        return re.findall(r"\(.*\)", self._read_until("done\r\n"))[-1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def _read_until(self, end: str) -> str:
        seen = ""
        deadline = time.monotonic() + LIMIT
        while end not in seen:
            ready, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert ready, seen
            seen += os.read(self._terminal, 4096).decode(errors="replace")
        return seen


@pytest.fixture(params=list(STARTS), scope="module")
def shell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    folder = tmp_path_factory.mktemp("shell")
    for name in ("hosts.txt", "train me.py", "INFO.txt"):
        (folder / name).touch()
    (folder / "logs").mkdir()
    (folder / "logs.txt").touch()
    shell = Shell(request.param, folder)
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("--no-gpu --dry\t", "(--no-gpu)(--dry-run)"),
        ("-n 2 --log-level I\t --strict", "(-n)(2)(--log-level)(INFO)(--strict)"),
        ("--log-level=DE\t", "(--log-level=DEBUG)"),
        ("--gradient-type bf\t -- x", "(--gradient-type)(bfloat16)(--)(x)"),
        ("--completion z\t", "(--completion)(zsh)"),
        ("--hostfile ho\t", "(--hostfile)(hosts.txt)"),
        ("--hostfile=ho\t", "(--hostfile=hosts.txt)"),
        ("--output-dir lo\t", "(--output-dir)(logs)"),
        ("-x A=1 --stri\t", "(-x)(A=1)(--strict)"),
        ("-n 2 tra\t", "(-n)(2)(train me.py)"),
        ("-n 2 -- tra\t ho\t", "(-n)(2)(--)(train me.py)(hosts.txt)"),
        ("x.py --dry\t", "(x.py)(--dry)"),
        ("-m pkg.x --dry\t ho\t", "(-m)(pkg.x)(--dry)(hosts.txt)"),
        ("-n ho\t", "(-n)(ho)"),
    ],
)
def test_completed(shell: Shell, typed: str, completed: str) -> None:
    assert shell.run(typed).replace("/)", ")") == completed  # zsh has no slash at the end


@pytest.mark.parametrize("shell_name", list(STARTS))
def test_all_options_are_completed(shell_name: str) -> None:
    script = completion_script(shell_name)
    for name in [*make_parser().known, "-m"]:
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", script), name


def test_the_command_prints_the_script_without_tensorflow() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "tarantella.cli", "--completion", "bash"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (result.returncode, result.stdout) == (0, completion_script("bash"))
    loaded = set(re.findall(r"\| +(\w+)$", result.stderr, re.MULTILINE))
    assert "tarantella" in loaded
    assert not {"tensorflow", "keras", "mpi4py"} & loaded
