"""A headless Chromium for tests of pages, driven through a pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 30.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_KEY_CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35}
_KEY_CODES |= {"Home": 36, " ": 32, "Tab": 9}


def chromium() -> str | None:
    """The browser's program, or None where there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Page:
    """One tab. What went wrong in it, and what it asked for, is kept.

    Attributes:
        errors: exceptions and messages of the console, as text.
        requests: addresses that were asked for, `file:` and `data:` included.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._session: str | None = None
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: object) -> dict:
        """A command of the DevTools protocol, and its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]

    def open(self, path: Path, *, fragment: str = "") -> None:
        """Load a file and wait until its scripts have run."""
        self.send("Page.navigate", url=path.as_uri() + fragment)
        end = time.monotonic() + TIMEOUT_S
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.02)

    def run(self, script: str) -> object:
        """The value of a JavaScript expression; a promise is waited for."""
        done = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """A key, down and up."""
        code = _KEY_CODES.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        """A mouse event, `mouseMoved` and the like, in pixels of the page."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def resize(self, width: int, height: int) -> None:
        """The size of the window in pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, **features: str) -> None:
        """Media features of the user, with underscores: `prefers_color_scheme="dark"`."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def screenshot(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _receive(self) -> dict:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], TIMEOUT_S)
            assert ready, "the browser says nothing"
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has gone"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Page]:
    """A browser with one empty page; it ends with the block.

    Args:
        program: see `chromium`.
        profile: a new folder.
    """
    # The browser reads commands at descriptor 3 and answers at 4; ours must not be these.
    their_in, our_out = _high_pipe()
    our_in, their_out = _high_pipe()
    quiet = os.open(os.devnull, os.O_RDWR)
    actions = [
        (os.POSIX_SPAWN_DUP2, quiet, 1),
        (os.POSIX_SPAWN_DUP2, quiet, 2),
        (os.POSIX_SPAWN_DUP2, their_in, 3),
        (os.POSIX_SPAWN_DUP2, their_out, 4),
    ]
    arguments = [program, *_FLAGS, f"--user-data-dir={profile}"]
    process = os.posix_spawn(program, arguments, dict(os.environ), file_actions=actions)
    for end in (their_in, their_out, quiet):
        os.close(end)
    try:
        yield Page(our_out, our_in)
    finally:
        for end in (our_out, our_in):  # the browser ends when its pipe does
            os.close(end)
        os.waitpid(process, 0)


def _high_pipe() -> list[int]:
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high
