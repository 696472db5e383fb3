"""A real browser without a window, driven through its DevTools protocol over two pipes.

To look at a page as the tests see it, `python tests/unit/chromium.py run.html` saves pictures of
it on a phone and on a desktop, light and dark.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 120  # seconds, for a machine that is busy with other things


def find_chromium() -> str | None:
    """The path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One tab of the browser.

    Attributes:
        requests: the addresses that were asked for
        complaints: errors and warnings on the console, and exceptions
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._commands = commands
        self._answers = answers
        self._received = b""
        self._number = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int, dark: bool = False, phone: bool = False) -> None:
        """Loads a file, on a screen of this width."""
        self.requests.clear()
        self.complaints.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self._call("Page.navigate", url=path.absolute().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass
        # Plotly draws in the next frames.
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; it waits for a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Saves a picture of the whole page."""
        taken = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            piece = os.read(self._answers, 1 << 16)
            assert piece, "the browser has ended"
            self._received += piece
        text, _, self._received = self._received.partition(b"\0")
        message = json.loads(text)
        details = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled":
            if details["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(details["args"]))
        elif message.get("method") == "Log.entryAdded":
            self.complaints.append(details["entry"]["text"])
        return message


@contextmanager
def run_chromium() -> Iterator[Chromium]:
    """A browser, until the block ends."""
    program = find_chromium()
    assert program is not None
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()

    def connect() -> None:  # the browser reads from 3 and writes to 4
        spare = [os.dup(read_commands), os.dup(write_answers)]
        spare = [os.dup(each) if each in (3, 4) else each for each in spare]
        os.dup2(spare[0], 3)
        os.dup2(spare[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *(program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
                *("--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
                "--disable-dev-shm-usage",  # it is small in containers
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            browser = Chromium(commands, answers)
            yield browser
            browser.close()
        finally:
            os.close(commands)
            os.close(answers)  # which also ends it
            process.wait(10)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    with run_chromium() as chromium:
        for wide, is_dark in ((390, False), (390, True), (1280, False), (1280, True)):
            chromium.open(page, wide, is_dark, phone=wide == 390)
            chromium.screenshot(page.with_suffix(f".{wide}{'-dark' if is_dark else ''}.png"))
