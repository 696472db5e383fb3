"""What the check of all hosts finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tarantella.cli.check import Findings, Report, differences, explain, find_placement, refuse
from tarantella.cli.host import Host
from tarantella.cli.network import Interface
from tarantella.cli.remote import Answer
from tarantella.cli.schedulers import Ssh
from tarantella.errors import InputError

HOSTS = Ssh(("a", "b"))
COUNTS = {"a": 1, "b": 1}


def report(name: str, number: int, rdma: tuple[str, ...] = ()) -> Report:
    interfaces = (Interface("eth0", f"10.0.0.{number}/24", 1000),)
    return Report(Host(name, ((0,),)), {}, interfaces, rdma, "10.0.0.9", (name, name))


def findings(*rdma: tuple[str, ...]) -> Findings:
    reports = {"a": report("a", 1, rdma[0]), "b": report("b", 2, rdma[1])}
    return Findings(("a", "b"), reports, {})


def test_infiniband_that_all_hosts_have_is_left_to_the_library() -> None:
    assert find_placement(HOSTS, COUNTS, findings(("mlx5_0",), ("mlx5_0",)), None).interfaces == {}
    shared = find_placement(HOSTS, COUNTS, findings(("mlx5_0",), ()), None)
    assert shared.interfaces == {"a": "eth0", "b": "eth0"}


@pytest.mark.parametrize("wanted", ["mlx5_0", "mlx5_0:1"])
def test_an_infiniband_port_is_no_interface_for_the_launcher(wanted: str) -> None:
    placement = find_placement(HOSTS, COUNTS, findings(("mlx5_0",), ("mlx5_0",)), wanted)
    assert placement.interfaces == {"a": "mlx5_0:1", "b": "mlx5_0:1"}
    assert placement.interface is None
    assert placement.address == "10.0.0.9"
    with pytest.raises(InputError, match="Host b has no network interface"):
        find_placement(HOSTS, COUNTS, findings(("mlx5_0",), ()), wanted)


def test_hosts_that_differ_give_one_warning_for_each_thing() -> None:
    host = Host("a", ((0, 1),))
    assert differences([host, replace(host, name="b")]) == []
    small = Host("c", ((0,),))
    [warning] = differences([host, replace(host, name="b"), small])
    assert "cores: c has 1, the others have 2" in warning


@pytest.mark.parametrize(
    ("said", "status", "word"),
    [
        ("ssh: Could not resolve hostname x: Name or service not known", 255, "unknown"),
        ("ssh: connect to host x port 22: Connection timed out", 255, "not reached"),
        ("x: Permission denied (publickey).", 255, "refused"),
        ("Host key verification failed.", 255, "key unknown"),
        ("something else\nat last", 1, "failed"),
        ("", None, "no answer"),
    ],
)
def test_each_problem_has_a_word_and_advice(said: str, status: int | None, word: str) -> None:
    found, advice = explain("x", Answer(None, status, said), 30, "ssh")
    assert found == word
    assert advice
    assert "hostfile" not in advice  # the host may be from a list, or from a scheduler
    problems = {"b": (found, advice)}
    with pytest.raises(InputError) as error:
        refuse(Findings(("a", "b"), {"a": report("a", 1)}, problems))
    lines = str(error.value).splitlines()
    assert lines[0] == "1 of 2 hosts cannot take part:"
    assert [line.split()[0] for line in lines[1:4]] == ["host", "a", "b"]
    assert lines[4:] == [f"b: {advice}"]
