"""Ranks that wait for others that do not arrive: which, in what, and where the others are."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tarantella.cli.outcome import Failure
from tarantella.runtime import times
from tarantella.runtime.announce import (
    ELSEWHERE,
    ENDED,
    FINISHED,
    JOINED,
    JOINS,
    RESUMED,
    STOPPED,
    WAITS,
    Announcement,
)

_MOST_NAMED = 8
_START = "the start of communication"


class Stalls:
    """Collects the announcements of ranks that wait.

    Args:
        hosts: the host of each rank
        seconds: the stall timeout; 0: ranks may wait forever
        warns: whether there are warnings
    """

    def __init__(self, hosts: Mapping[int, str], seconds: float, warns: bool = True) -> None:
        self._hosts = hosts
        self._seconds = seconds
        self._reports: dict[int, tuple[float, Announcement]] = {}
        self._finished: set[int] = set()
        self._joins: dict[int, tuple[float, Announcement]] = {}  # and since when
        self._stopped: dict[int, tuple[float, Announcement]] = {}  # since when
        self._since: float | None = None  # when the first rank announced that it waits
        self._has_warned = False
        self.warns = warns

    def hear(self, news: Announcement) -> None:
        """A rank announces something."""
        if news.kind in (FINISHED, ENDED):
            self._finished.add(news.rank)
        if news.kind == JOINS:
            # While MPI starts, no other thread of a rank can announce that it waits.
            self._joins[news.rank] = time.monotonic(), news
        if news.kind in (JOINED, ENDED):
            self._joins.pop(news.rank, None)
        if news.kind == STOPPED:
            self._stopped[news.rank] = time.monotonic(), news
        if news.kind in (RESUMED, ENDED):
            self._stopped.pop(news.rank, None)
        if news.kind in (WAITS, ELSEWHERE):
            self._reports[news.rank] = time.monotonic(), news

    def forgive(self, seconds: float) -> None:
        """The command has not listened for this long."""
        for since_when in (self._joins, self._stopped):
            for rank, (since, news) in since_when.items():
                since_when[rank] = since + seconds, news

    def warning(self) -> str | None:
        """The warning to show now, once for each stall."""
        waiting = self._waiting()
        if not waiting and not self._stopped_for(self._seconds):
            self._since, self._has_warned = None, False
            return None
        now = time.monotonic()
        self._since = self._since or now
        known = self._fresh().keys() | self._stopped.keys() | self._finished
        all_heard = self._hosts.keys() <= known
        if self._has_warned or not (all_heard or now - self._since > times.TIME_FOR_REPORTS):
            return None
        self._has_warned = True
        if not self.warns:
            return None
        return self._describe(waiting)

    def failure(self) -> Failure | None:
        """The failure that ends the run, if ranks have waited for too long."""
        limit = times.STALL_TIMEOUTS_TO_END * self._seconds
        waiting = self._waiting() if self._seconds else []
        too_long = f"for more than {times.STALL_TIMEOUTS_TO_END} times the --stall-timeout"
        if not waiting:
            stopped = next(iter(self._stopped_for(limit)), None)
            if stopped is None:
                return None
            return Failure(stopped, self._hosts[stopped], f"it has been stopped {too_long}", 1)
        if max(news.status for news in waiting) <= limit:
            return None
        missing = self._missing(waiting)
        too_long = f"{too_long}. {self._describe(waiting).rstrip('.')}"
        if not missing:
            return Failure(None, "", f"ranks have waited for each other {too_long}", 1)
        first = missing[0]
        return Failure(first, self._hosts[first], f"others have waited for it {too_long}", 1)

    def _fresh(self) -> dict[int, Announcement]:
        now = time.monotonic()
        reports = {
            rank: news
            for rank, (when, news) in self._reports.items()
            if now - when < times.REPORT_IS_FRESH
        }
        joins = {
            rank: replace(news, kind=WAITS, status=int(now - since), cause=_START)
            for rank, (since, news) in self._joins.items()
            if self._seconds and now - since > self._seconds
        }
        heard = reports | joins
        return {rank: news for rank, news in heard.items() if rank not in self._stopped}

    def _stopped_for(self, seconds: float) -> list[int]:
        """The ranks that a signal has stopped for longer than that.

        If all of them are stopped, somebody has suspended the job.
        """
        if not self._seconds or self._stopped.keys() == self._hosts.keys():
            return []
        now = time.monotonic()
        return sorted(r for r, (since, _) in self._stopped.items() if now - since > seconds)

    def _waiting(self) -> list[Announcement]:
        return [news for _, news in sorted(self._fresh().items()) if news.kind == WAITS]

    def _missing(self, waiting: Sequence[Announcement]) -> list[int]:
        missing = self._hosts.keys() - {news.rank for news in waiting}
        return sorted(missing, key=lambda rank: (rank not in self._stopped, rank))

    def _describe(self, waiting: Sequence[Announcement]) -> str:
        if waiting:
            told = f"{self._who_waits(waiting)}. {self._who_is_missing(waiting)}"
            return f"{told} {hint}" if (hint := self._what_to_call(waiting)) else told
        named = [f"Rank {r} on host {self._hosts[r]} is {self._stop(r)}" for r in self._stopped]
        return f"{'; '.join(named)}."

    def _stop(self, rank: int) -> str:
        _, news = self._stopped[rank]
        name = signal.Signals(news.status).name
        return f"stopped by {name}: `kill -CONT {news.pid}` there resumes it"

    def _who_waits(self, waiting: Sequence[Announcement]) -> str:
        by_activity: dict[str, list[Announcement]] = {}
        for news in waiting:
            activity = f"{news.cause}, in {news.place}" if news.place else news.cause
            by_activity.setdefault(activity, []).append(news)
        return "; ".join(
            f"{_ranks([news.rank for news in some])} {'has' if len(some) == 1 else 'have'} been "
            f"waiting for {max(news.status for news in some)} seconds, in {activity}"
            for activity, some in by_activity.items()
        )

    def _who_is_missing(self, waiting: Sequence[Announcement]) -> str:
        missing = self._missing(waiting)
        if not missing:
            return (
                "So all ranks wait for each other: they must do the same things, in the same order."
            )
        named = [self._absence(rank) for rank in missing[:_MOST_NAMED]]
        more = [f"{len(missing) - _MOST_NAMED} more"] if len(missing) > _MOST_NAMED else []
        return f"{'; '.join([*named, *more])}."

    def _what_to_call(self, waiting: Sequence[Announcement]) -> str:
        """What to do about a call that only some ranks make; empty if it is not that."""
        places = {news.place for news in waiting}
        missing = sorted(self._missing(waiting))
        calls = [place for place in places if place.endswith(")")]
        if len(places) > 1 or not calls or not missing:
            return ""
        heard = self._fresh()
        ended = [rank for rank in missing if self._is_at_end(rank)]
        others = [heard[rank].place for rank in missing if rank in heard and rank not in ended]
        if len(ended) + len(others) < len(missing) or calls[0] in others:
            return ""
        advice = "call it on all ranks" if missing == ended else "all ranks must call it"
        ranks = [news.rank for news in waiting]
        return (
            f"{_ranks(ranks)} {_are(ranks)} in {calls[0]}, {_ranks(missing).lower()} "
            f"{_are(missing)} not: {advice}."
        )

    def _is_at_end(self, rank: int) -> bool:
        news = self._fresh().get(rank)
        return rank in self._finished or (
            news is not None and news.kind == ELSEWHERE and not news.place
        )

    def _absence(self, rank: int) -> str:
        who = f"Rank {rank} on host {self._hosts[rank]} has not arrived"
        news = self._fresh().get(rank)
        if rank in self._stopped:
            return f"{who}: it is {self._stop(rank)}"
        if self._is_at_end(rank):
            return f"{who}: it is at the end of its script"
        if news is None and self._joins:
            return (
                f"{who}: it may not have reached `import tarantella` yet, it may be stopped, or "
                "its host may hang"
            )
        if news is None:
            return f"{who}, and reports nothing: it may be stopped, or its host may hang"
        return f"{who}: it is {'in' if news.place.endswith(')') else 'at'} {news.place}"


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Rank {numbers[0]}"
    spans = _spans(numbers)
    named = ", ".join(spans[:_MOST_NAMED])
    return f"Ranks {named}{' and more' if len(spans) > _MOST_NAMED else ''}"


def _spans(numbers: Sequence[int]) -> list[str]:
    """Numbers in ascending order, three or more in a row as in 1-3."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and rows[-1][-1] == number - 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    spans = [[f"{row[0]}-{row[-1]}"] if len(row) > 2 else list(map(str, row)) for row in rows]
    return [text for span in spans for text in span]


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
