"""Hosts for tests. After each test, nothing may be left on any host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Cluster
from testbed import Testbed, what_is_missing

SECONDS_TO_END = 20


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    missing = what_is_missing()
    if missing:
        pytest.skip(missing)
    with Testbed(3, shared=[tmp_path_factory.getbasetemp()]) as testbed:
        yield testbed


@pytest.fixture
def cluster(testbed: Testbed, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(testbed, tmp_path)
    yield cluster
    cluster.wait_for_end(SECONDS_TO_END)
    left = cluster.left()
    for node in testbed.nodes:  # the next test has hosts on which nothing runs
        node.wipe()
    assert left == {}
