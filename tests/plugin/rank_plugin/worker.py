"""The side of the plugin that runs on each rank."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from .protocol import (
    DONE,
    DUMP_SIGNAL,
    STOP,
    Hello,
    Plan,
    Ready,
    Report,
    Run,
    output_file,
    rank_of_this_process,
    stack_file,
)

SHARED_DIRECTORY = pytest.StashKey[Path]()


class Worker:
    """Runs the tests it is told to, and sends back pytest's reports."""

    def __init__(self, plan: Plan, rank: int, connection: Connection) -> None:
        self.plan = plan
        self.rank = rank
        self.connection = connection
        self.commands: queue.SimpleQueue[Run | str] = queue.SimpleQueue()
        self.items: dict[str, pytest.Item] = {}
        self.collection_errors: dict[str, str] = {}
        self.stopped = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Queue commands. A rank never outlives its controller, whatever it is waiting for."""
        command: Run | str = ""
        while command != STOP:
            try:
                command = self.connection.recv()
            except (EOFError, OSError):
                os.kill(os.getpid(), signal.SIGKILL)
            self.commands.put(command)

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        self.config = config
        config.workerinput = {}  # type: ignore[attr-defined]  # plugins then write no result files
        vars(config.option).update(self.plan.options)
        config.option.basetemp = Path(self.plan.directory, f"rank-{self.rank}-tmp")

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep pytest's own lines out of the output of the tests."""
        if config.pluginmanager.has_plugin("terminalreporter"):
            config.pluginmanager.unregister(name="terminalreporter")
            nowhere = Path(os.devnull).open("w")  # noqa: SIM115
            silent = TerminalReporter(config, nowhere)
            config.pluginmanager.register(silent, "terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors[report.nodeid] = report.longreprtext

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = {item.nodeid: item for item in session.items}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool:
        gc.freeze()  # modules stay loaded: this makes garbage collection cheap
        missing = [nodeid for nodeid in self.plan.nodeids if nodeid not in self.items]
        self.connection.send(Ready({nodeid: self._why_not(nodeid) for nodeid in missing}))
        while isinstance(command := self.commands.get(), Run):
            self.config.stash[SHARED_DIRECTORY] = Path(command.shared_directory)
            item = self.items[command.nodeid]
            next_item = self.items.get(command.next_nodeid or "")
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
            self.connection.send(DONE)
        self.stopped = True
        return True

    def _why_not(self, nodeid: str) -> str:
        """Why a test was not collected: the error of its file, or else all errors."""
        errors = self.collection_errors
        file = nodeid.split("::")[0]
        return errors.get(file) or "\n".join(errors.values()) or "This rank did not collect it."

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(Report(data))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            reset_keras()
            gc.freeze()  # Keras never releases graphs: do not search them again and again


def reset_keras() -> None:
    """Undo a test's changes to Keras's global state, and collect garbage."""
    if "keras" not in sys.modules:
        return
    import keras

    keras.utils.clear_session()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def redirect_output(path: Path) -> None:
    """Send stdout and stderr to a file, below Python, so that a killed process loses nothing.

    The streams of mpiexec stay open as other descriptors: if they closed, it would take the process
    for ended.
    """
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup(stream)
        os.dup2(target, stream)


def main(plan_file: Path) -> None:
    """Be one rank of a group until the group says STOP."""
    plan = Plan.load(plan_file)
    directory = Path(plan.directory)
    rank = rank_of_this_process()
    redirect_output(output_file(directory, rank))
    faulthandler.register(DUMP_SIGNAL, stack_file(directory, rank).open("w"))
    sys.path[:] = plan.sys_path

    channel = socket.socket(socket.AF_UNIX)
    channel.connect(plan.socket)
    connection = Connection(channel.detach())
    connection.send(Hello(rank, os.getpid()))
    worker = Worker(plan, rank, connection)

    for module in plan.preload:
        importlib.import_module(module)
    pytest.main(plan.arguments, plugins=[worker])
    sys.exit(0 if worker.stopped else 1)
