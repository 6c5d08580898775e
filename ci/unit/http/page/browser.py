"""A headless Chromium, driven over its debugging pipe. No package is needed for it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
"""Options without which it asks hosts that no page names."""
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, which reads its descriptor 3 and writes to 4."""


def find_chromium() -> str | None:
    """The program that INFLIGHT_CHROMIUM names, or one that is installed."""
    return os.environ.get("INFLIGHT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="inflight-browser-")
        their_in, self._to = os.pipe()
        self._from, their_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(their_in), str(their_out), program, *options, *QUIET]
            + [f"--user-data-dir={self._folder.name}"],
            pass_fds=(their_in, their_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._answers = os.fdopen(self._from, "rb")
        self._unread = b""
        self._numbers = itertools.count(1)
        self._session = ""
        self.problems: list[str] = []
        """Exceptions, and what the console was told as an error."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        self._call("Browser.close")
        self._process.wait(timeout=60)
        self._answers.close()
        os.close(self._to)
        self._folder.cleanup()

    def show(self, url: str, *, width: int = 1280, height: int = 820, is_dark: bool = False) -> None:
        """Open a page."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1.5, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of JavaScript."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 120.0) -> None:
        """Until JavaScript is true."""
        self.wait_for(lambda: bool(self.run(condition)), condition, seconds)

    def wait_for(self, condition: Callable[[], bool], meaning: str, seconds: float = 120.0) -> None:
        deadline = monotonic() + seconds
        while not condition():
            assert monotonic() < deadline, f"waited in vain for {meaning}"
            sleep(0.02)

    def type(self, text: str) -> None:
        """As if with the keyboard, where the focus is."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            self._note(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._unread += piece
        answer, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(answer))

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(json.dumps(message["params"]["entry"]))
