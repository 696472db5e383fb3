"""Sharing out cores and GPUs between the ranks of a host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tarantella.errors import InputError
from tarantella.runtime import devices, launcher, world
from tarantella.runtime.announce import ON_CPU, Announcement
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


class Devices:
    """Stands in for `tf.config` on a host with some GPUs."""

    def __init__(self, gpus: int) -> None:
        self.gpus = [f"GPU:{number}" for number in range(gpus)]
        self.visible: Any = "untouched"
        self.experimental = SimpleNamespace(set_memory_growth=lambda gpu, grows: None)

    def list_physical_devices(self, _: str) -> list[str]:
        return self.gpus

    def set_visible_devices(self, visible: Any, _: str) -> None:
        self.visible = visible


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[Announcement]:
    news: list[Announcement] = []
    monkeypatch.setattr(devices, "announce", news.append)
    monkeypatch.delenv("TNT_RUN_ID", raising=False)
    monkeypatch.delenv(launcher.RANK_PROCESS, raising=False)
    return news


def seen(gpus: int, settings: Configuration) -> Any:
    """What TensorFlow is told to use."""
    config = Devices(gpus)
    tf: Any = SimpleNamespace(config=config)
    devices._take_gpu(tf, settings)
    return config.visible


@pytest.mark.usefixtures("two_ranks", "announced")
@pytest.mark.parametrize(
    ("gpus", "found"), [(0, "no GPU for 2 ranks on host host: check"), (1, "1 GPU for 2 ranks")]
)
def test_gpus_or_an_error(gpus: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = f"TNT_GPU needs a GPU for each rank, but TensorFlow finds {found}"
    with pytest.raises(InputError, match=f"^{asked}.* or unset TNT_GPU to run on the CPU"):
        seen(gpus, Configuration(gpu=True))
    monkeypatch.setenv("TNT_RUN_ID", "1")
    with pytest.raises(InputError, match=r"^--gpu needs a GPU .* or use --no-gpu to run"):
        seen(gpus, Configuration(gpu=True, gpus=(gpus,)))
    assert seen(2, Configuration(gpu=True)) == "GPU:0"


@pytest.mark.usefixtures("two_ranks")
def test_a_rank_announces_that_it_has_to_do_without_its_gpu(announced: list[Announcement]) -> None:
    assert seen(2, Configuration(gpus=(1,))) == "GPU:1"
    assert announced == []
    assert seen(1, Configuration(gpus=(1,))) == []
    assert [(news.kind, news.rank, news.host, news.status) for news in announced] == [
        (ON_CPU, 0, "host", 1)
    ]


@pytest.mark.usefixtures("two_ranks")
def test_a_worker_of_a_rank_may_do_without_a_gpu(
    announced: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launcher.RANK_PROCESS, "1:0/2")
    assert seen(0, Configuration(gpu=True, gpus=(0,))) == []
    assert announced == []


@pytest.mark.usefixtures("announced")
def test_a_serial_run_is_only_checked() -> None:
    assert seen(2, Configuration(gpu=True)) == "untouched"
    with pytest.raises(InputError, match="TensorFlow finds no GPU for 1 rank"):
        seen(0, Configuration(gpu=True))


@pytest.mark.usefixtures("announced")
def test_variables_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "configuration", lambda: Configuration(gpu=True, no_gpu=True))
    with pytest.raises(InputError, match="TNT_GPU and TNT_NO_GPU exclude each other"):
        devices.configure()


@pytest.mark.parametrize(
    ("rank", "gpus", "variables", "told"),
    [(0, [], {}, 1), (1, [], {}, 0), (0, ["GPU:0"], {}, 0), (0, [], {"TNT_RUN_ID": "x"}, 0)],
)
def test_the_master_tells_of_more_ranks_than_cores_unless_the_command_has(
    rank: int,
    gpus: list[str],
    variables: dict[str, str],
    told: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bound = [RankLocation("node1", cores(number % 2), None) for number in range(3)]
    limited = [RankLocation("node2", cores(*range(8)), None, core_limit=1)] * 3
    enough = [RankLocation("node3", cores(*range(8)), None)] * 3
    monkeypatch.setattr(world, "_locations", (*bound, *limited, *enough))
    monkeypatch.setattr(world, "_rank", rank)
    monkeypatch.delenv("TNT_RUN_ID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tf: Any = SimpleNamespace(config=SimpleNamespace(get_visible_devices=lambda _: gpus))
    devices._warn_of_shared_cores(tf, Configuration())
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        "Host node1 has 2 cores for 3 ranks, and host node2 has 1 core for 3 ranks"
    ] * told
