"""Sharing out cores and GPUs between the ranks of a host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tarantella.runtime import devices, world
from tarantella.runtime.configuration import Configuration
from tarantella.runtime.cores import core_limit, thread_share
from tarantella.runtime.devices import choose_gpu
from tarantella.runtime.world import RankLocation


def cores(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


def location(gpus: str | None = None) -> RankLocation:
    return RankLocation("host", cores(0, 1), gpus)


@pytest.mark.parametrize(
    ("mine", "of_all", "limit", "threads"),
    [
        (cores(0, 1, 2, 3), [cores(0, 1, 2, 3)] * 2, None, 2),
        (cores(0, 1), [cores(0, 1)] * 4, None, 1),
        (cores(2, 3), [cores(0, 1), cores(2, 3)], None, 2),  # bound by the launcher
        (cores(2, 3), [cores(0, 1)] * 2 + [cores(2, 3)] * 2, None, 1),  # bound to sockets
        (cores(*range(64)), [cores(*range(64))] * 2, 8, 4),
        (cores(*range(64)), [cores(*range(64))] * 2, 1, 1),
    ],
)
def test_threads_of_a_rank(
    mine: frozenset[int], of_all: list[frozenset[int]], limit: int | None, threads: int
) -> None:
    assert thread_share(mine, tuple(of_all), limit) == threads


@pytest.mark.parametrize(("content", "limit"), [("200000 100000", 2), ("max 100000", None)])
def test_limit_of_a_container(tmp_path: Path, content: str, limit: int | None) -> None:
    (tmp_path / "group/inner").mkdir(parents=True)
    (tmp_path / "group/cpu.max").write_text(content)
    (tmp_path / "membership").write_text("0::/group/inner\n")
    assert core_limit(tmp_path, tmp_path / "membership") == limit


def test_limit_of_an_older_container(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "membership").write_text("4:cpu,cpuacct:/x\n")
    assert core_limit(tmp_path, tmp_path / "membership") == 2


def test_system_without_control_groups(tmp_path: Path) -> None:
    assert core_limit(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("count", "local_rank", "locations", "planned", "gpu"),
    [
        (4, 1, [location()] * 2, None, 1),
        (8, 1, [location()] * 2, 4, 4),
        (1, 1, [location()] * 2, None, None),
        (1, 1, [location("3"), location("5")], None, 0),  # each sees its own
        (1, 1, [location("3"), location("3")], None, None),
        (0, 0, [location()], 0, None),
    ],
)
def test_gpu_of_a_rank(
    count: int, local_rank: int, locations: list[RankLocation], planned: int | None, gpu: int | None
) -> None:
    assert choose_gpu(count, local_rank, tuple(locations), planned) == gpu


class Threading:
    """Stands in for `tf.config.threading`."""

    def __init__(self, intra: int = 0, inter: int = 0) -> None:
        self.intra, self.inter = intra, inter

    def get_intra_op_parallelism_threads(self) -> int:
        return self.intra

    def get_inter_op_parallelism_threads(self) -> int:
        return self.inter

    def set_intra_op_parallelism_threads(self, number: int) -> None:
        self.intra = number

    def set_inter_op_parallelism_threads(self, number: int) -> None:
        self.inter = number


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_size", 2)
    monkeypatch.setattr(world, "_locations", (RankLocation("host", cores(*range(16)), None),) * 2)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name, raising=False)


def shared(threading: Threading, settings: Configuration) -> tuple[int, int]:
    tf: Any = SimpleNamespace(config=SimpleNamespace(threading=threading))
    devices._share_threads(tf, settings)
    return threading.intra, threading.inter


@pytest.mark.usefixtures("two_ranks")
def test_tensorflow_gets_the_share() -> None:
    assert shared(Threading(), Configuration()) == (8, 8)


@pytest.mark.usefixtures("two_ranks")
def test_the_plan_of_the_command_counts() -> None:
    assert shared(Threading(), Configuration(threads=(1,))) == (1, devices.LEAST_INTER_OP_THREADS)


@pytest.mark.usefixtures("two_ranks")
def test_what_the_user_has_set_in_tensorflow_stays() -> None:
    assert shared(Threading(intra=3, inter=5), Configuration()) == (3, 5)


@pytest.mark.usefixtures("two_ranks")
def test_what_the_user_has_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "5")
    assert shared(Threading(), Configuration()) == (0, 0)


@pytest.mark.usefixtures("two_ranks")
def test_threads_for_openmp_are_meant_for_tensorflow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert shared(Threading(), Configuration()) == (2, devices.LEAST_INTER_OP_THREADS)
