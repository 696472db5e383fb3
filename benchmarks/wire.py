"""What hosts with several ranks send to the network for a sum of gradients.

The hosts are network namespaces on this machine. Their ranks sum an array as they sum gradients, in
the background, and each host counts all bytes that it sends meanwhile, headers as well. The least
possible is 2 (H - 1) / H of the array on each of H hosts, however many ranks it has. Nothing is
timed, so other programs may run. Needs root, ssh and iproute2.

    python benchmarks/wire.py
    python benchmarks/wire.py --hosts 2 --ranks 4 --types float16
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from common import bytes_sent, is_rank, simulated_hosts, tarantella_on_ranks
from overlap import run_on_hosts

TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
HEAD = "| hosts | ranks on each | type | sent by each host | over the least | over float32 |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each host")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["float32", "bfloat16"])
    parser.add_argument("--numbers", type=int, default=2_000_000, help="length of the array")
    options = parser.parse_args()
    if is_rank():
        rank_main(options)
        return
    print(f"{HEAD}\n{'| --- ' * HEAD.count(' | ')}| --- |", flush=True)
    for hosts in options.hosts:
        for row in rows(hosts, options.ranks, options.numbers, measured(hosts, options)):
            print(row, flush=True)


def measured(hosts: int, options: argparse.Namespace) -> dict[str, list[int]]:
    """The bytes that each host sends, by type."""
    program = [__file__, "--types", *options.types, "--numbers", str(options.numbers)]
    with simulated_hosts(hosts) as (testbed, hostfile):
        sent: dict[str, list[int]] = run_on_hosts(
            testbed, hostfile, ["--n-per-node", str(options.ranks)], program
        )
    return sent


def rows(hosts: int, ranks: int, numbers: int, sent: dict[str, list[int]]) -> list[str]:
    """A row of the table for each type, with the host that sends most."""
    found = []
    for name, by_host in sent.items():
        most = max(by_host)
        over_float32 = f"{most / max(sent['float32']):.2f}" if "float32" in sent else ""
        over_least = most / least(hosts, numbers, name)
        found.append(
            f"| {hosts} | {ranks} | `{name}` | {most / 1e6:.1f} MB | {over_least:.2f} "
            f"| {over_float32} |"
        )
    return found


def least(hosts: int, numbers: int, name: str) -> float:
    """The least bytes that each host must send for a sum."""
    return 2 * (hosts - 1) / hosts * numbers * TYPES[name]


def rank_main(options: argparse.Namespace) -> None:
    tnt = tarantella_on_ranks()
    from tarantella.runtime import world

    sent = {name: sent_for_a_sum(name, options.numbers, tnt) for name in options.types}
    everyones = tnt.allgather(sent)
    if tnt.is_master_rank():
        names = world.get_host_names()
        firsts = [names.index(host) for host in dict.fromkeys(names)]
        print(json.dumps({name: [int(everyones[i][name]) for i in firsts] for name in sent}))


def sent_for_a_sum(name: str, numbers: int, tnt: Any) -> int:
    """The bytes that this host sends to the network for a sum over all ranks."""
    import ml_dtypes  # noqa: F401, makes bfloat16 known to NumPy
    import numpy as np

    from tarantella.comm.background_allreduce import Message, background_allreduce
    from tarantella.runtime import world

    background = background_allreduce(world.communicator("gradients"))
    values = np.ones(numbers, name)

    def add_up() -> None:
        total = np.empty_like(values)
        message = Message(values, total)
        background.send(message)
        background.wait(message)
        assert (total == tnt.get_size()).all()

    add_up()  # makes the connections
    tnt.barrier()
    before = bytes_sent()
    tnt.barrier()
    add_up()
    tnt.barrier()
    after = bytes_sent()
    tnt.barrier()
    return after - before


if __name__ == "__main__":
    main()
