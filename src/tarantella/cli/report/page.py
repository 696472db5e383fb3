"""The page of a report: everything about a run in one HTML file, which loads nothing else."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from tarantella.cli.keywords import in_keywords
from tarantella.cli.report.figures import Figure, course_figures, metric_figures, part_figures
from tarantella.cli.report.series import course
from tarantella.cli.run_record import RunRecord, Span
from tarantella.cli.slow_ranks import find_slowest
from tarantella.cli.summary import samples_per_second
from tarantella.runtime.meter import SUMS
from tarantella.runtime.words import count, duration, memory, rate

# Browsers are told to load nothing, whatever a page asks for.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_VARIABLE = re.compile(r"^((?:-x=?)?[A-Za-z_][A-Za-z0-9_]*)=.*", re.DOTALL)
_MOST_ROWS_SHOWN = 16  # more of them are there, but folded up


def page(record: RunRecord, plotly: bytes) -> tuple[bytes, ...]:
    """The parts of the page, in order.

    Args:
        record: the run
        plotly: Plotly's JavaScript, which is most of the page
    """
    ranks = record.totals()
    sections = {
        "Loss and metrics": metric_figures(record.epochs),
        "Over time": course_figures(record, course(record)),
        "Where the time goes": part_figures(ranks, record.unseen),
    }
    # A reader sees the text while the browser still reads the script.
    text = [
        *_head(record, ranks),
        *_sections(sections),
        *_events(record),
        *_ranks(record, ranks),
        *_run(record),
        _figures_for_script([each for all_ in sections.values() for each in all_]),
        "<script>",
    ]
    end = f"</script>\n<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n"
    return "\n".join(text).encode(), plotly, end.encode()


def _head(record: RunRecord, ranks: Mapping[int, Span]) -> list[str]:
    name = record.function or Path(record.script[0]).name
    title = f"{name} on {count(len(record.ranks.hosts), 'rank')}"
    state, words = _state(record)
    tiles = "".join(
        f'<div class="tile"><small>{escape(label)}</small><b>{escape(value)}</b></div>'
        for label, value in _tiles(record, ranks).items()
    )
    return [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_resource('page.css')}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="state {state}">{escape(words)}</p>',
        f'<p class="faint">{escape(_times(record))}</p>',
        f'<div class="tiles">{tiles}</div>',
    ]


def _state(record: RunRecord) -> tuple[str, str]:
    """Whether the run is good, bad or going on, and that in words."""
    if record.failure:
        return "bad", _sentence(record, record.failure)
    if record.ended is not None:
        return "good", "Succeeded."
    return "going", "Running when this was written."


def _times(record: RunRecord) -> str:
    begun = f"Started {_clock(record.started)}"
    if record.ended is not None:
        return f"{begun}, ended {_clock(record.ended)}."
    return (
        f"{begun}, written {_clock(time.time())}. Reload the page for newer numbers; if there are "
        "none for minutes, the command itself was killed."
    )


def _tiles(record: RunRecord, ranks: Mapping[int, Span]) -> dict[str, str]:
    """The numbers to see first."""
    length = (record.ended or time.time()) - record.started
    tiles = {"wall time": duration(length)}
    if training := record.training():
        if training.samples:
            tiles["throughput in training"] = f"{rate(training.samples_per_second)} samples/s"
        tiles["step time"] = f"{_number(1000 * training.seconds / training.steps)} ms"
    if record.epochs:
        last = record.epochs[-1]
        fit = f"epochs of fit {last.fit}" if last.fit > 1 else "epochs"
        tiles[fit] = f"{last.number} of {last.epochs}"
        if "loss" in last.logs:
            tiles["loss"] = _number(last.logs["loss"])
    slowest = find_slowest({rank: total.parts for rank, total in ranks.items() if total.steps})
    if slowest is not None and SUMS not in record.unseen:
        tiles["slowest rank"] = f"rank {slowest.rank}, {slowest.ratio:.0%} over the median"
    if ranks:
        tiles["peak memory of a rank"] = memory(max(each.memory for each in ranks.values()))
    on_gpu = [each.gpu_memory for each in ranks.values() if each.gpu_memory is not None]
    if on_gpu:
        tiles["peak GPU memory of a rank"] = memory(max(on_gpu))
    if record.restarts:
        tiles["restarts"] = str(record.restarts)
    return tiles


def _own_step(total: Span) -> float:
    """Seconds for a step, without waiting for other ranks."""
    return (total.training_seconds - total.parts[SUMS]) / total.steps


def _sections(sections: Mapping[str, Sequence[Figure]]) -> Iterable[str]:
    index = 0
    for title, figures in sections.items():
        if not figures:
            continue
        yield f'<h2>{escape(title)}</h2>\n<div class="figures">'
        for figure in figures:
            legend = "".join(
                f'<span style="--colour: {colour}">{escape(name)}</span>'
                for name, colour in figure.legend.items()
            )
            note = f'<p class="faint">{escape(figure.note)}</p>' if figure.note else ""
            title = escape(figure.title)
            yield (
                f'<figure><figcaption>{title}</figcaption><div class="legend">{legend}</div>'
                f'<div id="figure-{index}" role="img" aria-label="{title}"'
                f' style="height: {figure.height}px"></div>{note}</figure>'
            )
            index += 1
        yield "</div>"
    if index == 0:
        yield "<h2>Figures</h2>\n<p>Nothing was trained with a tnt.Model.</p>"


def _figures_for_script(figures: Sequence[Figure]) -> str:
    content = [
        {"id": f"figure-{index}", "data": each.data, "layout": each.layout, "height": each.height}
        for index, each in enumerate(figures)
    ]
    # No text in it can end the element.
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="figures">{text}</script>'


def _events(record: RunRecord) -> list[str]:
    if not record.events:
        return ["<h2>Warnings, waits and restarts</h2>", "<p>None.</p>"]
    rows = "\n".join(
        f"<li><small>{escape(event.kind)}, {duration(event.time - record.started)} after the start"
        f"</small><br>{escape(_sentence(record, event.text))}</li>"
        for event in record.events
    )
    listed = _folded(f"<ol>\n{rows}\n</ol>", len(record.events), "messages")
    return ["<h2>Warnings, waits and restarts</h2>", listed]


def _ranks(record: RunRecord, ranks: Mapping[int, Span]) -> list[str]:
    heads = ("rank", "host", "samples/s", "own ms/step", "peak memory")
    rows = []
    for rank, host in enumerate(record.ranks.hosts):
        total = ranks.get(rank)
        device = record.ranks.devices[rank] if record.ranks.devices else ""
        cores = count(record.ranks.cores[rank], "core") if record.ranks.cores else ""
        equipment = ", ".join(filter(None, (device, cores)))
        speed = step = peak = ""
        if total is not None:
            peak = memory(total.memory)
            if total.gpu_memory is not None:
                peak += f", GPU {memory(total.gpu_memory)}"
            if total.steps:
                speed = rate(samples_per_second(total)) if total.samples else ""
                step = _number(1000 * _own_step(total))
        rows.append(
            f'<tr><td class="number">{rank}</td>'
            f"<td>{escape(host)}<br><small>{escape(equipment)}</small></td>"
            + "".join(f'<td class="number">{escape(cell)}</td>' for cell in (speed, step, peak))
            + "</tr>"
        )
    head = "".join(f"<th{'' if each == 'host' else ' class=number'}>{each}</th>" for each in heads)
    table = (
        f'<table class="ranks"><thead><tr>{head}</tr></thead><tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table>"
    )
    note = '<p class="faint">Own time is that of a step without waiting for other ranks.</p>'
    return ["<h2>Ranks</h2>", _folded(table, len(rows), "ranks"), note]


def _run(record: RunRecord) -> list[str]:
    rows = {
        "command": "" if record.function else _command(record),  # nobody can run that of tnt.run
        "hosts": ", ".join(dict.fromkeys(record.ranks.hosts)),
        "sums": record.engine,
        "versions": ", ".join(f"{name} {text}" for name, text in record.versions.items()),
        "files": ", ".join(
            f"{name} ({_words(record, option)})" for option, name in record.files.items()
        ),
    }
    body = "\n".join(
        f"<tr><th>{name}</th><td><code>{escape(text)}</code></td></tr>"
        for name, text in rows.items()
        if text
    )
    return ["<h2>The run</h2>", f"<table><tbody>\n{body}\n</tbody></table>"]


def _command(record: RunRecord) -> str:
    """The command line, without the values of -x: they may be keys, and a report is for others."""
    own = record.options[: len(record.options) - len(record.script)]
    shown = [_VARIABLE.sub(r"\1=...", word) for word in own]
    return shlex.join(["tarantella", *shown, *record.script])


def _folded(content: str, rows: int, name: str) -> str:
    if rows <= _MOST_ROWS_SHOWN:
        return content
    return f"<details><summary>{rows} {name}</summary>\n{content}\n</details>"


def _sentence(record: RunRecord, text: str) -> str:
    return _words(record, text[:1].upper() + text[1:])


def _words(record: RunRecord, text: str) -> str:
    """A text about options as the user has written them: as keywords of `tnt.run`, if it ran."""
    return in_keywords(text) if record.function else text


def _number(value: float) -> str:
    """A number with few digits, and no exponent where it can be helped."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
