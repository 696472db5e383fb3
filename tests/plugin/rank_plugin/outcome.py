"""From one result per rank to the reports of one test."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

Sections = list[tuple[str, str]]


@dataclass
class RankResult:
    """What is known about one test on one rank.

    `trouble` says why the rank did not finish. It is `decisive` unless it only follows from what
    happened on another rank.
    """

    rank: int
    reports: list[pytest.TestReport] = field(default_factory=list)
    output: str = ""
    trouble: str = ""
    decisive: bool = False

    def outcomes(self) -> list[str]:
        return [outcome(report) for report in self.reports]


@dataclass
class RankFailures(TerminalRepr):
    """The failures of a test, rank by rank, in a form that pytest can show."""

    failures: list[tuple[int, object]]
    reprcrash: ReprFileLocation

    def toterminal(self, tw: TerminalWriter) -> None:
        for rank, cause in self.failures:
            tw.sep("~", f"rank {rank}", bold=True)
            if isinstance(cause, TerminalRepr):
                cause.toterminal(tw)
            else:
                tw.line(str(cause))


def outcome(report: pytest.TestReport) -> str:
    """The outcome of a report, as pytest counts it."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]"):
        return "xpassed strictly"
    return report.outcome


def failed_setup(item: pytest.Item, text: str) -> pytest.TestReport:
    """The report of a test that could not start."""
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "setup")


def merge(item: pytest.Item, results: list[RankResult], more: Sections) -> list[pytest.TestReport]:
    """The reports of a test from the results of all its ranks, with `more` sections."""
    sections = [
        (f"Captured stdout and stderr of rank {result.rank}", result.output)
        for result in results
        if result.output
    ]
    for result in results:
        for title, text in result.reports[-1].sections if result.reports else []:
            sections.append((f"{title} of rank {result.rank}", text))
    sections += more
    everything = [(result.rank, report) for result in results for report in result.reports]

    troubles = [result for result in results if result.trouble]
    if troubles:
        remarkable = [(rank, report) for rank, report in everything if outcome(report) != "passed"]
        return [_merge_phase(item, "call", remarkable, troubles, sections)]
    merged: list[pytest.TestReport] = []
    for when in ("setup", "call", "teardown"):
        reports = [(rank, report) for rank, report in everything if report.when == when]
        if reports and (when == "teardown" or all(report.passed for report in merged)):
            merged.append(_merge_phase(item, when, reports, [], sections))
    return merged


def _merge_phase(
    item: pytest.Item,
    when: str,
    reports: list[tuple[int, pytest.TestReport]],
    troubles: list[RankResult],
    sections: Sections,
) -> pytest.TestReport:
    """One phase of all ranks. A failure takes precedence, then an expected failure, then a skip."""
    kinds: dict[str, list[tuple[int, pytest.TestReport]]] = {}
    for rank, report in reports:
        kinds.setdefault(outcome(report), []).append((rank, report))
    expected = kinds.get("xfailed")
    failed = kinds.get("failed", []) + ([] if expected else kinds.get("xpassed strictly", []))
    failures: list[tuple[int, object]] = [(rank, report.longrepr) for rank, report in failed]
    if failed or not expected or any(result.decisive for result in troubles):
        failures += [(result.rank, result.trouble) for result in troubles]

    merged = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="passed",
        longrepr=None,
        when=when,  # type: ignore[arg-type]
        sections=sections,
        duration=max((report.duration for _, report in reports), default=0.0),
        start=min((report.start for _, report in reports), default=0.0),
        stop=max((report.stop for _, report in reports), default=0.0),
        user_properties=reports[0][1].user_properties if reports else None,
    )
    if failures:
        merged.outcome = "failed"
        merged.longrepr = RankFailures(failures, _summary(item, failures))
    elif expected:
        merged.outcome = "skipped"
        merged.longrepr, merged.wasxfail = expected[0][1].longrepr, expected[0][1].wasxfail
    elif "skipped" in kinds and len(kinds) > 1:
        ranks = ", ".join(str(rank) for rank, _ in kinds["skipped"])
        merged.outcome = "failed"
        merged.longrepr = f"skipped on rank {ranks} only: skip a test on all its ranks or on none"
    elif "skipped" in kinds:
        merged.outcome, merged.longrepr = "skipped", kinds["skipped"][0][1].longrepr
    elif "xpassed" in kinds:
        merged.wasxfail = kinds["xpassed"][0][1].wasxfail
    return merged


def _summary(item: pytest.Item, failures: list[tuple[int, object]]) -> ReprFileLocation:
    """The place and message for the one-line summary: those of the first failure."""
    rank, cause = failures[0]
    crash = getattr(cause, "reprcrash", None)
    if crash is not None:
        return ReprFileLocation(crash.path, crash.lineno, f"rank {rank}: {crash.message}")
    path, line, _ = item.location
    return ReprFileLocation(path, (line or 0) + 1, f"rank {rank}: {str(cause).splitlines()[0]}")
