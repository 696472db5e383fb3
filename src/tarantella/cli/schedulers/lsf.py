"""LSF: hosts in a file or a variable, reached by blaunch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tarantella.cli.schedulers.allocation import Allocation, each_once, read_hosts
from tarantella.errors import InputError

_FILE = "LSB_DJOB_HOSTFILE"
_COUNTS = "LSB_MCPU_HOSTS"
_NAMES = "LSB_HOSTS"


@dataclass(frozen=True)
class Lsf(Allocation):
    """The hosts of an LSF job."""

    name = "LSF"
    launcher = "lsf"

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Lsf | None:
        """The allocation that a process with this environment is in, if any."""
        if environ.get(_FILE):
            return cls(read_hosts(_FILE, environ[_FILE]))
        if environ.get(_COUNTS):
            return cls(_names_before_counts(environ[_COUNTS]))
        if environ.get(_NAMES):  # missing in large jobs, because it has a word for every core
            return cls(each_once(environ[_NAMES].split()))
        return None

    def on_host(self, host: str, command: Sequence[str], seconds: int) -> list[str]:
        # The administrator sets how long it tries.
        return ["blaunch", "-z", host, "-no-shell", *command]


def _names_before_counts(text: str) -> tuple[str, ...]:
    """The names in a text like `node1 16 node2 16`."""
    words = text.split()
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(count.isdecimal() for count in counts):
        raise InputError(
            f"The list of hosts that LSF gives in {_COUNTS} makes no sense: {text!r}. Name the "
            "hosts with --hostfile."
        )
    return each_once(names)
