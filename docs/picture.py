"""Draws the picture of a run in the README: the quick start in a terminal, line by line.

    python docs/picture.py

It runs the command, records the time of each line, and writes `images/run.svg`. Each line lights up
at its time, once, faster than the run. All lines can be read from the first frame on, and where
nothing moves.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PICTURE = Path(__file__).parent / "images" / "run.svg"
COMMAND = "tarantella -n 2 --no-gpu -- examples/quickstart.py"

SECONDS = 4.0  # length of the animation, which leaves out the start of the ranks
# No wider than the lines of Keras: on a phone, the picture is 360 pixels wide.
COLUMNS, LINE, TOP, LEFT, CHARACTER = 58, 20, 50, 12, 8.43

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"
     width="{width:.0f}" height="{height}" role="img"
     font-family="ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14">
<title>{title}</title>
<style>
  text {{ fill: #d8dee9; white-space: pre }}
  .typed {{ fill: #a3be8c }}
  .printed {{ animation: light .3s both }}
  @keyframes light {{ from {{ opacity: .6 }} to {{ opacity: 1 }} }}
  @media (prefers-reduced-motion: reduce) {{ .printed {{ animation: none }} }}
</style>
<rect width="100%" height="100%" rx="10" fill="#242933"/>
<g fill="#4c566a"><circle cx="18" cy="18" r="5"/><circle cx="34" cy="18" r="5"/>\
<circle cx="50" cy="18" r="5"/></g>
"""


def main() -> None:
    lines = list(run(COMMAND))
    start, end = lines[0][0], lines[-1][0]
    PICTURE.write_text(
        picture(
            [
                (SECONDS * (when - start) / (end - start), part)
                for when, line in lines
                for part in folded(line)
            ]
        )
    )


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
            shown = line.rstrip().replace(f"host {socket.gethostname()}", "host laptop")
            yield time.monotonic() - start, shown
    if process.returncode:
        raise SystemExit(f"`{command}` failed")


def folded(line: str) -> list[str]:
    if line.startswith("  ") and len(line) > COLUMNS:  # a table, which is no table if it wraps
        return [f"{line[: COLUMNS - 1].rstrip()} …"]
    return textwrap.wrap(line, COLUMNS, subsequent_indent="  ") or [""]


def picture(lines: list[tuple[float, str]]) -> str:
    width = 2 * LEFT + COLUMNS * CHARACTER
    head = HEAD.format(width=width, height=TOP + LINE * (len(lines) + 1), title=escape(COMMAND))
    texts = [f'<text class="typed" x="{LEFT}" y="{TOP}">$ {escape(COMMAND)}</text>\n']
    texts += [
        f'<text class="printed" x="{LEFT}" y="{TOP + LINE * row}" '
        f'style="animation-delay:{when:.2f}s">{escape(line)}</text>\n'
        for row, (when, line) in enumerate(lines, start=1)
    ]
    return head + "".join(texts) + "</svg>\n"


if __name__ == "__main__":
    main()
