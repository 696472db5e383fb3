"""The first process of a host of the testbed, inside its namespaces: sets the host up, and waits.

Everything on the host runs in its process namespace, and ends with this process. This process ends
when its standard input is closed, so with the testbed, however that ends. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

OWN_FOLDERS = ("/dev/shm", "/run", "/tmp", "/var/tmp")  # separate from those of the machine


def main(text: str) -> None:
    settings: dict[str, Any] = json.loads(text)
    threading.Thread(target=end_with_testbed, daemon=True).start()
    socket.sethostname(settings["name"])
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "sysfs", "sysfs", "/sys")  # shows only the interfaces of this host
    shared = {path: os.open(path, os.O_PATH) for path in settings["shared"]}
    for folder in OWN_FOLDERS:
        run("mount", "-t", "tmpfs", "tmpfs", folder)
    Path("/run/sshd").mkdir()
    for path, descriptor in shared.items():
        if path.startswith(tuple(f"{folder}/" for folder in OWN_FOLDERS)):
            Path(path).mkdir(parents=True, exist_ok=True)
            place = f"/proc/{os.getpid()}/fd/{descriptor}"
            run("mount", "--no-canonicalize", "--bind", place, path)
    for place, content in settings["files"].items():
        run("mount", "--bind", content, place)
    run("ip", "link", "set", "lo", "up")
    subprocess.Popen(settings["sshd"])
    os.write(1, b"ready\n")
    while True:
        try:
            os.wait()  # orphans become children of this process
        except ChildProcessError:
            signal.pause()


def end_with_testbed() -> None:
    sys.stdin.read()
    os._exit(0)


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1])
