"""The command on the hosts of a testbed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from testbed import Node, Testbed

COMMAND = [sys.executable, "-m", "tarantella.cli"]


class Cluster:
    """The hosts of a testbed, with a folder that they share.

    Args:
        testbed: The hosts.
        folder: The shared folder.
    """

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        self.testbed = testbed
        self.folder = folder

    def __getitem__(self, name: str) -> Node:
        return self.testbed[name]

    @property
    def nodes(self) -> list[Node]:
        return self.testbed.nodes

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def hostfile(self, *names: str) -> str:
        path = self.folder / "hosts"
        path.write_text("".join(f"{name}\n" for name in names))
        return str(path)

    def command(self, *arguments: str, hosts: tuple[str, ...] = ("node1", "node2")) -> list[str]:
        """The command line for some hosts, on their CPUs."""
        return [*COMMAND, "--hostfile", self.hostfile(*hosts), "--no-gpu", *arguments]

    def run(
        self,
        *arguments: str,
        hosts: tuple[str, ...] = ("node1", "node2"),
        on: str = "node1",
        **settings: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command on one of the hosts, and waits for it."""
        command = self.command(*arguments, hosts=hosts)
        return self[on].run(*command, **{"check": False, "cwd": self.folder, **settings})

    def start(
        self, *arguments: str, hosts: tuple[str, ...] = ("node1", "node2"), **settings: Any
    ) -> subprocess.Popen[str]:
        """Starts the command on the first host."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = self.command(*arguments, hosts=hosts)
        return self.nodes[0].start(*command, **{"cwd": self.folder, **pipes, **settings})

    def left(self) -> dict[str, list[Any]]:
        """The processes on the hosts, and the files left in their temporary folders."""
        left: dict[str, list[Any]] = {}
        for node in self.nodes:
            found = [*node.processes(), *node.leftovers()]
            if found:
                left[node.name] = found
        return left

    def wait_for_end(self, seconds: float) -> None:
        """Waits until nothing runs on the hosts any more, or the time is up."""
        deadline = time.monotonic() + seconds
        while any(node.processes() for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(0.1)
