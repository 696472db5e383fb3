"""Asks all hosts a question at once: a small program of ours runs on each, and answers.

It is started in the same way as the ranks, reads the question from its standard input, and prints
the answer in one line with a prefix.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tarantella.cli.processes import RUN_VARIABLES
from tarantella.cli.schedulers import ADDRESS_VARIABLES, Allocation
from tarantella.launch import entry
from tarantella.runtime import times

_ANSWER_PREFIX = "\x1etarantella-answer:"
_AT_ONCE = 256


@dataclass(frozen=True)
class Answer:
    """The answer of a host, or why there is none.

    Attributes:
        content: the answer; None if there is none
        status: the exit status of what asked; None if it took too long
        errors: what was printed on its error stream
    """

    content: Any
    status: int | None
    errors: str = ""


def ask_all(allocation: Allocation, role: str, question: Any, seconds: int) -> dict[str, Answer]:
    """Ask all hosts, and wait for their answers, but no longer than a time limit."""
    asking: list[subprocess.Popen[bytes]] = []
    given_up = threading.Event()
    text = json.dumps([question, seconds]).encode()
    # The program that asks is not part of a run, even if a rank starts it.
    dropped = (*ADDRESS_VARIABLES, *RUN_VARIABLES)  # the former would be wrong on other hosts
    environ = {name: value for name, value in os.environ.items() if name not in dropped}

    def ask(host: str) -> Answer:
        program = [sys.executable, "-I", "-S", entry.__file__, role]
        command = program if is_here(host) else allocation.on_host(host, program, seconds)
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return Answer(None, 127, f"{command[0]}: {error.strerror}")
        asking.append(process)
        if given_up.is_set():
            _kill(process)
        try:
            output, errors = process.communicate(text, timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            return Answer(None, None)
        return Answer(_answer_in(output), process.returncode, errors.decode(errors="replace"))

    hosts = allocation.hosts
    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        try:
            return dict(zip(hosts, pool.map(ask, hosts), strict=True))
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in asking:
                send_to_group(process, signal.SIGTERM)
            for process in asking:
                _kill(process)
            raise


def answer(reply: Callable[[Any], Any]) -> int:
    """The program on the other side: answers one question, or ends when the time is up."""
    question, seconds = json.loads(sys.stdin.buffer.read())
    signal.alarm(seconds)  # nobody may be waiting any more
    print(f"\n{_ANSWER_PREFIX}{json.dumps(reply(question))}", flush=True)
    return 0


def is_here(host: str) -> bool:
    """Whether a name is that of this machine."""
    if host in (socket.gethostname(), "localhost"):
        return True
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect((address[0], 9, *address[2:]))  # sends nothing, but chooses a route
                if probe.getsockname()[0] == address[0]:
                    return True
    return False


def _answer_in(output: bytes) -> Any:
    """The answer among whatever else was printed, as by the start-up files of a shell."""
    for line in output.decode(errors="replace").split("\n"):
        if line.startswith(_ANSWER_PREFIX):
            with suppress(ValueError):  # it was cut off
                return json.loads(line[len(_ANSWER_PREFIX) :])
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the program that asks a host; unless killed, srun ends what it has started there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        send_to_group(process, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(times.TIME_FOR_QUESTION_TO_END)


def send_to_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that leads a group, and to what it has started there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
