"""The plugin that runs tests on ranks, tried on small suites of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rank_plugin.group import processes_with

PLUGIN_PATH = Path(__file__).parents[1] / "plugin"

# One suite in which almost everything happens that can happen to a test.
SUITE = """
import os
import signal
import time

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.ranks(2)
rank = MPI.COMM_WORLD.rank
barrier = MPI.COMM_WORLD.Barrier
seen = []


@pytest.mark.ranks(1, 3)
def test_passes(num_ranks):
    assert MPI.COMM_WORLD.allreduce(1) == num_ranks


def test_rank_1_fails_while_rank_0_waits():
    print("words of rank", rank)
    assert rank == 0, "no good"
    barrier()


def test_after_failure():
    barrier()


@pytest.mark.ranks(2, timeout=2)
def test_hangs():
    print("words before the hang")
    if rank == 1:
        time.sleep(1000)
    barrier()


def test_after_hang():
    barrier()


def test_is_killed():
    print("last words of rank", rank, end="")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


def test_exits():
    if rank == 1:
        os._exit(3)
    barrier()


def test_aborts():
    if rank == 0:
        MPI.COMM_WORLD.Abort(5)
    barrier()


def test_after_abort():
    barrier()


def test_all_ranks_fail():
    seen.append(os.getpid())
    assert not seen


def test_same_ranks_after_all_failed():
    assert seen == [os.getpid()]


@pytest.mark.parametrize("letter", ["a", "b"])
def test_letters(letter):
    assert letter == "a"


@pytest.mark.skip(reason="not today")
def test_skipped():
    assert False


def test_skipped_on_one_rank():
    if rank == 1:
        pytest.skip("only here")


@pytest.mark.xfail
def test_expected_on_one_rank():
    assert rank == 0


@pytest.mark.xfail(strict=True)
def test_expected_while_others_wait():
    assert rank == 0
    barrier()


@pytest.fixture
def broken():
    assert rank == 0
    yield


def test_setup_fails(broken):
    pass


class TestClass:
    def test_directories(self, tmp_path, shared_tmp_path):
        own = MPI.COMM_WORLD.allgather(tmp_path)
        shared = MPI.COMM_WORLD.allgather(shared_tmp_path)
        assert own[0] != own[1]
        assert shared[0] == shared[1]
        assert not list(shared_tmp_path.iterdir())
        barrier()
        (shared_tmp_path / str(rank)).touch()


@pytest.mark.ranks(1)
def test_one_rank_is_not_the_controller():
    assert "PMI_RANK" in os.environ
"""


@dataclass
class InnerRun:
    """A pytest of its own, and how it went."""

    process: subprocess.Popen[str]
    mark: str
    output: str = ""
    seconds: float = 0.0

    def finish(self) -> InnerRun:
        started = time.monotonic()
        self.output, _ = self.process.communicate(timeout=300)
        self.seconds = time.monotonic() - started
        return self

    @property
    def status(self) -> int:
        return self.process.returncode

    def outcomes(self) -> dict[str, str]:
        """The outcome of each test by its name."""
        lines = re.findall(r"^\S*?::(\S+) ([A-Z]+)\b.*\[ *\d+%\]$", self.output, re.MULTILINE)
        return dict(lines)

    def failure(self, test: str) -> str:
        """What is shown of a failed test."""
        parts = re.split(r"^_{3,} (?:ERROR at setup of )?(\S+) _{3,}$", self.output, flags=re.M)
        shown = dict(zip(parts[1::2], parts[2::2], strict=True))
        assert test in shown, self.output
        return shown[test]

    def processes(self) -> set[int]:
        return processes_with(f"INNER_RUN={self.mark}")


RunInner = Callable[..., InnerRun]


def start_inner(directory: Path, *options: str) -> InnerRun:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "pytest", "-v", "-p", "rank_plugin", "-o", "rank_grace=1"]
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN_PATH), "INNER_RUN": mark}
    environment |= {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    process = subprocess.Popen(
        [*command, f"--basetemp={directory / 'tmp'}", *options],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return InnerRun(process, mark)


@pytest.fixture
def inner(tmp_path: Path) -> RunInner:
    """Run a suite from its source: `inner(source, *options)`."""

    def run(source: str, *options: str) -> InnerRun:
        (tmp_path / "test_inner.py").write_text("import os, time\nimport pytest\n" + source)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        return start_inner(tmp_path, *options).finish()

    return run


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> InnerRun:
    directory = tmp_path_factory.mktemp("suite")
    (directory / "test_suite.py").write_text(SUITE)
    (directory / "pytest.ini").write_text("[pytest]\n")
    return start_inner(directory).finish()


def test_tests_pass_on_one_and_on_three_ranks(suite: InnerRun) -> None:
    outcomes = suite.outcomes()
    assert outcomes["test_passes[1-ranks]"] == "PASSED"
    assert outcomes["test_passes[3-ranks]"] == "PASSED"
    assert outcomes["test_one_rank_is_not_the_controller[1-ranks]"] == "PASSED"


def test_items_are_grouped_by_their_number_of_ranks(suite: InnerRun) -> None:
    sizes = [int(name[-len("1-ranks]")]) for name in suite.outcomes()]
    assert sizes == sorted(sizes, reverse=True)


def test_one_failing_rank_fails_the_test_with_its_traceback_and_output(suite: InnerRun) -> None:
    shown = suite.failure("test_rank_1_fails_while_rank_0_waits[2-ranks]")
    assert "AssertionError: no good" in shown
    assert re.search(r"~ rank 1 ~", shown)
    assert "words of rank 0" in shown
    assert "words of rank 1" in shown
    assert "still running 1 s after another rank failed" in shown
    assert "FAILED test_suite.py::test_rank_1_fails" in suite.output


def test_a_hang_fails_the_test_with_the_place_of_each_rank(suite: InnerRun) -> None:
    shown = suite.failure("test_hangs[2-ranks]")
    lines = SUITE.splitlines()
    assert f"line {lines.index('        time.sleep(1000)') + 1} in test_hangs" in shown
    assert f"line {lines.index('        time.sleep(1000)') + 2} in test_hangs" in shown
    assert shown.count("still running after 2 s") == 2
    assert shown.count("words before the hang") == 2
    assert "pluggy" not in shown


def test_a_killed_rank_is_named_with_its_signal_and_last_output(suite: InnerRun) -> None:
    shown = suite.failure("test_is_killed[2-ranks]")
    assert re.search(r"~ rank 1 ~+\ndied during the test: .*signal 9", shown)
    assert "~ rank 0 ~" not in shown
    assert "last words of rank 1" in shown


@pytest.mark.parametrize(("test", "rank", "status"), [("exits", 1, 3), ("aborts", 0, 5)])
def test_a_rank_that_ends_is_named_with_its_status(
    suite: InnerRun, test: str, rank: int, status: int
) -> None:
    shown = suite.failure(f"test_{test}[2-ranks]")
    assert re.search(rf"~ rank {rank} ~+\ndied during the test: .*status {status}\b", shown)


@pytest.mark.parametrize("event", ["failure", "hang", "abort"])
def test_tests_after_it_run_and_pass(suite: InnerRun, event: str) -> None:
    assert suite.outcomes()[f"test_after_{event}[2-ranks]"] == "PASSED"


def test_ranks_that_fail_together_continue(suite: InnerRun) -> None:
    assert suite.outcomes()["test_all_ranks_fail[2-ranks]"] == "FAILED"
    assert suite.outcomes()["test_same_ranks_after_all_failed[2-ranks]"] == "PASSED"


def test_ranks_compose_with_parametrize(suite: InnerRun) -> None:
    assert suite.outcomes()["test_letters[a-2-ranks]"] == "PASSED"
    assert suite.outcomes()["test_letters[b-2-ranks]"] == "FAILED"


def test_a_skip_is_a_skip_on_all_ranks(suite: InnerRun) -> None:
    assert suite.outcomes()["test_skipped[2-ranks]"] == "SKIPPED"
    assert "not today" in suite.output
    assert suite.outcomes()["test_skipped_on_one_rank[2-ranks]"] == "FAILED"
    assert "skipped on rank 1 only" in suite.output


def test_an_expected_failure_of_one_rank_is_expected(suite: InnerRun) -> None:
    assert suite.outcomes()["test_expected_on_one_rank[2-ranks]"] == "XFAIL"
    assert suite.outcomes()["test_expected_while_others_wait[2-ranks]"] == "XFAIL"


def test_a_failure_in_a_fixture_is_an_error(suite: InnerRun) -> None:
    assert suite.outcomes()["test_setup_fails[2-ranks]"] == "ERROR"
    assert "~ rank 1 ~" in suite.failure("test_setup_fails[2-ranks]")


def test_directories_of_ranks(suite: InnerRun) -> None:
    assert suite.outcomes()["TestClass::test_directories[2-ranks]"] == "PASSED"


def test_a_suite_that_went_wrong_leaves_no_process(suite: InnerRun) -> None:
    assert suite.status == 1
    assert suite.processes() == set()


FEW = """
@pytest.mark.ranks(2)
@pytest.mark.parametrize("letter", ["alpha", "beta", "gamma"])
def test_letter(letter):
    assert letter != "beta"

def test_plain(shared_tmp_path):
    assert "PMI_RANK" not in os.environ
"""


@pytest.mark.parametrize(
    ("options", "tests"),
    [
        (["-k", "letter and alpha"], ["test_letter[alpha-2-ranks]"]),
        (["-x"], ["test_plain", "test_letter[alpha-2-ranks]", "test_letter[beta-2-ranks]"]),
        (["test_inner.py::test_letter[gamma-2-ranks]"], ["test_letter[gamma-2-ranks]"]),
        (
            ["-p", "no:cacheprovider", "-p", "no:tmpdir", "-k", "gamma"],
            ["test_letter[gamma-2-ranks]"],
        ),
    ],
)
def test_only_the_selected_tests_run(inner: RunInner, options: list[str], tests: list[str]) -> None:
    run = inner(FEW, *options)
    assert list(run.outcomes()) == tests
    assert run.processes() == set()


def test_last_failed_runs_the_failed_one_again(inner: RunInner) -> None:
    inner(FEW)
    assert inner(FEW, "--lf").outcomes() == {"test_letter[beta-2-ranks]": "FAILED"}


def test_collect_only_starts_no_ranks(inner: RunInner, tmp_path: Path) -> None:
    run = inner(FEW, "--collect-only", "-q")
    assert "test_letter[alpha-2-ranks]" in run.output
    assert not list(tmp_path.glob("tmp/2-ranks-*"))


def test_output_is_shown_without_capture(inner: RunInner) -> None:
    run = inner("@pytest.mark.ranks(2)\ndef test_it(): print('spoken')", "-s")
    assert run.output.count("spoken") == 2


def test_a_suite_runs_from_another_directory(tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    elsewhere = tmp_path / "elsewhere"
    for directory in (suite, elsewhere):
        directory.mkdir()
    (suite / "pytest.ini").write_text("[pytest]\n")
    (suite / "test_it.py").write_text("import pytest\n" + FEW.replace("os.", "__import__('os')."))
    run = start_inner(elsewhere, str(suite), "-k", "alpha or plain").finish()
    assert run.outcomes() == {"test_plain": "PASSED", "test_letter[alpha-2-ranks]": "PASSED"}


def test_a_module_that_only_one_rank_cannot_import(inner: RunInner) -> None:
    source = "assert os.environ.get('PMI_RANK') != '1', 'rank 1 stays out'\n"
    run = inner(source + FEW, "-k", "alpha or gamma")
    assert run.outcomes() == {
        "test_letter[alpha-2-ranks]": "ERROR",
        "test_letter[gamma-2-ranks]": "ERROR",
    }
    assert "rank 1 stays out" in run.failure("test_letter[gamma-2-ranks]")


def test_a_module_that_cannot_be_imported(inner: RunInner) -> None:
    run = inner("import no_such_module\n" + FEW)
    assert run.status == pytest.ExitCode.INTERRUPTED
    assert "No module named 'no_such_module'" in run.output


def test_ranks_that_cannot_start_fail_all_their_tests_at_once(
    inner: RunInner, tmp_path: Path
) -> None:
    run = inner(FEW, "-o", "rank_preload=no_such_module")
    assert list(run.outcomes().values()) == ["PASSED", "ERROR", "ERROR", "ERROR"]
    assert "No module named 'no_such_module'" in run.failure("test_letter[alpha-2-ranks]")
    assert len(list(tmp_path.glob("tmp/2-ranks-[0-9]*"))) == 1
    assert run.processes() == set()


def test_ranks_that_hang_at_their_start(inner: RunInner, tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text("import time\ntime.sleep(1000)")
    run = inner(FEW, "-o", "rank_preload=sleepy", "-o", "rank_start_timeout=5", "-x")
    assert "did not start in time" in run.output
    assert "sleepy.py" in run.output
    assert run.processes() == set()


def test_a_group_that_does_not_end_well_is_mentioned(inner: RunInner) -> None:
    run = inner(
        "import atexit\natexit.register(lambda: 'PMI_RANK' in os.environ and os._exit(4))" + FEW
    )
    assert "ended with status 4" in run.output


def test_keras_is_reset_after_each_test(inner: RunInner, tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text(
        "calls = []\n"
        "class utils:\n"
        "    clear_session = staticmethod(lambda: calls.append('cleared'))\n"
        "class config:\n"
        "    set_floatx = set_dtype_policy = staticmethod(calls.append)\n"
    )
    run = inner(
        "pytestmark = pytest.mark.ranks(1)\n"
        "def test_first(): import keras\n"
        "def test_second():\n"
        "    import keras\n"
        "    assert keras.calls == ['cleared', 'float32', 'float32']\n"
    )
    assert list(run.outcomes().values()) == ["PASSED", "PASSED"]


def test_the_log_of_each_rank_is_shown(inner: RunInner) -> None:
    run = inner(
        "import logging\n"
        "@pytest.mark.ranks(2)\n"
        "def test_it():\n"
        "    logging.warning('from rank %s', os.environ['PMI_RANK'])\n"
        "    assert False\n"
    )
    shown = run.failure("test_it[2-ranks]")
    assert re.search(r"Captured log call of rank 1 -+\n.*from rank 1", shown)


def test_a_mark_without_numbers_is_refused(inner: RunInner) -> None:
    run = inner("@pytest.mark.ranks()\ndef test_it(): pass")
    assert run.status == pytest.ExitCode.INTERRUPTED
    assert "one or more numbers of ranks" in run.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_controller_that_is_stopped_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "test_inner.py").write_text(
        "import pytest, time\n"
        "@pytest.mark.ranks(2)\n"
        "def test_it(shared_tmp_path):\n"
        "    (shared_tmp_path / 'running').touch()\n"
        "    time.sleep(1000)\n"
    )
    run = start_inner(tmp_path)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("tmp/2-ranks-*/shared-1/running")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.process.send_signal(number)
    run.finish()
    deadline = time.monotonic() + 10
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.processes() == set()
