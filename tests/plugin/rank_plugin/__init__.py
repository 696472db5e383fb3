"""Pytest plugin that runs tests on several MPI ranks.

    @pytest.mark.ranks(1, 2, 3)
    def test_sum(num_ranks): ...

A marked test becomes one item for each number of ranks, `test_sum[1-ranks]` and so on. All items
with the same number of ranks share one `mpiexec`, so that expensive imports happen once. Every rank
runs every item, and an item passes only if it passes on all of them.

- `controller`: in the user's pytest, reports tests on ranks as if they ran there.
- `group`: starts a number of ranks, has them run tests, and always ends them.
- `worker`: in a pytest on each rank, runs a test when told to.
- `outcome`: makes the reports of one test from the results of its ranks.
- `protocol`: the messages between a group and its ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .controller import Controller
from .worker import SHARED_DIRECTORY, Worker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("rank_preload", "modules each rank imports before its first test", "args", [])
    parser.addini("rank_timeout", "seconds one test on ranks may take", default="120")
    parser.addini("rank_start_timeout", "seconds a group of ranks may take to start", default="180")
    parser.addini("rank_grace", "seconds the other ranks have when one fails", default="5")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(*numbers, timeout=seconds): run the test on these numbers of MPI ranks."
    )
    if not any(isinstance(plugin, Worker) for plugin in config.pluginmanager.get_plugins()):
        config.pluginmanager.register(Controller(config), "rank-controller")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item for each number of ranks; the argument `num_ranks` passes it to the test."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    if not mark.args or not all(isinstance(n, int) and n > 0 for n in mark.args):
        pytest.fail(f"ranks{mark.args} must be one or more numbers of ranks", pytrace=False)
    if "num_ranks" not in metafunc.fixturenames:
        metafunc.fixturenames.append("num_ranks")
    metafunc.parametrize("num_ranks", mark.args, ids=[f"{n}-ranks" for n in mark.args])


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """An empty directory for this test, the same one on all its ranks."""
    shared = request.config.stash.get(SHARED_DIRECTORY, None)
    return shared or Path(request.getfixturevalue("tmp_path"))
