"""`make test` runs the tests in shards, lists the time of each, and fails if one of them fails."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

# Instead of pytest: takes the exit status, and prints a last line.
PYTEST = [sys.executable, "-c", "import sys; print('== 3 passed in 1s =='); exit(int(sys.argv[1]))"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    path = Path(__file__).parents[1] / "run.py"
    spec = spec_from_file_location("run_all_tests", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PYTEST", PYTEST)
    return module


@pytest.mark.parametrize(("statuses", "expected"), [("000", 0), ("010", 1), ("005", 1)])
def test_one_shard_that_fails_is_a_failure(
    statuses: str,
    expected: int,
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards = [run.Shard(f"shard {number}", (status,)) for number, status in enumerate(statuses)]
    monkeypatch.setattr(run, "shards", lambda: shards)
    assert run.main([]) == expected
    output = capsys.readouterr().out
    assert output.count("== 3 passed in 1s ==") == 3
    failed = [f"shard {number}" for number, status in enumerate(statuses) if status != "0"]
    for shard in shards:
        (row,) = [line.split() for line in output.splitlines() if line.startswith(f"{shard.name} ")]
        assert row[2] == "3"
        assert row[-1] == ("FAILED" if shard.name in failed else "passed")
    assert (f"FAILED: {', '.join(failed)}. " in output) == bool(failed)


def test_every_file_of_tests_on_two_ranks_is_in_one_shard(run: Any) -> None:
    chosen = [name for shard in run.shards() for name in shard.selection if name.endswith(".py")]
    chosen.append(f"{run.DEVICE_SUMS}.py")  # its shard is selected by a mark
    files = Path(__file__).parents[1].glob("ranks/test_*.py")
    assert sorted(Path(name).name for name in chosen) == sorted(path.name for path in files)


@pytest.mark.parametrize(
    ("last", "number"),
    [
        ("== 220 passed, 3 deselected, 218 warnings in 913.95s (0:15:13) ==", 220),
        ("== 2 failed, 38 passed, 1 skipped, 1 error in 67.69s (0:01:07) ==", 42),
        ("== 47 deselected in 20.41s ==", 0),
    ],
)
def test_number_of_tests(last: str, number: int, run: Any) -> None:
    assert run.number_of_tests(f"12 passed\n{last}\n") == number
