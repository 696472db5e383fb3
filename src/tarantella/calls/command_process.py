"""Runs the command in a process of its own, and shows its output where Python prints.

That may be a notebook, whose `sys.stdout` is no file.
"""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import IO

from tarantella.runtime.announce import CALLER
from tarantella.runtime.configuration import TERMINAL
from tarantella.runtime.progress_output import has_terminal

_PIECE = 1 << 16


def run_command(
    arguments: Sequence[str],
    hosts: Iterable[str],
    program: Sequence[str],
    data: bytes,
    hear: Callable[[bytes], None],
) -> int:
    """Run the command until it ends; a KeyboardInterrupt is forwarded to it, and raised then.

    Args:
        arguments: its options
        hosts: the hosts for it; none: it decides
        program: the script and its arguments
        data: its standard input
        hear: is called with all that it tells its caller, in pieces

    Returns:
        its exit status
    """
    with ExitStack() as stack:
        # Files without a name: nothing is left of them, not even if this process is killed.
        given = stack.enter_context(_file(data))
        inherited = []
        if names := "".join(f"{host}\n" for host in hosts):
            hostfile = stack.enter_context(_file(names.encode())).fileno()
            inherited.append(hostfile)
            arguments = [*arguments, f"--hostfile=/dev/fd/{hostfile}"]
        reading, writing = os.pipe()
        listener = stack.enter_context(os.fdopen(reading, "rb", buffering=0))
        with os.fdopen(writing, "wb", buffering=0):
            variables = {CALLER: f"{os.getpid()}:{writing}"}
            if has_terminal():
                variables[TERMINAL] = "true"
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tarantella.cli", *arguments, "--", *program],
                    env={**os.environ, **variables},
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=[writing, *inherited],
                    start_new_session=True,  # Ctrl+C comes to us alone, and we forward it
                )
            )
        stack.callback(_end, process)
        assert process.stdout is not None
        assert process.stderr is not None
        interrupted = _forward(
            process,
            {
                process.stdout: _printer(lambda: sys.stdout),
                process.stderr: _printer(lambda: sys.stderr),
                listener: hear,
            },
        )
    if interrupted:
        raise KeyboardInterrupt
    return process.returncode


def _file(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _forward(
    process: subprocess.Popen[bytes], takers: dict[IO[bytes], Callable[[bytes], None]]
) -> bool:
    """Pass on what comes from pipes until all have ended; returns whether Ctrl+C came."""
    interrupted = False
    with selectors.DefaultSelector() as selector:
        for pipe, take in takers.items():
            selector.register(pipe, selectors.EVENT_READ, take)
        while selector.get_map():
            try:
                for key, _ in selector.select():
                    data = os.read(key.fd, _PIECE)
                    if not data:
                        selector.unregister(key.fileobj)
                    key.data(data)
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)  # the command ends all ranks
    return interrupted


def _printer(stream: Callable[[], IO[str] | None]) -> Callable[[bytes], None]:
    """What prints bytes to a stream of Python, whichever that is when they come."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(data: bytes) -> None:
        text = decoder.decode(data, final=not data)
        if text and (shown := stream()) is not None:
            shown.write(text)
            shown.flush()

    return show


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nobody listens to the command any more: end it, if it has not ended."""
    if process.poll() is None:
        process.terminate()
