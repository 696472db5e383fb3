"""The options of the command by the names that they have as keyword arguments of `tnt.run`."""

from __future__ import annotations

import re
from functools import cache

from tarantella.cli.options import Options
from tarantella.runtime.settings import Option, settings_of

# What has another name in `tnt.run`, and what only makes sense on a command line.
OTHER_NAMES = {
    "n": "ranks",
    "n_per_node": "ranks",
    "devices_per_node": "ranks",
    "hostfile": "hosts",
}
COMMAND_LINE_ONLY = ("cleanup", "completion", "dry_run", "force")


@cache
def by_keyword() -> dict[str, tuple[str, Option]]:
    """For each keyword, the name of an option and the option."""
    options = [row.option for row in settings_of(Options).values() if row.option is not None]
    return {
        name.lstrip("-").replace("-", "_"): (name, option)
        for option in options
        for name in option.names
    }


def in_keywords(message: str) -> str:
    """A message of the command with the spelling of `tnt.run`, as in `no_gpu=True`."""
    ours = {
        name: OTHER_NAMES.get(keyword, keyword) + ("" if option.metavar else "=True")
        for keyword, (name, option) in by_keyword().items()
        if keyword not in COMMAND_LINE_ONLY
    }
    names = "|".join(map(re.escape, ours))
    return re.sub(rf"(?<![\w-])({names})(?![\w-])", lambda found: ours[found[0]], message)
