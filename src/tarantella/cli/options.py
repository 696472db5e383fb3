"""The options of the command, one row each: what ranks read as well is in `runtime.configuration`.

A new option is a new row here, or there if ranks read it.
"""

from __future__ import annotations

import re
import shlex
import shutil
from argparse import ArgumentTypeError
from dataclasses import dataclass

from tarantella.runtime.configuration import Configuration
from tarantella.runtime.settings import (
    SWITCH,
    Group,
    Option,
    TextFormat,
    one_of,
    setting,
    settings_of,
    whole_number,
)

# Far beyond what any machine can run, and few enough to plan for at once.
MOST_RANKS = 1024


def _read_ranks(text: str) -> int:
    ranks = whole_number("", smallest=1).read(text)
    if ranks > MOST_RANKS:
        raise ArgumentTypeError(
            f"{text} ranks are more than {MOST_RANKS}, the most for one machine"
        )
    return ranks


def _read_variable(text: str) -> tuple[tuple[str, str]]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} has no '=': write NAME=VALUE, and -- before the script")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ArgumentTypeError(
            f"{name!r} is not a name for a variable: use letters, digits and _, but no digit first"
        )
    return ((name, value),)


def _read_interpreter(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} cannot be understood: {error}") from None
    if words and shutil.which(words[0]) is None:
        raise ArgumentTypeError(
            f"{words[0]!r} is not a program that can be run: give the name of one on the PATH, "
            "or the path of an executable file"
        )
    return tuple(words)


def _read_page(text: str) -> str:
    if not text.lower().endswith((".html", ".htm")):  # it may well be the script
        raise ArgumentTypeError(
            f"{text!r} does not end in .html: name a file for a browser, such as run.html"
        )
    return text


_RANKS = TextFormat("a number of ranks, 1 or more", _read_ranks)
_NAME = TextFormat("a name", str)
_HOSTFILE = TextFormat("the name of a file", str, path="file")
_VARIABLES: TextFormat[tuple[tuple[str, str], ...]] = TextFormat("NAME=VALUE", _read_variable)
_INTERPRETER = TextFormat("a command line", _read_interpreter)
_PAGE = TextFormat("the name of an HTML file", _read_page, path="file")


@dataclass(frozen=True, kw_only=True)
class Options(Configuration):
    """What the user has asked for on a command line; defaults where that is left to Tarantella.

    Attributes:
        program: the script, or the module, and its arguments
        module: whether it is a module, as for `python -m`
        notes: how the command understood something that has another meaning elsewhere
        given: the names of the settings for ranks that are on the command line
    """

    program: tuple[str, ...]
    module: bool = False
    notes: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()

    # How many ranks on this machine.
    ranks: int | None = setting(
        None,
        _RANKS,
        option=Option(
            ("-n",),
            Group.HOSTS,
            "number of ranks on this machine; with --hostfile, on each host",
            metavar="N",
        ),
    )
    hostfile: str | None = setting(
        None,
        _HOSTFILE,
        option=Option(
            ("--hostfile",),
            Group.HOSTS,
            "file with the names of the hosts, one per line",
            metavar="FILE",
        ),
    )
    ranks_per_host: int | None = setting(
        None,
        _RANKS,
        option=Option(
            ("--n-per-node", "--devices-per-node"),
            Group.HOSTS,
            "number of ranks on each host",
            metavar="N",
        ),
    )
    # Names and values, in the order given.
    environment: tuple[tuple[str, str], ...] = setting(
        (),
        _VARIABLES,
        option=Option(
            ("-x",),
            Group.PROCESSES,
            "environment variables for every rank",
            metavar="K=V",
            repeats=True,
        ),
    )
    report: str = setting(
        "",
        _PAGE,
        option=Option(
            ("--report",),
            Group.OUTPUT,
            "write a report to open in a browser, and update it during the run: one file, with "
            "figures (needs Plotly)",
            metavar="FILE.html",
        ),
    )
    progress: bool = setting(
        False,
        SWITCH,
        option=Option(
            ("--progress",),
            Group.OUTPUT,
            "show after each epoch how much longer the training will take; by default only on a "
            "terminal, once a minute at most",
        ),
    )
    max_restarts: int = setting(
        0,
        whole_number("a whole number, 0 or more"),
        option=Option(
            ("--max-restarts",),
            Group.FAILURES,
            "restart the run if it fails, at most N times",
            metavar="N",
        ),
    )
    allow_fewer_hosts: bool = setting(
        False,
        SWITCH,
        option=Option(
            ("--allow-fewer-hosts",),
            Group.FAILURES,
            "with --max-restarts: restart without hosts that are no longer usable",
        ),
    )
    # What runs the script, and its arguments; empty: the program runs by itself.
    interpreter: tuple[str, ...] | None = setting(
        None,
        _INTERPRETER,
        option=Option(
            ("--python-interpreter",),
            Group.PROCESSES,
            "another interpreter, or a tool in front of one; an empty string runs the program "
            "as it is",
            metavar="CMD",
        ),
    )
    pin_to_socket: bool = setting(
        False,
        SWITCH,
        option=Option(
            ("--pin-to-socket",),
            Group.PROCESSES,
            "bind each rank to the cores of one NUMA domain",
        ),
    )
    pin_memory_to_socket: bool = setting(
        False,
        SWITCH,
        option=Option(
            ("--pin-memory-to-socket",),
            Group.PROCESSES,
            "the same, and bind its memory to that domain",
        ),
    )
    # Becomes `network_interfaces` of the ranks, as each host has it.
    network_interface: str | None = setting(
        None,
        _NAME,
        option=Option(
            ("--network-interface",),
            Group.PROCESSES,
            "network interface for the ranks, such as ib0 (default: chosen automatically)",
            metavar="NAME",
        ),
    )
    cleanup: bool = setting(
        False,
        SWITCH,
        option=Option(("--cleanup",), Group.OTHER, "end the running processes of this script"),
    )
    force: bool = setting(
        False,
        SWITCH,
        option=Option(("--force",), Group.OTHER, "with --cleanup: kill them at once"),
    )
    dry_run: bool = setting(
        False,
        SWITCH,
        option=Option(("--dry-run",), Group.OTHER, "show what would be run, and run nothing"),
    )

    # The shell for which to print a script that completes command lines.
    completion: str | None = setting(
        None,
        one_of(("bash", "zsh")),
        option=Option(
            ("--completion",),
            Group.OTHER,
            "print a script for your shell, bash or zsh, that completes options",
            metavar="SHELL",
        ),
    )

    @property
    def runs_script(self) -> bool:
        """Whether the program is a script for an interpreter."""
        return self.interpreter != ()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell the ranks what is on the command line for them."""
        return {
            row.variable: row.kind.write(getattr(self, name))
            for name, row in settings_of(Configuration).items()
            if name in self.given
        }
