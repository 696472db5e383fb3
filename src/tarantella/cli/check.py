"""Checks all hosts at once before a run: what is wrong with which, and what to do about it."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tarantella.cli.host import Host, host_from
from tarantella.cli.mpi import Placement
from tarantella.cli.network import Interface, check_interface, common_interfaces
from tarantella.cli.options import Options
from tarantella.cli.probe import versions
from tarantella.cli.program import file_of
from tarantella.cli.remote import Answer, ask_all, is_here
from tarantella.cli.schedulers import Allocation
from tarantella.errors import InputError

_COLUMNS = ("Tarantella", "TensorFlow", "Keras", "Python", "MPI")


@dataclass(frozen=True)
class Report:
    """A host that can take part.

    Attributes:
        host: what it has
        versions: of what is installed there, by name
        interfaces: its network interfaces
        rdma_devices: its devices for InfiniBand and the like
        asked_from: the address by which it knows this machine, if any
        identity: the same for two names of one machine
    """

    host: Host
    versions: dict[str, str]
    interfaces: tuple[Interface, ...]
    rdma_devices: tuple[str, ...]
    asked_from: str
    identity: tuple[str, str]


@dataclass(frozen=True)
class Findings:
    """What the check of all hosts has found.

    Attributes:
        hosts: all of them, in order
        reports: of those that can take part
        problems: for each host that cannot take part, a word for the table and what to do
    """

    hosts: tuple[str, ...]
    reports: dict[str, Report]
    problems: dict[str, tuple[str, str]]


def question_for(options: Options, mpiexec: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the hosts are asked."""
    programs = list(options.interpreter[:1]) if options.interpreter else []
    if not options.runs_script:
        programs.append(options.program[0])
    if options.pin_memory_to_socket:
        programs.append("numactl")
    return {
        "environ": list(environ.items()),
        "cwd": str(Path.cwd()),
        "script": file_of(options) if options.runs_script else "",
        "mpiexec": mpiexec,
        "programs": programs,
    }


def check(allocation: Allocation, question: dict[str, Any], seconds: int) -> Findings:
    """Ask all hosts, and compare them with each other and with this machine."""
    answers = ask_all(allocation, "cli.probe", question, seconds)
    mine = versions(question["mpiexec"], dict(question["environ"]))
    reports: dict[str, Report] = {}
    problems: dict[str, tuple[str, str]] = {}
    seen: dict[tuple[str, str], str] = {}
    for name, answer in answers.items():
        if answer.content is None:
            problems[name] = explain(name, answer, seconds, allocation.name)
            continue
        reports[name] = found = _report(name, answer.content)
        if answer.content["missing"]:
            problems[name] = _missing(*answer.content["missing"][0])
        elif other := seen.get(found.identity):
            problems[name] = ("same host", f"is the same machine as {other}: name it once.")
        elif different := _different(found.versions, mine):
            problems[name] = different
        seen.setdefault(found.identity, name)
    return Findings(allocation.hosts, reports, problems)


def find_placement(
    allocation: Allocation, counts: Mapping[str, int], findings: Findings, wanted: str | None
) -> Placement:
    """Where the ranks run, and the networks between them.

    Args:
        allocation: the hosts
        counts: how many ranks there are on each
        findings: what is known about them
        wanted: the network interface that the user asks for
    """
    reports = findings.reports
    here = next((name for name in reports if is_here(name)), None)
    address = next((each.asked_from for each in reports.values() if each.asked_from), "")
    if wanted is not None:
        for name, found in reports.items():
            check_interface(f"Host {name}", found.interfaces, found.rdma_devices, wanted)
        is_rdma = any(wanted in each.rdma_devices for each in reports.values())
        chosen = dict.fromkeys(reports, f"{wanted}:1" if is_rdma else wanted)
        own = [] if here is None else reports[here].interfaces
        address = next((each.host for each in own if each.name == wanted), address)
    elif all(each.rdma_devices for each in reports.values()):
        chosen = {}  # they are much faster than anything else, and MPI libraries find them
    else:
        common = common_interfaces({name: each.interfaces for name, each in reports.items()})
        chosen = {name: each.name for name, each in (common or {}).items()}
        if common and here is not None:
            address = common[here].host
    mine = chosen.get(here or "")
    launching = None if mine is None or ":" in mine else mine
    return Placement(allocation, counts, chosen, launching, address)


def without_problems(findings: Findings) -> Findings:
    """The findings about the hosts that can take part."""
    hosts = tuple(host for host in findings.hosts if host not in findings.problems)
    return Findings(hosts, {host: findings.reports[host] for host in hosts}, {})


def refuse(findings: Findings) -> None:
    """Raises an InputError if a host has a problem."""
    if not findings.problems:
        return
    lines = [f"{name}: {advice}" for name, (_, advice) in findings.problems.items()]
    first = f"{len(findings.problems)} of {len(findings.hosts)} hosts cannot take part:"
    raise InputError("\n".join([first, table(findings), *lines]))


def table(findings: Findings) -> str:
    """What is known about all hosts, as lines of text."""
    rows: list[tuple[str, ...]] = [("host", "state", *_COLUMNS, "GPUs", "cores")]
    for name in findings.hosts:
        state = findings.problems.get(name, ("ok", ""))[0]
        found = findings.reports.get(name)
        if found is None:
            rows.append((name, state, *["-"] * (len(_COLUMNS) + 2)))
            continue
        installed = [found.versions.get(column) or "-" for column in _COLUMNS]
        numbers = (str(len(found.host.gpus)), str(len(found.host.cores)))
        rows.append((name, state, *installed, *numbers))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def differences(hosts: Sequence[Host]) -> list[str]:
    """Warnings about hosts that are not alike."""
    warnings = []
    for thing, counts in (
        ("GPUs", {host.name: len(host.gpus) for host in hosts}),
        ("cores", {host.name: len(host.cores) for host in hosts}),
    ):
        usual, _ = Counter(counts.values()).most_common(1)[0]
        others = {name: count for name, count in counts.items() if count != usual}
        if others:
            listed = ", ".join(f"{name} has {count}" for name, count in others.items())
            warnings.append(
                f"The hosts do not have the same number of {thing}: {listed}, "
                f"the others have {usual}. All ranks wait for the slowest."
            )
    return warnings


def explain(name: str, answer: Answer, seconds: int, scheduler: str) -> tuple[str, str]:
    """Why there is no answer: a word for the table, and what to do."""
    if answer.status is None:
        return "no answer", (
            f"did not answer within {seconds} seconds: check that it is up and not overloaded; "
            "with TNT_CHECK_TIMEOUT=SECONDS the command waits longer."
        )
    said = answer.errors.strip()
    python = shlex.quote(sys.executable)
    for phrases, state, advice in (
        (
            ("Could not resolve hostname", "Name or service not known", "Invalid node name"),
            "unknown",
            "is not a known host: check its spelling.",
        ),
        (
            ("timed out", "No route to host", "Network is unreachable", "Host is down"),
            "not reached",
            "cannot be reached: check that it is up and connected to this network.",
        ),
        (
            ("Connection refused",),
            "no ssh",
            "is up, but no ssh server answers there: start one.",
        ),
        (
            ("Host key verification failed",),
            "key unknown",
            f"is not trusted by ssh, because its key is new or has changed: run `ssh {name}` once "
            "by hand, check the key, and accept it.",
        ),
        (
            ("Permission denied", "Too many authentication failures"),
            "refused",
            f"does not let you in without a password: make an ssh key with `ssh-keygen`, and copy "
            f"it to the host with `ssh-copy-id {name}`.",
        ),
        (
            ("can't open file",),
            "no Tarantella",
            f"has no Tarantella for {python}: install it there at the same path, or in a folder "
            "that all hosts share.",
        ),
        (
            (f"{sys.executable}: ", f"{sys.executable}'"),
            "no Python",
            f"has no {python}: install the same Python environment there at the same path, or "
            "in a folder that all hosts share.",
        ),
    ):
        if any(phrase in said for phrase in phrases):
            return state, advice
    last = said.splitlines()[-1] if said else f"exit status {answer.status}"
    return "failed", f"could not be reached through {scheduler}: {last}"


def _report(name: str, content: dict[str, Any]) -> Report:
    return Report(
        host_from(content["host"], name),
        content["versions"],
        tuple(Interface(**each) for each in content["interfaces"]),
        tuple(content["rdma_devices"]),
        content["asked_from"],
        (content["system"], content["name"]),
    )


def _missing(kind: str, path: str) -> tuple[str, str]:
    share = "copy it to the same path there, or use a folder that all hosts share."
    if kind == "directory":
        return "no directory", f"does not have the working directory {path}: {share}"
    if kind == "script":
        return "no script", f"does not have the script {path}: {share}"
    if kind == "mpi":
        return "no MPI", f"does not have the MPI launcher {path}: install the same MPI there."
    return "no program", f"does not have the program {path}: install it there."


def _different(theirs: dict[str, str], mine: dict[str, str]) -> tuple[str, str] | None:
    for name, version in mine.items():
        other = theirs.get(name, "")
        if other != version:
            return f"other {name}" if other else f"no {name}", (
                f"has {_named(name, other)}, but this machine has {_named(name, version)}: "
                "install the same version everywhere."
            )
    return None


def _named(name: str, version: str) -> str:
    return (version if name == "MPI" else f"{name} {version}") if version else f"no {name}"
