"""Headless Chromium over its debugging pipe: what a page says, asks for and looks like. Needs no other package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 90


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium: apt-get install chromium (.ci/run does so where it may)"
)


class Page:
    """One page. `console` holds what it logged, threw or was denied, `requests` the addresses it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._num_calls = 0
        self._session: str | None = None
        self._events: list[str] = []
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, *, scheme: str = "light", width: int = 1200, height: int = 900) -> None:
        """Open a file under a colour scheme ("light", "dark") and a window size in CSS pixels, and wait for it."""
        self.console.clear()
        self.requests.clear()
        self._events.clear()
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """The expression's JSON value. It is the debugger's, so the page's policy against scripts does not count."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_calls += 1
        number = self._num_calls
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message; events are noted."""
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {TIMEOUT_S} s")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def chromium_page(profile: Path, *, options: Sequence[str] = ()) -> Iterator[Page]:
    """`profile`: an empty folder for the browser's own files."""
    program = find_chromium()
    assert program is not None
    to_browser, from_browser = os.pipe(), os.pipe()

    def give_pipes() -> None:  # Chromium reads from descriptor 3 and writes to 4
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    flags = ["--headless=new", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--mute-audio"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # which refuses to run as root
    command = [program, *flags, "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [*command, *options],
        preexec_fn=give_pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        page = Page(to_browser[1], from_browser[0])
        yield page
        page._session = None
        page.call("Browser.close")
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
