"""Everything shown in the README and the docs works: the tests find and run every block.

So do the examples in docstrings, which the API reference shows.

test_job_scripts.py runs the job scripts; the tests of the examples run the commands on their page,
and check the results. A block that a command runs is not run once more.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted(REPOSITORY.glob("docs/*.md")),
]
EXAMPLES = REPOSITORY / "docs" / "examples.md"

STARTS_RANKS = "tnt.run("
RUNS_NOTHING = ("--dry-run", "--cleanup")
# Commands that only show an option, or more ranks: tests of these train with them. Here they run a
# script that takes less time.
SHOWS_AN_OPTION = re.compile(r"--log-level|--report|--output-dir|--timeline|-n 3|--n-per-node 2")
STAND_IN = """
import tarantella as tnt
assert tnt.allreduce(1) == tnt.get_size() > 1
"""
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")

Shell = Callable[..., Any]


def blocks(language: str, pages: Sequence[Path] = PAGES) -> list[str]:
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    found = [block for page in pages for block in fenced.findall(page.read_text())]
    return list(dict.fromkeys(text for name, text in found if name == language))


def commands() -> list[str]:
    """The commands of all blocks, each once, except those that other tests run."""
    of_examples = lines(blocks("bash", [EXAMPLES]))
    scripts = [block for block in blocks("bash") if block.startswith("#!")]
    others = lines(block for block in blocks("bash") if block not in scripts)
    return [line for line in others if line not in of_examples]


def lines(of_blocks: Iterable[str]) -> list[str]:
    """The lines of the blocks, each once, without comments; continued lines are joined."""
    joined = [line for block in of_blocks for line in block.replace("\\\n", " ").splitlines()]
    return list(dict.fromkeys(line for line in joined if line and not line.startswith("#")))


def as_tested(command: str) -> tuple[str, bool]:
    """The command to run for a command on a page, and whether it runs in the repository.

    The tests cannot run themselves, nor install anything; but they check that the make target
    exists, and that pip accepts the package and its extras.
    """
    if command.startswith("make "):
        return command.replace("make ", "make --dry-run ", 1), True
    if command.startswith("pip install "):
        flags = "--dry-run --no-deps --no-build-isolation"
        return command.replace("pip install", f"python -m pip install {flags}", 1), True
    if command == "source .venv/bin/activate":
        return command, True
    if command == "python -m build":  # test_release.py builds, and installs the result
        return f"{command} --version", True
    return command, False


def examples() -> dict[str, str]:
    """The examples in docstrings, as scripts, by name; those with prompts also check the output."""
    found = {}
    for path in sorted((REPOSITORY / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node) or ""
            name = f"{path.stem}_{node.name}.py"
            for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
                found[name] = block
            if ">>> import tarantella" in text:
                found[name] = CHECK_PROMPTS.format(text=text, name=name)
    return found


CHECK_PROMPTS = """\
import doctest

text = {text!r}
test = doctest.DocTestParser().get_doctest(text, {{}}, {name!r}, None, 0)
assert doctest.DocTestRunner().run(test).failed == 0
"""


def file_name(block: str) -> str:
    """A Python block that starts with `# name.py` is the file that the commands use."""
    first = re.match(r"# (\w+\.py)\n", block)
    return first[1] if first else "block.py"


def is_run_by_a_command(block: str) -> bool:
    """Whether the command of a page runs it on ranks, or test_examples.py does."""
    if block == (REPOSITORY / "examples" / "quickstart.py").read_text():
        return True
    last_word = f" {file_name(block)}"
    running = [line for line in commands() if not any(word in line for word in RUNS_NOTHING)]
    return any(line.endswith(last_word) for line in running if not SHOWS_AN_OPTION.search(line))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for block in blocks("python"):
        (tmp_path / file_name(block)).write_text(block)
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def test_every_block_is_one_that_these_tests_run() -> None:
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        opening = {re.sub(r"^{(toctree|eval-rst|include)}.*", "of Sphinx", f) for f in fences[0::2]}
        assert opening <= {"bash", "python", "of Sphinx"}, page
        assert set(fences[1::2]) <= {""}, page


def test_blocks_with_one_name_are_one_file() -> None:
    names = [file_name(block) for block in blocks("python")]
    assert len(set(names)) == len(names), "two different blocks have the same name"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Pages are also read as files, where the site build does not check their links."""
    for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", commands())
def test_command(command: str, shell: Shell, folder: Path, request: pytest.FixtureRequest) -> None:
    line, in_repository = as_tested(command)
    if "--hostfile hosts" in command:
        testbed = request.getfixturevalue("hosts")
        (folder / "hosts").write_text("# the testbed\n" + "\n".join(testbed.names))
        line = shlex.join(testbed.nodes[0].command("env", f"--chdir={folder}", "bash", "-c", line))
    if SHOWS_AN_OPTION.search(command) and command.endswith(" train.py"):
        (folder / "train.py").write_text(STAND_IN)
    finished = shell(line, cwd=REPOSITORY if in_repository else folder)
    assert finished.status == 0, finished.output
    assert "does not provide the extra" not in finished.output


def test_python_that_starts_ranks_is_run_by_a_command() -> None:
    """It cannot run on ranks itself. An example in a docstring is one that a page has, too."""
    starting = [block for block in blocks("python") if STARTS_RANKS in block]
    assert {f"python {file_name(block)}" for block in starting} <= set(commands())
    in_docstrings = [text for text in examples().values() if STARTS_RANKS in text]
    assert {text.strip() for text in in_docstrings} <= {
        block.partition("\n")[2].strip() for block in starting
    }


BLOCKS_ON_RANKS = [file_name(each) for each in blocks("python") if not is_run_by_a_command(each)]
EXAMPLES_ON_RANKS = [name for name, text in examples().items() if STARTS_RANKS not in text]
# TensorFlow takes seconds to load, so one process runs the blocks one after the other.
RUN_ALL = """
import runpy, sys, traceback

for name in sys.argv[1:]:
    try:
        runpy.run_path(name, run_name="__main__")
        print("ran", name, flush=True)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="session")
def blocks_on_two_ranks(
    printed_on_two_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The output of all Python blocks, and of the examples in docstrings, on two ranks."""
    folder = tmp_path_factory.mktemp("blocks")
    scripts = {file_name(block): block for block in blocks("python")} | examples()
    for name, text in scripts.items():
        (folder / name).write_text(text)
    (folder / "run_all.py").write_text(RUN_ALL)
    on_ranks = [*BLOCKS_ON_RANKS, *EXAMPLES_ON_RANKS]
    return printed_on_two_ranks(folder, "run_all.py", *on_ranks, timeout=600)


@pytest.mark.parametrize("name", BLOCKS_ON_RANKS)
def test_python_block_on_two_ranks(name: str, blocks_on_two_ranks: str) -> None:
    for rank in (0, 1):
        assert f"[rank {rank}] ran {name}\n" in blocks_on_two_ranks, blocks_on_two_ranks


@pytest.mark.parametrize("name", EXAMPLES_ON_RANKS)
def test_example_of_a_docstring_on_two_ranks(name: str, blocks_on_two_ranks: str) -> None:
    for rank in (0, 1):
        assert f"[rank {rank}] ran {name}\n" in blocks_on_two_ranks, blocks_on_two_ranks


def test_options_are_those_of_the_command(shell: Shell) -> None:
    section = (REPOSITORY / "docs" / "command.md").read_text().split("\n## ")[1]
    table = "".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| `"))
    help_text = shell("tarantella --help").output
    assert set(OPTION.findall(table)) == set(OPTION.findall(help_text)) - {"-h"}


def test_the_map_of_the_code_names_what_is_there() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    package = REPOSITORY / "src" / "tarantella"
    named = {name for name in re.findall(r"`([^`\s]+)`", page) if re.search(r"\w/|\.py$", name)}
    named -= {"keras.py", "tensorflow.py"}  # in the folder that stands before them
    assert [
        n for n in sorted(named) if not ((package / n).exists() or (REPOSITORY / n).exists())
    ] == []
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert folders <= named
