"""What the README shows works: every block of it is found and run, also those added later."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")

Shell = Callable[..., Any]


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands() -> Iterator[str]:
    for block in blocks("bash"):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line for line in lines if line and not line.startswith("#"))


def as_tested(command: str) -> tuple[str, bool]:
    """The command to run for a command of the README, and whether it runs in the repository.

    The tests cannot run themselves, nor install anything; but they see that there is such a
    target, and that pip takes the package and the extras asked for.
    """
    if command.startswith("make "):
        return command.replace("make ", "make --dry-run ", 1), True
    if command.startswith("pip install "):
        flags = "--dry-run --no-deps --no-build-isolation"
        return command.replace("pip install", f"python -m pip install {flags}", 1), True
    return command, False


def file_name(block: str) -> str:
    """A python block that starts with `# name.py` is the file that the commands use."""
    first = re.match(r"# (\w+\.py)\n", block)
    return first[1] if first else "block.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for block in blocks("python"):
        (tmp_path / file_name(block)).write_text(block)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    return tmp_path


def test_every_block_is_one_that_these_tests_run() -> None:
    fences = re.findall(r"^```(\w*)$", README, re.MULTILINE)
    assert set(fences[0::2]) == {"bash", "python"}
    assert set(fences[1::2]) == {""}


@pytest.mark.parametrize("command", list(commands()))
def test_command(command: str, shell: Shell, folder: Path) -> None:
    line, in_repository = as_tested(command)
    finished = shell(line, cwd=REPOSITORY if in_repository else folder)
    assert finished.status == 0, finished.output
    assert "does not provide the extra" not in finished.output


@pytest.mark.parametrize("block", blocks("python"))
def test_python_block_on_two_ranks(block: str, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / file_name(block)).write_text(block)
    finished = shell(f"tarantella -n 2 --no-gpu -- {file_name(block)}")
    assert finished.status == 0, finished.output


def test_options_are_those_of_the_command(shell: Shell) -> None:
    section = README.split("## The command")[1].split("\n## ")[0]
    table = "".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| `"))
    help_text = shell("tarantella --help").output
    assert set(OPTION.findall(table)) == set(OPTION.findall(help_text)) - {"-h"}
