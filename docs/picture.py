"""Draws the picture of a run in the README: the quick start in a terminal, line by line.

    python docs/picture.py

It runs the command, records the time of each line, and writes `images/run.svg`, an animation that
plays once, faster than the run.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PICTURE = Path(__file__).parent / "images" / "run.svg"
COMMAND = "tarantella -n 2 --no-gpu -- examples/lenet5.py --number_epochs=6"

SECONDS = 6.0  # length of the animation
COLUMNS, LINE, TOP, LEFT, CHARACTER = 104, 21, 56, 22, 8.4

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"
     font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14">
<title>{title}</title>
<style>
  text {{ fill: #d8dee9; white-space: pre; animation: appear .01s both }}
  .typed {{ fill: #a3be8c }}
  @keyframes appear {{ from {{ opacity: 0 }} to {{ opacity: 1 }} }}
  @media (prefers-reduced-motion: reduce) {{ text {{ animation: none }} }}
</style>
<rect width="100%" height="100%" rx="10" fill="#242933"/>
<g fill="#4c566a"><circle cx="24" cy="22" r="6"/><circle cx="44" cy="22" r="6"/>\
<circle cx="64" cy="22" r="6"/></g>
"""


def main() -> None:
    lines = [(0.0, "$ " + COMMAND), *run(COMMAND)]
    end = lines[-1][0]
    drawn = [(SECONDS * when / end, part) for when, line in lines for part in folded(line)]
    PICTURE.write_text(picture(drawn))


def run(command: str) -> Iterator[tuple[float, str]]:
    """The lines that a command prints, each with its time in seconds."""
    program, *arguments = shlex.split(command)
    start = time.monotonic()
    path = Path(sys.executable).parent / program
    with subprocess.Popen(
        [str(path), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            yield time.monotonic() - start, line.rstrip()
    if process.returncode:
        raise SystemExit(f"`{command}` failed")


def folded(line: str) -> list[str]:
    return [line[i : i + COLUMNS] for i in range(0, len(line), COLUMNS)] or [""]


def picture(lines: list[tuple[float, str]]) -> str:
    width = 2 * LEFT + COLUMNS * CHARACTER
    head = HEAD.format(width=width, height=TOP + LINE * len(lines), title=escape(COMMAND))
    kinds = ["typed", *["printed"] * (len(lines) - 1)]
    texts = [
        f'<text class="{kind}" x="{LEFT}" y="{TOP + LINE * row}" '
        f'style="animation-delay:{when:.2f}s">{escape(line)}</text>\n'
        for row, (kind, (when, line)) in enumerate(zip(kinds, lines, strict=True))
    ]
    return head + "".join(texts) + "</svg>\n"


if __name__ == "__main__":
    main()
