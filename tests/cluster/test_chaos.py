"""A few of the runs of `make chaos`: faults at random times, and what has to come of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import FAULTS, Chaos
from commands import Cluster
from testbed import Testbed


@pytest.fixture(scope="module")
def chaos(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    folder: Path = tmp_path_factory.mktemp("chaos")
    chaos = Chaos(Cluster(testbed, folder), seed=1)
    chaos.undisturbed()
    yield chaos
    chaos.close()


@pytest.mark.parametrize(("name", "restarts"), [("kill -9", True), ("SIGTERM", False)])
def test_fault(name: str, restarts: bool, chaos: Chaos) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    assert chaos.run(fault, restarts).problems == []
