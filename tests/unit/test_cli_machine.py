"""Finding out what this machine has, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarantella.cli import gpus as module
from tarantella.cli.gpus import Gpu, find_gpus, parse_nvidia_smi, visible
from tarantella.cli.host import find_sockets, format_list, parse_list, this_host

FOUR = tuple(Gpu("A100", f"GPU-{letter}") for letter in "abcd")


def test_this_host_has_a_core() -> None:
    assert this_host().cores


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("", []), ("5", [5])]
)
def test_lists_of_cores(text: str, numbers: list[int]) -> None:
    assert parse_list(text) == numbers
    assert format_list(tuple(numbers)) == text.strip()


def test_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    for node, cores in enumerate(["0-1,4-5", "2-3,6-7"]):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    for core in range(8):
        folder = tmp_path / f"cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}")
    assert find_sockets(tuple(range(8)), tmp_path) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert find_sockets((2, 3), tmp_path) == ((), (2, 3))


def test_system_that_tells_nothing(tmp_path: Path) -> None:
    assert find_sockets((0, 1), tmp_path) == ((0, 1),)


@pytest.mark.parametrize(
    ("chosen", "through"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("2,0", "ca"),
        ("1,9,2", "b"),
        ("GPU-d,GPU-a", "da"),
    ],
)
def test_visible_gpus(chosen: str | None, through: str) -> None:
    assert "".join(gpu.uuid[-1] for gpu in visible(FOUR, chosen)) == through


def test_answer_of_nvidia_smi(tmp_path: Path) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    text = "GPU-12-34, 00000000:3B:00.0, NVIDIA A100, 80GB\nGPU-56, 00000000:AF:00.0, T4\n"
    assert parse_nvidia_smi(text, tmp_path) == (
        Gpu("NVIDIA A100, 80GB", "GPU-12-34", 1),
        Gpu("T4", "GPU-56", None),
    )


def test_gpus_of_the_amd_driver(tmp_path: Path) -> None:
    for node, units in enumerate([0, 440, 440]):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"cpu_cores_count 4\nsimd_count {units}\n")
    assert len(module._from_amd_driver(tmp_path)) == 2


def test_gpus_of_the_nvidia_driver(tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    assert module._from_nvidia_driver(tmp_path, tmp_path) == (Gpu("NVIDIA GPU"),)


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUERY", ("no-such-program",))
    monkeypatch.setattr(module, "_from_nvidia_driver", lambda: ())
    monkeypatch.setattr(module, "_from_amd_driver", lambda: FOUR)
    assert find_gpus({"HIP_VISIBLE_DEVICES": "0,1"}) == FOUR[:2]
