"""A stage in several processes: nothing is lost, nobody stays behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from ddtree.errors import OptionError
from ddtree.train.workers import WorkerError, in_processes

LONG_S = 300.0


def patient(folder: Path, part: tuple[int, int]) -> Generator[tuple[int, int], None, None]:
    """Says who works, then waits; leaves a file when it is closed."""
    try:
        yield part[0], os.getpid()
        time.sleep(LONG_S)
    finally:
        (folder / f"closed-{part[0]}").touch()


def ends(pid: int) -> bool:
    """Whether a process is gone soon."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_killed_worker_is_an_error_and_the_others_close_what_they_do(tmp_path: Path) -> None:
    items = in_processes(partial(patient, tmp_path), 2)
    pids = dict([next(items), next(items)])
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="got one killed by signal 9"):
        next(items)
    assert [path.name for path in tmp_path.iterdir()] == ["closed-1"]
    assert all(map(ends, pids.values()))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "from ddtree.train.workers import in_processes\n"
        "from tests.unit.train.test_workers import patient\n"
        "if __name__ == '__main__':\n"
        "    for item in in_processes(partial(patient, Path(sys.argv[1])), 1):\n"
        "        print(item[1], flush=True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends(pid)
    assert (tmp_path / "closed-0").exists()


def test_an_error_of_a_user_crosses_the_border_whole() -> None:
    error = OptionError("layers", expected="some", got=3, remedy="Try again.")
    crossed = pickle.loads(pickle.dumps(error))
    assert type(crossed) is OptionError
    assert str(crossed) == str(error)
    assert (crossed.argument, crossed.got, crossed.remedy) == ("layers", "3", "Try again.")
