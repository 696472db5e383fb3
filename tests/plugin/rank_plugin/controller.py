"""The side of the plugin in the user's pytest."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from .group import Group, StartError
from .outcome import failed_setup


class Controller:
    """Runs tests on ranks in groups, and reports each as if it had run here."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.group: Group | None = None
        self.start_failures: dict[int, str] = {}
        self.complaints: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """Put the tests on ranks last, grouped by their number of ranks, the largest first."""
        result = yield
        for item in items:
            if item.get_closest_marker("ranks") and not ranks_of(item):
                raise pytest.UsageError(f"{item.nodeid}: this kind of test cannot run on ranks")
        items.sort(key=lambda item: -ranks_of(item) or -sys.maxsize)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        size = ranks_of(item)
        if not size:
            return None
        following = nextitem if nextitem and ranks_of(nextitem) == size else None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._run(item, following, size):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if following is None:
            self._stop()
        return True

    def _run(
        self, item: pytest.Item, following: pytest.Item | None, size: int
    ) -> list[pytest.TestReport]:
        try:
            group = self._group_for(item, size)
        except StartError as failure:
            return [failed_setup(item, str(failure))]
        mark = item.get_closest_marker("ranks")
        assert mark is not None
        limit = float(mark.kwargs.get("timeout", self.config.getini("rank_timeout")))
        reports = group.run(item, following, limit)
        if self.config.getoption("capture", "fd") == "no":
            for title, text in reports[-1].sections:
                print(f"\n--- {title}\n{text}", end="")
        return reports

    def _group_for(self, item: pytest.Item, size: int) -> Group:
        """The group that runs this test: the current one if possible, or a new one.

        A number of ranks that did not start once is not tried again.
        """
        if size in self.start_failures:
            raise StartError(
                f"{self.start_failures[size]} (For its output, see the first of its tests.)"
            )
        if self.group is not None and self.group.size == size and self.group.usable:
            return self.group
        self._stop()
        items = item.session.items
        ahead = [other for other in items[items.index(item) :] if ranks_of(other) == size]
        self.group = Group(self.config, size, ahead, self._make_directory(size))
        try:
            self.group.start()
        except StartError as failure:
            self.start_failures[size] = str(failure).splitlines()[0]
            raise
        return self.group

    def _make_directory(self, size: int) -> Path:
        factory = getattr(self.config, "_tmp_path_factory", None)  # absent with -p no:tmpdir
        name = f"{size}-ranks-"
        return factory.mktemp(name) if factory else Path(tempfile.mkdtemp(prefix=name))

    def _stop(self) -> None:
        if self.group is None:
            return
        group, self.group = self.group, None
        try:
            self.complaints.append(group.stop())
        finally:
            group.kill()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._stop()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for complaint in filter(None, self.complaints):
            terminalreporter.section("ranks")
            terminalreporter.write_line(complaint)


def ranks_of(item: pytest.Item) -> int:
    """The number of ranks of a test, or 0 for a test that runs in this process."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or item.get_closest_marker("ranks") is None:
        return 0
    return int(callspec.params.get("num_ranks", 0))
