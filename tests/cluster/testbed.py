"""Several hosts on one machine: network namespaces connected by a bridge, each with an sshd.

Each host has its own name, network, processes, /dev/shm, /tmp and /run, and shares all other files
with the others, as hosts of a cluster share a file system; shells there read no ~/.bashrc, which
may print or take long. Nothing outside the namespaces changes, and they disappear with the process
that created them, however it ends. It needs root, and Debian's packages openssh-server,
openssh-client, iproute2, procps and util-linux.

    python tests/cluster/testbed.py 3

opens a shell on the first of three hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen", "mount", "pkill")
LIMIT = 120  # seconds, on a busy machine

# A host has an interface in each of these networks.
NETWORKS = ("10.77.0", "10.78.0")

SSHD = """\
Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/{name}.keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 200
LogLevel ERROR
"""

# Two more names for the second host: with a port that nobody listens on, and without a known key.
SSH = """\
Host closed
  HostName node2
  Port 4
Host stranger
  HostName node2
  UserKnownHostsFile /dev/null
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


def what_is_missing() -> str:
    """Why the testbed cannot run here; empty if it can."""
    if os.geteuid() != 0:
        return "the testbed needs root"
    missing = [program for program in PROGRAMS if _which(program) is None]
    return f"the testbed needs {', '.join(missing)}" if missing else ""


# Waits for the end of the testbed, however it ends, and removes its files.
SWITCH = 'cat >/dev/null; rm -rf "$1"'


class Testbed:
    """Hosts `node1`, `node2` and so on, while the context lasts.

    Args:
        count: The number of hosts.
        shared: Folders under /tmp that all hosts share, besides this checkout and its Python.

    Example:
        >>> with Testbed(2) as testbed:
        ...     testbed["node1"].run("ssh", "node2", "hostname")
    """

    __test__ = False  # pytest would take it for a test, by its name

    def __init__(self, count: int, shared: Sequence[Path] = ()) -> None:
        self.names = tuple(f"node{number}" for number in range(1, count + 1))
        self._shared = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *shared]
        self._stack = ExitStack()
        self._nodes: dict[str, Node] = {}

    def __enter__(self) -> Testbed:
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="testbed-"))
            switch = ["unshare", "--net", "sh", "-c", SWITCH, "sh", str(self.folder)]
            self._switch = _Namespaces(stack, switch)
            self._write_files()
            for number, name in enumerate(self.names, 1):
                self._nodes[name] = self._start(stack, number, name)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    @property
    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def _write_files(self) -> None:
        key = self.folder / "key"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        public = key.with_suffix(".pub").read_text()
        addresses = [f"{network}.*" for network in NETWORKS]
        names = ",".join([*self.names, "localhost", *addresses])
        (self.folder / "known_hosts").write_text(f"{names} {public}")
        (self.folder / "ssh_config").write_text(SSH.format(folder=self.folder))
        lines = [f"{NETWORKS[0]}.{number} {name}" for number, name in enumerate(self.names, 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        for name in self.names:
            (self.folder / f"{name}.keys").write_text(public)
            (self.folder / f"{name}.sshd").write_text(SSHD.format(folder=self.folder, name=name))

    def _start(self, stack: ExitStack, number: int, name: str) -> Node:
        files = {
            Path("/etc/hosts"): self.folder / "hosts",
            Path("/etc/ssh/ssh_config"): self.folder / "ssh_config",
            Path.home() / ".bashrc": Path("/dev/null"),
        }
        settings = {
            "name": name,
            "shared": [str(path) for path in (self.folder, *self._shared)],
            "files": {str(path): str(other) for path, other in files.items() if path.exists()},
            "sshd": [_which("sshd"), "-D", "-e", "-f", str(self.folder / f"{name}.sshd")],
        }
        unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork"]
        program = [sys.executable, "-I", str(Path(__file__).with_name("machine.py"))]
        namespaces = _Namespaces(stack, [*unshare, *program, json.dumps(settings)])
        namespaces.wait_until_ready()
        node = Node(name, f"{NETWORKS[0]}.{number}", self.folder, namespaces, self._switch)
        for index, network in enumerate(NETWORKS):
            self._plug_in(node, f"eth{index}", f"{network}.{number}/24", index)
        return node

    def _plug_in(self, node: Node, interface: str, address: str, index: int) -> None:
        bridge = f"bridge{index}"
        if node.name == self.names[0]:
            self._switch.run("ip", "link", "add", bridge, "type", "bridge")
            self._switch.run("ip", "link", "set", bridge, "up")
        port = f"{node.name}-{interface}"
        peer = ["peer", "name", interface, "netns", str(node.pid)]
        self._switch.run("ip", "link", "add", port, "type", "veth", *peer)
        self._switch.run("ip", "link", "set", port, "master", bridge, "up")
        node.run("ip", "address", "add", address, "dev", interface)
        node.run("ip", "link", "set", interface, "up")


class _Namespaces:
    """Namespaces that exist as long as the process started in them."""

    def __init__(self, stack: ExitStack, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        stack.callback(self._end)
        self.forked = "--fork" in command

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("A host of the testbed did not start.")

    @property
    def pid(self) -> int:
        return child_of(self._process.pid) if self.forked else self._process.pid

    def run(self, *command: str) -> None:
        _run("nsenter", "--target", str(self.pid), "--net", *command)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


@dataclass(frozen=True)
class Process:
    """A process on a host, with its number there, and on the machine."""

    pid: int
    outer_pid: int
    command: str


class Node:
    """A host of the testbed."""

    def __init__(
        self, name: str, address: str, folder: Path, own: _Namespaces, switch: _Namespaces
    ) -> None:
        self.name = name
        self.address = address
        self.pid = own.pid
        self._keys = folder / f"{name}.keys"
        self._empty = folder / f"{name}.empty"
        self._empty.mkdir()
        self._switch = switch

    def command(self, *command: str) -> list[str]:
        """The command line that runs a command on this host."""
        return ["nsenter", "--target", str(self.pid), "--all", "--", *command]

    def run(self, *command: str, check: bool = True, **settings: Any) -> Any:
        """Runs a command on this host, and waits for it."""
        settings = {"capture_output": True, "text": True, "timeout": LIMIT, **settings}
        environ = settings.pop("env", None)
        result = subprocess.run(self.command(*_in(settings.pop("cwd", None), environ), *command),
                                stdin=subprocess.DEVNULL, **settings)  # fmt: skip
        if check and result.returncode:
            raise RuntimeError(f"{command} on {self.name}: {result.stdout}{result.stderr}")
        return result

    def start(self, *command: str, **settings: Any) -> subprocess.Popen[str]:
        """Starts a command on this host; `child_of` returns its process."""
        environ = settings.pop("env", None)
        command = (*_in(settings.pop("cwd", None), environ), *command)
        return subprocess.Popen(self.command(*command), text=True, **settings)

    def processes(self) -> list[Process]:
        """The processes on this host, except those that the testbed has started."""
        mine = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "ns/pid").readlink() == mine:
                    found.append(_process(folder))
        return [each for each in found if each.pid != 1 and "sshd" not in each.command]

    def leftovers(self) -> list[str]:
        """The files in the temporary folders."""
        listed = self.run("find", "/tmp", "/dev/shm", "/var/tmp", "-xdev", "-type", "f").stdout
        return str(listed).splitlines()

    def wipe(self) -> None:
        """Kills all processes on this host, and removes the files in its temporary folders."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process.outer_pid, signal.SIGKILL)
        for file in self.leftovers():
            self.run("rm", "-f", file)

    def hide(self, path: Path) -> None:
        """Makes a folder empty on this host."""
        self.run("mount", "--bind", str(self._empty), str(path))

    def show(self, path: Path) -> None:
        """Undoes `hide` or `replace`."""
        self.run("umount", str(path))

    def replace(self, path: Path, other: Path) -> None:
        """Replaces a file or folder by another on this host."""
        self.run("mount", "--bind", str(other), str(path))

    def refuse_key(self, refused: bool = True) -> None:
        """Refuses all ssh logins, or accepts them again."""
        if refused:
            self._keys.rename(self._keys.with_suffix(".refused"))
        else:
            self._keys.with_suffix(".refused").rename(self._keys)

    def cut(self, cut: bool = True, interfaces: Sequence[str] = ("eth0", "eth1")) -> None:
        """Unplugs the network cables, or plugs them in again."""
        for interface in interfaces:
            state = "down" if cut else "up"
            self._switch.run("ip", "link", "set", f"{self.name}-{interface}", state)


def child_of(pid: int) -> int:
    """The only child of a process, as soon as there is one."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])


def _process(folder: Path) -> Process:
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    command = " ".join(words).strip() or f"({status['Name'].strip()})"
    return Process(int(status["NSpid"].split()[-1]), int(folder.name), command)


def _in(cwd: Any, environ: dict[str, str] | None) -> list[str]:
    """The prefix that runs a command in a folder, with additional variables."""
    folder = [] if cwd is None else [f"--chdir={cwd}"]
    variables = [f"{name}={value}" for name, value in (environ or {}).items()]
    return ["env", *folder, *variables] if folder or variables else []


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=LIMIT)


def main(arguments: Sequence[str]) -> int:
    missing = what_is_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    with Testbed(int(arguments[0]) if arguments else 2) as testbed:
        hosts = testbed.folder / "hostfile"
        hosts.write_text("\n".join(testbed.names) + "\n")
        print(f"This is {testbed.names[0]}, of {', '.join(testbed.names)}. They share all files "
              "except those in /tmp. `exit` ends them all. Try:\n"
              f"  tarantella --hostfile {hosts} --no-gpu -- examples/quickstart.py")  # fmt: skip
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        shell = _in(ROOT, {"PATH": path, "PS1": r"\h:\w\$ "})
        return subprocess.call(testbed.nodes[0].command(*shell, "bash", "--norc"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
