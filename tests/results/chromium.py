"""A headless Chromium, spoken to through its debugging pipe; nothing but the standard library.

Where no Chromium is installed, `why_none` says so, and tests are skipped with that sentence.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE: Final = 60.0  # seconds until an answer is overdue
PLACE: Final = (
    # not as a `preexec_fn`, which a process with threads should not have
    "import os, sys; read, write, *command = sys.argv[1:]; "
    "os.dup2(int(read), 3); os.dup2(int(write), 4); os.execv(command[0], command)"
)


def executable() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def why_none() -> str | None:
    """None, or why there is no browser to look at the page with."""
    return None if executable() else f"no Chromium on PATH: looked for {', '.join(NAMES)}"


class Chromium:
    """One browser with one page. As a context it ends what it started."""

    def __init__(self, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # from the browser, to the browser
        # clear of 3 and 4, where the browser expects its two ends
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs[0], ours[1])]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", PLACE, *map(str, ends)),
                str(executable()),
                "--headless=new",
                "--no-sandbox",  # which a container without user namespaces does not allow
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=ends,
        )
        for fd in (*ends, theirs[0], ours[1]):
            os.close(fd)
        self._read, self._write = ours[0], theirs[1]
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    _session: str | None = None

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # which it takes as the end
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command of the DevTools protocol; what happens meanwhile is kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {PATIENCE:.0f} s"
            piece = os.read(self._read, 1 << 16)
            assert piece, "Chromium ended"
            self._buffer += piece
        one, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message

    def open(self, file: Path, width: int, height: int, scheme: str) -> None:
        """Show a file in a window of that size, for a reader who prefers `scheme`."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=wanted)
        self.events.clear()
        self.ask("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression, in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self) -> list[str]:
        """What the console shows as an error or a warning, and what was thrown."""
        self.value("1")  # so that what was on its way is here
        found = []
        for event in self.events:
            method, said = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(said["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
                found.append(str(said["args"]))
            elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
                found.append(said["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for, but for data that stands in the page."""
        urls = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]
