"""Processes that take turns: they live as long as a benchmark, and work when they are told to.

Each connects to a socket in a private folder, and waits there without using a core while others
measure. Requests and replies are lines of JSON. If a process dies, raises an exception or does not
answer, the benchmark ends, and shows its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from common import Failed

PATIENCE = 600.0  # seconds that a reply may take
GOODBYE = 20.0  # seconds that a process may take to end
LINES_SHOWN = 60


@dataclass(frozen=True)
class Command:
    """How to start a process, or a launcher of several."""

    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Line:
    """One end of a connection for lines of JSON."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file: IO[str] = end.makefile("rw", encoding="utf-8")

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """The next message; None if the other end is gone."""
        try:
            line = self._file.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._socket.close()


@dataclass
class _Group:
    """Processes that get the same requests at the same time."""

    name: str
    output: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def failed(self, reason: str) -> Failed:
        printed = self.output.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        return Failed("\n".join([*printed, f"{self.name}: {reason}"]))


class Crew:
    """All processes of a benchmark, in groups; none of them outlives a `with` block.

    Args:
        patience: How many seconds to wait for a reply, or for a process to start.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._groups: dict[str, _Group] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="turns-")
        self.address = str(Path(self._folder.name) / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._listener.settimeout(0.5)

    def start(self, name: str, commands: Sequence[Command], workers: int) -> None:
        """Starts a group, and waits until its processes are ready.

        Args:
            name: The name of the group.
            commands: What starts it; each process has to call `take_turns`.
            workers: The number of processes that will do so.
        """
        group = self._groups[name] = _Group(name, Path(self._folder.name) / f"{name}.txt")
        with group.output.open("wb") as output:
            for command in commands:
                process = subprocess.Popen(
                    command.words,
                    env={**os.environ, **command.env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                group.processes.append(process)
        deadline = time.monotonic() + self._patience
        while len(group.lines) < workers:
            try:
                group.lines.append(Line(self._listener.accept()[0]))
            except TimeoutError:
                ended = [p.returncode for p in group.processes if p.poll() is not None]
                if ended:
                    reason = f"a process ended before it was ready, with status {ended[0]}."
                    raise group.failed(reason) from None
                if time.monotonic() > deadline:
                    raise group.failed("it did not get ready in time.") from None

    def ask(self, name: str, what: str, **arguments: Any) -> list[Any]:
        """The answers of a group's processes to a request that all of them get."""
        self.tell(name, what, **arguments)
        return self.answers(name, what)

    def tell(self, name: str, what: str, **arguments: Any) -> None:
        """Sends a request to a group's processes; `answers` has to come next."""
        for line in self._groups[name].lines:
            with contextlib.suppress(ConnectionError):  # `receive` will notice
                line.send({"do": what, **arguments})

    def answers(self, name: str, what: str) -> list[Any]:
        """The answers of a group's processes to what they were told."""
        group = self._groups[name]
        answers: dict[Line, Any] = {}
        deadline = time.monotonic() + self._patience
        while len(answers) < len(group.lines):
            waiting = [line for line in group.lines if line not in answers]
            ready, _, _ = select.select(waiting, [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise group.failed(f"no answer to {what!r} for {self._patience:.0f} s.")
            for line in ready:
                reply = line.receive()
                if reply is None:
                    raise group.failed(f"a process died at {what!r}.")
                if "error" in reply:
                    raise group.failed(f"an error at {what!r}:\n{reply['error']}")
                answers[line] = reply["answer"]
        return [answers[line] for line in group.lines]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(GOODBYE if error is None else 0)

    def end(self, patience: float = 0) -> None:
        """Ends all processes; kills those that have not ended after `patience` seconds."""
        self._listener.close()
        groups, self._groups = list(self._groups.values()), {}
        for line in (line for group in groups for line in group.lines):
            with contextlib.suppress(OSError):
                line.send({"do": "end"})
            line.close()
        for process in (process for group in groups for process in group.processes):
            _end(process, patience)
        self._folder.cleanup()


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Waits for a process, then asks it to end, then kills it, with its child processes."""
    for sign, seconds in ((None, patience), (signal.SIGTERM, GOODBYE), (signal.SIGKILL, None)):
        if sign is not None and process.poll() is None:
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def take_turns(address: str, actions: Mapping[str, Callable[..., Any]]) -> None:
    """Does what the other end of a socket says, until it says `end` or is gone.

    Args:
        address: The path of the socket.
        actions: Functions by name; their results must be JSON-serializable.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    line = Line(connection)
    while (request := line.receive()) is not None and request["do"] != "end":
        try:
            answer = actions[request.pop("do")](**request)
        except BaseException:
            line.send({"error": traceback.format_exc()})
            raise
        line.send({"answer": answer})
