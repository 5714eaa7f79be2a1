"""Engines for `serving.py`: each in a process of its own, which works when it is its turn.

A process holds one vLLM engine and does the jobs that come on a pipe. Between jobs it is stopped
(SIGSTOP): a waiting engine would use a hundredth of a core, in threads that look for messages, a
thousand times a second. The engine runs in that same process (VLLM_ENABLE_V1_MULTIPROCESSING=0)
with OMP_NUM_THREADS threads, not bound to cores. vLLM is imported there alone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from serving_attention import attention_ms

from ddtree.serving.options import ServingOptions
from ddtree.serving.plugin import CPU_WORKER

KV_CACHE_BYTES = 512 * 2**20
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# The longest that a start or a job may take.
LIMIT_S = 900.0
LOG_TAIL = 30
# An engine that was told to end is killed after so long.
END_S = 20.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to serve.

    Args:
        says: what it is, for the reader.
        num_draft_tokens: vLLM's `num_speculative_tokens`; 0 does not speculate.
        options: of draft trees, as of `ServingOptions`; None takes vLLM's own worker.
    """

    says: str
    num_draft_tokens: int = 0
    options: Mapping[str, Any] | None = None

    @property
    def is_tree(self) -> bool:
        """Whether it is draft trees that are served."""
        return self.options is not None and self.options.get("method", "ddtree") == "ddtree"

    def llm_arguments(self, drafter: str) -> dict[str, Any]:
        """What `vllm.LLM` is given for it, besides what all arms share."""
        if not self.num_draft_tokens:
            return {}
        arguments: dict[str, Any] = {
            "speculative_config": {
                "method": "dflash",
                "model": drafter,
                "num_speculative_tokens": self.num_draft_tokens,
            }
        }
        if self.options is not None:
            options = ServingOptions(**{"max_nodes": self.num_draft_tokens, **self.options})
            arguments["worker_cls"] = CPU_WORKER
            arguments["additional_config"] = options.as_additional_config()
        return arguments


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all engines of a run share.

    Args:
        target, drafter: their folders.
        max_model_len: tokens of the longest request, its drafts included.
        max_num_seqs: most requests at once.
        compiled: let vLLM compile the model.
    """

    target: str
    drafter: str
    max_model_len: int
    max_num_seqs: int
    compiled: bool = False

    def llm_arguments(self) -> dict[str, Any]:
        """What `vllm.LLM` is given for every arm: nothing is kept from one run for the next."""
        return {
            "model": self.target,
            "dtype": "float32",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": not self.compiled,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "disable_log_stats": False,
        }


@dataclass
class Served:
    """What became of some prompts that were served together.

    Args:
        seconds: from the first prompt to the last token.
        token_ids: of each prompt, what was said.
        request_s: of each prompt, seconds from its arrival to its last token.
        in_flight: requests at once, mean over time.
        num_steps: of the engine.
        num_rounds, round_tokens: tokens behind a request's first, and in how many steps they came,
            over requests.
        decode_s, decode_tokens: steps in which no prompt was read, and what they brought.
        num_drafts, num_draft_tokens: as vLLM counts.
    """

    token_ids: list[list[int]]
    request_s: list[float]
    seconds: float = 0.0
    in_flight: float = 0.0
    num_steps: int = 0
    num_rounds: int = 0
    round_tokens: int = 0
    decode_s: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0


class SteppedEngine(Protocol):
    """What is used of `vllm.LLMEngine`."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> object:
        """See vLLM."""

    def step(self) -> Sequence[Any]:
        """See vLLM: the requests that have more tokens than before."""

    def abort_request(self, request_ids: list[str]) -> None:
        """See vLLM."""


def serve(
    engine: SteppedEngine, prompts: Sequence[Sequence[int]], concurrency: int, params: Any
) -> Served:
    """Serve all prompts in order: whenever fewer requests than wanted are there, the next comes.

    Args:
        engine: with nothing to do.
        prompts: token ids of each.
        concurrency: how many requests are to be there at once.
        params: `SamplingParams` of all.
    """
    served = Served([[] for _ in prompts], [0.0] * len(prompts))
    arrived_s: dict[int, float] = {}
    began = time.perf_counter()
    num_started = 0
    while arrived_s or num_started < len(prompts):
        while len(arrived_s) < concurrency and num_started < len(prompts):
            arrived_s[num_started] = time.perf_counter()
            prompt = {"prompt_token_ids": list(prompts[num_started])}
            engine.add_request(str(num_started), prompt, params)
            num_started += 1
        reading = any(not served.token_ids[i] for i in arrived_s)
        step_began, num_there = time.perf_counter(), len(arrived_s)
        num_new = 0
        for output in engine.step():
            i, token_ids = int(output.request_id), list(output.outputs[0].token_ids)
            fresh = len(token_ids) - len(served.token_ids[i])
            num_new += fresh
            if served.token_ids[i] and fresh:
                served.num_rounds += 1
                served.round_tokens += fresh
            served.token_ids[i] = token_ids
            if output.finished:
                served.request_s[i] = time.perf_counter() - arrived_s.pop(i)
        step_s = time.perf_counter() - step_began
        served.num_steps += 1
        served.in_flight += step_s * num_there
        if not reading:
            served.decode_s += step_s
            served.decode_steps += 1
            served.decode_tokens += num_new
    served.seconds = time.perf_counter() - began
    served.in_flight /= served.seconds
    return served


def step_seconds(
    engine: SteppedEngine, prompt: Sequence[int], num_steps: int, params: Any
) -> list[float]:
    """Seconds of each of some steps behind a prompt, the first ones left out.

    The prompt's own step drafts already, but the one behind it is the first that verifies.

    Args:
        engine: with nothing to do; so it is again at the end.
        prompt: token ids.
        num_steps: to be timed; `params` must allow for as many tokens as they may bring.
    """
    engine.add_request("steps", {"prompt_token_ids": list(prompt)}, params)
    while not engine.step():
        pass
    engine.step()
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.abort_request(["steps"])
    return seconds


# The process of an engine


class _Process:
    """What a job is run with, in the engine's process."""

    def __init__(self, arm: Arm, setup: Setup) -> None:
        from vllm import LLM

        self.llm = LLM(**setup.llm_arguments(), **arm.llm_arguments(setup.drafter))

    def facts(self) -> dict[str, Any]:
        import torch

        return {"threads": torch.get_num_threads()}

    def serve(
        self, prompts: Sequence[Sequence[int]], concurrency: int, max_new_tokens: int
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        before = self._counts()
        params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
        served = serve(self.llm.llm_engine, prompts, concurrency, params)
        drafts, tokens = (a - b for a, b in zip(self._counts(), before, strict=True))
        served.num_drafts, served.num_draft_tokens = int(drafts), int(tokens)
        return asdict(served)

    def step_seconds(self, prompt: Sequence[int], num_steps: int) -> dict[str, Any]:
        from vllm import SamplingParams

        before = self._counts()
        params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
        seconds = step_seconds(self.llm.llm_engine, prompt, num_steps, params)
        drafts, tokens = (a - b for a, b in zip(self._counts(), before, strict=True))
        return {"seconds": seconds, "rows": 1 + (tokens / drafts if drafts else 0)}

    def attention_ms(self, **arguments: Any) -> dict[str, Any]:
        return self.llm.collective_rpc(attention_ms, kwargs=arguments)[0]

    def _counts(self) -> tuple[float, float]:
        """Drafts and draft tokens since the start."""
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens")
        found = {
            metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in names
        }
        return found.get(names[0], 0), found.get(names[1], 0)


def _run(connection: Connection, arm: Arm, setup: Setup, log: str) -> None:
    """The process: says what it is, then does job after job until it is told None."""
    # Stopped, it would outlive a benchmark that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    process = _Process(arm, setup)
    connection.send(process.facts())
    while (job := connection.recv()) is not None:
        name, arguments = job
        connection.send(getattr(process, name)(**arguments))


# Seen from the benchmark's process


class EngineEndedError(RuntimeError):
    """An engine's process ended, or was given up; the message has the end of its log."""


@dataclass
class Engine:
    """An engine that runs elsewhere.

    Args:
        name: of its arm.
        facts: {"threads"}, how many it uses.
    """

    name: str
    process: BaseProcess
    connection: Connection
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Let it do a job, and wait.

        Raises:
            EngineEndedError: it ended or took too long.
        """
        self._signal(signal.SIGCONT)
        with suppress(OSError):  # where it has ended, that is what waiting says
            self.connection.send((job, arguments))
        answer = self.wait()
        self._signal(signal.SIGSTOP)
        return answer

    def start(self) -> None:
        """Wait until it can be asked; raises as `ask`."""
        self.facts = self.wait()
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """End the process, whatever it does."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):  # it may have ended
            self.connection.send(None)
        self.process.join(END_S)
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def wait(self) -> dict[str, Any]:
        """What it says next; raises as `ask`."""
        try:
            if self.connection.poll(LIMIT_S):
                return self.connection.recv()
            why = f"took longer than {LIMIT_S:.0f} s"
        except EOFError:
            why = "ended"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-LOG_TAIL:])
        raise EngineEndedError(f"the engine of arm {self.name} {why}; its log ends with\n{tail}")


@contextmanager
def engines(
    arms: Mapping[str, Arm], setup: Setup, *, num_threads: int, say: Callable[[str], None]
) -> Iterator[dict[str, Engine]]:
    """An engine for each arm, started one after another: at its start ours measures costs.

    Raises:
        EngineEndedError: one did not start.
    """
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(num_threads))  # read when a process begins
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ddtree-serving-")))
        found = {}
        for name, arm in arms.items():
            began = time.perf_counter()
            found[name] = stack.enter_context(_started(name, arm, setup, folder))
            say(f"engine {name}: started in {time.perf_counter() - began:.0f} s")
        yield found


@contextmanager
def _started(name: str, arm: Arm, setup: Setup, folder: Path) -> Iterator[Engine]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    log = folder / f"{name}.log"
    process = context.Process(target=_run, args=(theirs, arm, setup, str(log)), daemon=True)
    process.start()
    theirs.close()  # else its end would never be seen here
    engine = Engine(name, process, ours, log)
    try:
        engine.start()
        yield engine
    finally:
        engine.end()
