"""`tnt.run` on hosts that share no temporary folder."""

from __future__ import annotations

import sys

from commands import Cluster

SCRIPT = """
import os, socket
import tarantella as tnt

data = os.urandom(100_000)


def where():
    return socket.gethostname(), data


results = tnt.run(
    where, ranks=1, hosts=["node2", "node3"], all_results=True, no_gpu=True
)
print([name for name, _ in results], all(back == data for _, back in results))
try:
    tnt.run(where, hosts=["node2", "nowhere"], no_gpu=True)
except tnt.errors.InputError as error:
    print("nowhere" in str(error))
"""


def test_function_and_results_travel_between_hosts(cluster: Cluster) -> None:
    script = cluster.script(SCRIPT)
    ran = cluster["node1"].run(sys.executable, script, check=False, cwd=cluster.folder)
    assert ran.stdout.splitlines() == ["['node2', 'node3'] True", "True"], ran.stderr
