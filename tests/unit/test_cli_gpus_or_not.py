"""GPUs or the CPU: what counts if options and variables say different things."""

from __future__ import annotations

from pathlib import Path

import pytest

from tarantella.cli import main as command
from tarantella.cli.gpus import Gpu
from tarantella.cli.host import Host


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host("node", ((0, 1),), (Gpu("H100"), Gpu("H100")))
    monkeypatch.setattr(command, "this_host", lambda _: host)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("other1\nother2\n")
    for name in ("TNT_GPU", "TNT_NO_GPU"):
        monkeypatch.delenv(name, raising=False)


def devices(arguments: str, variables: dict[str, str], capfd: pytest.CaptureFixture[str]) -> str:
    """What the ranks would use, or what the command says instead."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        status = command.main([*arguments.split(), "--dry-run", "--", "script.py"])
    printed = capfd.readouterr()
    if status:
        assert (status, printed.out) == (2, "")
        return printed.err
    return "GPU" if "rank 0: GPU" in printed.out else "CPU"


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ("--gpu", {}, "GPU"),
        ("--gpu", {"TNT_NO_GPU": "true"}, "GPU"),
        ("--no-gpu", {"TNT_GPU": "true"}, "CPU"),
        ("-x TNT_NO_GPU=true", {"TNT_GPU": "true"}, "CPU"),
        ("-x TNT_GPU=true", {"TNT_NO_GPU": "true"}, "GPU"),
        ("", {"TNT_NO_GPU": "true"}, "CPU"),
        ("", {"TNT_NO_GPU": "true", "TNT_GPU": "false"}, "CPU"),
        ("-n 3", {"TNT_GPU": "false"}, "CPU"),
    ],
)
def test_the_command_line_counts_more_than_the_environment(
    arguments: str, variables: dict[str, str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert devices(arguments, variables, capfd) == expected


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [("", {"TNT_GPU": "1", "TNT_NO_GPU": "1"}), ("--gpu -x TNT_NO_GPU=1", {})],
)
def test_both_in_one_place_are_an_error(
    arguments: str, variables: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert "exclude each other" in devices(arguments, variables, capfd)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [("--no-gpu --gpu-sums nccl", {}), ("--no-gpu", {"TNT_GPU_SUMS": "nccl"})],
)
def test_nccl_without_gpus_is_an_error(
    arguments: str, variables: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert "--gpu-sums nccl needs GPUs" in devices(arguments, variables, capfd)


def test_a_variable_asks_for_gpus_as_the_option_does(capfd: pytest.CaptureFixture[str]) -> None:
    told = "node has 2 GPUs for 3 ranks"
    assert devices("-n 3", {"TNT_GPU": "on"}, capfd).startswith("tarantella: TNT_GPU needs a GPU")
    assert told in devices("-n 3", {"TNT_GPU": "on"}, capfd)
    assert told in devices("-n 3 --gpu", {}, capfd)


def test_hosts_that_were_not_checked_are_not_said_to_have_no_gpu(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "this_host", lambda _: Host("login", ((0, 1),)))
    asked = "--gpu --hostfile hosts"
    assert "--dry-run contacts no host" in devices(asked, {}, capfd)
    assert devices(f"{asked} --n-per-node 4", {}, capfd) == "GPU"


@pytest.mark.parametrize("arguments", ["", "--n-per-node 2", "-n 2", "--no-gpu"])
def test_a_dry_run_says_cpu_where_this_machine_has_no_gpu(
    arguments: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "this_host", lambda _: Host("login", ((0, 1),)))
    for hosts in ("", "--hostfile hosts "):
        assert devices(f"{hosts}{arguments}", {}, capfd) == "CPU"
    command.main(["--hostfile", "hosts", *arguments.split(), "--dry-run", "--", "script.py"])
    printed = capfd.readouterr()
    assert "  rank 1: CPU, core" in printed.out
    assert "GPU 0" not in printed.out
    assert "WARNING" not in printed.err  # nobody has looked at these hosts
