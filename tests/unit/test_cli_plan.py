"""Plans for machines of every kind."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tarantella.cli.gpus import Gpu
from tarantella.cli.host import Host
from tarantella.cli.options import Options
from tarantella.cli.plan import Plan, make_plan
from tarantella.errors import InputError

ASKED = Options(program=("script.py",))
LAPTOP = Host("laptop", (tuple(range(8)),))
SERVER = Host("server", (tuple(range(64)), tuple(range(64, 128))))
NODE = replace(
    SERVER, name="node", gpus=tuple(Gpu("H100", f"GPU-{i}", socket=i // 4) for i in range(8))
)


def gpus_of(plan: Plan) -> list[int | None]:
    return [rank.gpu for rank in plan.ranks]


def is_on_one_socket(cores: tuple[int, ...], host: Host) -> bool:
    return any(set(cores) <= set(socket) for socket in host.sockets)


def test_all_gpus_with_one_rank_each() -> None:
    plan = make_plan(ASKED, [NODE])
    assert gpus_of(plan) == list(range(8))
    assert [rank.number for rank in plan.ranks] == [rank.local_rank for rank in plan.ranks]
    assert all(len(rank.cores) == rank.threads == 16 for rank in plan.ranks)
    for rank in plan.ranks:
        assert rank.gpu is not None
        assert set(rank.cores) <= set(NODE.sockets[NODE.gpus[rank.gpu].socket or 0])
    assert not plan.warnings


def test_no_gpu_is_one_rank_on_the_cpu_and_a_warning() -> None:
    plan = make_plan(ASKED, [SERVER])
    assert gpus_of(plan) == [None]
    assert plan.ranks[0].cores == SERVER.cores
    assert len(plan.warnings) == 1
    assert "server" in plan.warnings[0]


def test_some_of_the_gpus_are_taken_from_both_sockets() -> None:
    plan = make_plan(replace(ASKED, ranks=2), [NODE])
    assert gpus_of(plan) == [0, 4]
    assert [rank.cores for rank in plan.ranks] == list(NODE.sockets)
    assert not plan.warnings


@pytest.mark.parametrize("host", [NODE, LAPTOP])
def test_too_few_gpus_put_all_ranks_on_the_cpu_with_a_warning(host: Host) -> None:
    plan = make_plan(replace(ASKED, ranks=9), [host])
    assert gpus_of(plan) == [None] * 9
    assert "9 ranks" in plan.warnings[0]


@pytest.mark.parametrize(("ranks", "expected"), [(None, 1), (4, 4)])
def test_the_cpu_on_request_is_no_reason_for_a_warning(ranks: int | None, expected: int) -> None:
    plan = make_plan(replace(ASKED, no_gpu=True, ranks=ranks), [NODE])
    assert gpus_of(plan) == [None] * expected
    assert not plan.warnings


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 16, 100, 128])
@pytest.mark.parametrize("host", [SERVER, NODE])
def test_cores_are_shared_evenly_and_to_one_rank_each(host: Host, ranks: int) -> None:
    plan = make_plan(replace(ASKED, ranks=ranks), [host])
    taken = list(itertools.chain.from_iterable(rank.cores for rank in plan.ranks))
    assert len(taken) == len(set(taken))
    assert {len(rank.cores) for rank in plan.ranks} == {128 // ranks}
    assert all(rank.cores == tuple(range(rank.cores[0], rank.cores[-1] + 1)) for rank in plan.ranks)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16, 100])
def test_an_even_number_of_ranks_stays_inside_of_sockets(ranks: int) -> None:
    host = Host("odd", (tuple(range(51)), tuple(range(51, 102))))
    plan = make_plan(replace(ASKED, ranks=ranks, no_gpu=True), [host])
    assert all(is_on_one_socket(rank.cores, host) for rank in plan.ranks)


def test_more_ranks_than_cores_share_them() -> None:
    plan = make_plan(replace(ASKED, ranks=20, no_gpu=True), [LAPTOP])
    assert [rank.cores for rank in plan.ranks][:10] == [(i % 8,) for i in range(10)]
    assert {rank.threads for rank in plan.ranks} == {1}
    assert plan.warnings == (
        "Host laptop has 8 cores for 20 ranks: ranks that share a core take turns, and the others "
        "wait for them. Start at most one rank for each core.",
    )


def test_hosts_with_more_ranks_than_cores_are_named_in_one_warning() -> None:
    hosts = [LAPTOP, SERVER, replace(LAPTOP, name="other")]
    hosts.append(replace(SERVER, name="container", core_limit=1))
    [warning] = make_plan(replace(ASKED, ranks_per_host=9, no_gpu=True), hosts).warnings
    assert warning.startswith(
        "Hosts laptop, other have 8 cores each for 9 ranks, and host container has 1 core for 9 "
        "ranks:"
    )
    assert not make_plan(replace(ASKED, ranks_per_host=8, no_gpu=True), hosts[:3]).warnings


def test_ranks_on_gpus_may_share_cores() -> None:
    host = Host("node", ((0, 1),), tuple([Gpu("H100")] * 8))
    assert make_plan(ASKED, [host]).warnings == ()
    too_few = make_plan(replace(ASKED, ranks=9), [host]).warnings
    assert [" GPUs for 9 ranks" in too_few[0], " cores for 9 ranks" in too_few[1]] == [True, True]


def test_a_limit_of_the_container_counts_for_the_threads() -> None:
    plan = make_plan(replace(ASKED, ranks=2, no_gpu=True), [replace(SERVER, core_limit=6)])
    assert [rank.threads for rank in plan.ranks] == [3, 3]


def test_gpus_on_one_socket_only_leave_no_core_idle() -> None:
    host = replace(SERVER, gpus=tuple(Gpu("A100", socket=1) for _ in range(4)))
    plan = make_plan(ASKED, [host])
    assert {len(rank.cores) for rank in plan.ranks} == {32}


def test_gpus_that_do_not_tell_their_socket() -> None:
    host = replace(SERVER, gpus=(Gpu("A100"), Gpu("A100")))
    assert [rank.cores for rank in make_plan(ASKED, [host]).ranks] == list(host.sockets)


def test_a_domain_without_usable_cores() -> None:
    host = Host("half", ((), tuple(range(64, 128))), gpus=(Gpu("A100", socket=0),) * 2)
    assert [len(rank.cores) for rank in make_plan(ASKED, [host]).ranks] == [32, 32]


def test_ranks_are_numbered_over_all_hosts() -> None:
    plan = make_plan(replace(ASKED, ranks=2), [NODE, replace(NODE, name="other")])
    assert [(rank.number, rank.host, rank.local_rank) for rank in plan.ranks] == [
        (0, "node", 0),
        (1, "node", 1),
        (2, "other", 0),
        (3, "other", 1),
    ]


def test_one_host_without_gpus_keeps_all_on_the_cpu() -> None:
    plan = make_plan(replace(ASKED, ranks=2), [NODE, SERVER])
    assert gpus_of(plan) == [None] * 4
    assert len(plan.warnings) == 2
    assert plan.warnings[1].startswith("All other hosts use the CPU as well")


def refused(options: Options, *hosts: Host) -> str:
    """The error of a plan for GPUs or nothing."""
    with pytest.raises(InputError) as raised:
        make_plan(replace(options, gpu=True, given=frozenset({"gpu"})), hosts)
    return str(raised.value)


def test_gpus_or_an_error_where_there_are_enough() -> None:
    for options in (ASKED, replace(ASKED, ranks=2)):
        assert make_plan(replace(options, gpu=True), [NODE]) == make_plan(options, [NODE])


def test_gpus_or_an_error_on_a_machine_without() -> None:
    text = "--gpu needs a GPU for each rank, but {}: use --no-gpu to run on the CPU."
    assert refused(ASKED, LAPTOP) == text.format("no GPU was found on host laptop")
    assert refused(replace(ASKED, ranks=4), LAPTOP) == text.format(
        "host laptop has no GPU for 4 ranks"
    )


def test_gpus_or_an_error_with_more_ranks_than_gpus() -> None:
    assert refused(replace(ASKED, ranks=9), NODE) == (
        "--gpu needs a GPU for each rank, but host node has 8 GPUs for 9 ranks: start fewer "
        "ranks, or use --no-gpu to run on the CPU."
    )


def test_gpus_or_an_error_on_several_hosts_names_those_that_have_too_few() -> None:
    one = replace(NODE, name="one", gpus=NODE.gpus[:1])
    assert refused(ASKED, NODE, SERVER) == (
        "--gpu needs a GPU for each rank, but no GPU was found on host server: leave out that "
        "host, or use --no-gpu to run on the CPU."
    )
    assert refused(replace(ASKED, ranks_per_host=2), NODE, SERVER, one, LAPTOP) == (
        "--gpu needs a GPU for each rank, but hosts server, laptop have no GPU each for 2 ranks, "
        "and host one has 1 GPU for 2 ranks: start fewer ranks, or leave out those hosts, or use "
        "--no-gpu to run on the CPU."
    )


def test_gpus_or_an_error_by_a_variable() -> None:
    with pytest.raises(InputError, match="^TNT_GPU needs a GPU for each rank, but no GPU was"):
        make_plan(replace(ASKED, gpu=True), [LAPTOP])


@pytest.mark.parametrize(
    ("options", "hosts", "reminder"),
    [
        (ASKED, [LAPTOP], "no GPU was found on host laptop."),
        (ASKED, [LAPTOP, SERVER], "no GPU was found on hosts laptop, server."),
        (
            replace(ASKED, ranks=9),
            [NODE],
            "host node has 8 GPUs for 9 ranks, so 8 GPUs on host node stood idle.",
        ),
        (
            replace(ASKED, ranks_per_host=1),
            [NODE, LAPTOP, replace(NODE, name="other", gpus=NODE.gpus[:1])],
            "host laptop has no GPU for 1 rank, so 9 GPUs on hosts node, other stood idle.",
        ),
    ],
)
def test_gpus_that_stood_idle_are_counted_after_the_run(
    options: Options, hosts: list[Host], reminder: str
) -> None:
    reminders = make_plan(options, hosts).reminders
    assert reminders == (f"The run used the CPU: {reminder} Use --gpu to make this an error.",)


@pytest.mark.parametrize("options", [ASKED, replace(ASKED, ranks=9, no_gpu=True)])
def test_gpus_in_use_or_not_asked_for_are_no_reason_for_a_reminder(options: Options) -> None:
    assert make_plan(options, [NODE]).reminders == ()


def test_pinned_ranks_stay_inside_of_domains() -> None:
    options = replace(ASKED, ranks=3, no_gpu=True, pin_to_socket=True, pin_memory_to_socket=True)
    ranks = make_plan(options, [SERVER]).ranks
    assert [rank.domain for rank in ranks] == [0, 0, 1]
    for rank in ranks:
        assert set(rank.cores) <= set(SERVER.sockets[rank.domain or 0])
    owned = [core for rank in ranks for core in rank.cores]
    assert len(set(owned)) == len(owned)


def test_pinned_ranks_are_where_their_gpus_are() -> None:
    host = replace(SERVER, gpus=(Gpu("A", socket=1), Gpu("A", socket=1), Gpu("A", socket=0)))
    plan = make_plan(replace(ASKED, pin_memory_to_socket=True, pin_to_socket=True), [host])
    assert [rank.domain for rank in plan.ranks] == [1, 1, 0]


@pytest.mark.parametrize(
    ("sockets", "named"),
    [
        (((0, 1, 2, 3),), "does not have several NUMA domains"),
        (((0,), (1, 2, 3)), "1 core in NUMA domain 0"),
    ],
)
def test_machine_that_ranks_cannot_be_pinned_on(
    sockets: tuple[tuple[int, ...], ...], named: str
) -> None:
    options = replace(ASKED, ranks=4, no_gpu=True, pin_to_socket=True)
    with pytest.raises(InputError, match=named):
        make_plan(options, [Host("node", sockets)])


def test_values_that_repeat_from_host_to_host_are_named_once() -> None:
    options = replace(ASKED, ranks_per_host=2, no_gpu=True)
    alike = make_plan(options, [replace(SERVER, name=name) for name in "abc"])
    assert alike.by_rank({rank.number: str(rank.local_rank) for rank in alike.ranks}) == ["0", "1"]
    assert alike.counts == {"a": 2, "b": 2, "c": 2}
    other = make_plan(options, [SERVER, Host("small", ((0, 1),))])
    values = {rank.number: str(rank.threads) for rank in other.ranks}
    assert other.by_rank(values) == ["64", "64", "1", "1"]
