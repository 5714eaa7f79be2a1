"""A server in a process of its own, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_LIMIT_S = 400.0


class Server:
    """`vllm serve` or another program with the same flags; on a free port of this machine.

    Args:
        command: host and port are added.
        env: of the process.
        log: where it writes.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.port = _free_port()
        self.log = log
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [*command, *place],
                env=dict(env),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Until it answers.

        Raises:
            AssertionError: with the end of its log, where it does not.
        """
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit and self._process.poll() is None:
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
            else:
                return
        raise AssertionError(self.log.read_text()[-8000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[str, float]:
        """Sums over labels of each sample's name."""
        sums: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def call_workers(self, method: str) -> Any:
        """What the first worker's method says."""
        return self.post("/collective_rpc", {"method": method})["results"][0]

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
