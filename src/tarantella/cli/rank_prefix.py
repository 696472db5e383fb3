"""The output of many ranks as whole lines, each with its rank in front: `[rank 3] ...`."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella.runtime.announce import Announcement


class RankPrefix:
    """Joins the pieces of output that ranks announce to lines, with the rank in front.

    Args:
        name_hosts: put the host in front as well
        hidden: the starts of lines that are left out
    """

    def __init__(self, name_hosts: bool, hidden: Sequence[bytes] = ()) -> None:
        self._name_hosts = name_hosts
        self._hidden = tuple(hidden)
        self._unfinished: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def add(self, news: Announcement) -> bytes:
        """Take the next piece; returns the lines that are complete with it."""
        key = (news.rank, news.stream)
        prefix, start = self._unfinished.pop(key, (self._prefix(news), b""))
        *lines, rest = (start + news.printed).split(b"\n")
        if rest:
            self._unfinished[key] = (prefix, rest)
        return b"".join(self._line(prefix, line) for line in lines)

    def finish(self, stream: int) -> bytes:
        """Nothing more is coming: returns the lines of a stream that have no end."""
        keys = [key for key in self._unfinished if key[1] == stream]
        return b"".join(self._line(*self._unfinished.pop(key)) for key in keys)

    def _prefix(self, news: Announcement) -> bytes:
        host = f" on {news.host}" if self._name_hosts else ""
        return f"[rank {news.rank}{host}] ".encode(errors="replace")

    def _line(self, prefix: bytes, line: bytes) -> bytes:
        if self._hidden and line.startswith(self._hidden):
            return b""
        return prefix + line + b"\n"
