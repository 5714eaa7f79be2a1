"""Engines for the tests. Without vLLM nothing here is collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ddtree.models import zoo
from ddtree.serving.plugin import REQUEST_CHECK
from tests.serving import tiny
from tests.serving.own_drafts import OwnDrafts
from tests.serving.server import Server

# What runs in the engine's process is imported there alone.
collect_ignore = ["engine.py", "oracle.py", "name_vllm.py"]
collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]

ROOT = Path(__file__).parents[2]
JOB_LIMIT_S = 300.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}

Json = dict[str, Any]
GREEDY = {"temperature": 0, "max_tokens": 40}


class Engines:
    """Runs jobs, see `tests.serving.engine`; one after another.

    Args:
        models: folder with the tiny `target` and `drafter`.
        folder: for jobs, answers and logs.
    """

    def __init__(self, models: Path, folder: Path) -> None:
        self.models = models
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        cache = str(folder / "cache")
        self.environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": cache}
        with (folder / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.serving.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
                cwd=ROOT,
            )
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) != "ready\n":
            assert line, (folder / "server.log").read_text()

    def run(self, name: str, job: Json) -> Json:
        """The answer to a job.

        Raises:
            AssertionError: with the end of the log, where the engine failed or took too long.
        """
        answer = self.try_run(name, job)
        assert answer is not None, self.log(name)[-8000:]
        return answer

    def try_run(self, name: str, job: Json) -> Json | None:
        """The answer to a job; None where the engine failed, see `log`."""
        path = self.folder / f"{name}.json"
        assert not path.exists(), "each job has a name of its own"
        path.write_text(json.dumps(job))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path} {JOB_LIMIT_S}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        answer = path.with_suffix(".answer")
        return json.loads(answer.read_text()) if status == 0 else None

    def log(self, name: str) -> str:
        """What the engine of a job wrote."""
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        """Ends the process; jobs are over by now."""
        self._process.communicate(timeout=60)

    def plain(self, **changes: object) -> Json:
        """Arguments of vLLM alone."""
        return {
            "model": str(self.models / "target"),
            "dtype": "float32",
            "generation_config": "vllm",
            "enforce_eager": True,
            "max_model_len": 512,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
            # A random model would write white space for ever.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            **changes,
        }

    def trees(
        self,
        options: Json | None = None,
        *,
        worker: str = "OracleWorker",
        max_nodes: int = 16,
        **changes: object,
    ) -> Json:
        """The same with trees: fixed budget, nothing but what the drafter or the oracle says."""
        section = {"budget": max_nodes, "lookup": False, **(options or {})}
        return self.plain(
            worker_cls=f"tests.serving.oracle.{worker}",
            speculative_config={
                "method": "dflash",
                "model": str(self.models / "drafter"),
                "num_speculative_tokens": max_nodes,
            },
            additional_config={"ddtree": section},
            **changes,
        )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the tiny `target` and `drafter`."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_models(folder)
    return folder


@pytest.fixture(scope="session")
def engines(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Runs engines; vLLM is imported once."""
    running = Engines(models, tmp_path_factory.mktemp("engines"))
    yield running
    running.close()


@dataclass(frozen=True)
class Texts:
    """Greedy texts of stock vLLM: what every other engine must say.

    Args:
        prompts: token ids.
        outputs: the continuation of each.
        said: the same as text.
        scripts: name of the script by which the oracle drafts each.
        oracle: file for `DDTREE_TEST_ORACLE`.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    said: list[str]
    scripts: list[str]
    oracle: Path

    @property
    def sequences(self) -> list[tuple[str, list[int]]]:
        """What the oracle knows: script, and prompt with continuation."""
        whole = [p + o for p, o in zip(self.prompts, self.outputs, strict=True)]
        return list(zip(self.scripts, whole, strict=True))

    def requests(self, script: str | None = None, *, stride: int = 1) -> list[Json]:
        """Requests of one script, or of all; one comes every `stride` steps."""
        chosen = [i for i, name in enumerate(self.scripts) if script in (None, name)]
        return [
            {"prompt": self.prompts[i], "params": GREEDY, "at": stride * place}
            for place, i in enumerate(chosen)
        ]

    def wrong(self, answers: list[Json], script: str | None = None) -> list[int]:
        """Which of the answers to `requests` are not what stock vLLM says."""
        chosen = [i for i, name in enumerate(self.scripts) if script in (None, name)]
        return [
            i
            for i, said in zip(chosen, answers, strict=True)
            if said["token_ids"] != self.outputs[i]
        ]


@pytest.fixture(scope="session")
def texts(engines: Engines) -> Texts:
    """Texts of 30 prompts, six for each script, by vLLM without speculation."""
    prompts = tiny.prompts(6 * len(tiny.SCRIPTS), lengths=(3, 90))
    requests = [{"prompt": prompt, "params": GREEDY} for prompt in prompts]
    answer = engines.run("stock", {"llm": engines.plain(), "batches": {"all": requests}})
    answers = answer["batches"]["all"]
    found = Texts(
        prompts,
        [said["token_ids"] for said in answers],
        [said["text"] for said in answers],
        [tiny.SCRIPTS[i % len(tiny.SCRIPTS)] for i in range(len(prompts))],
        engines.folder / "texts.oracle",
    )
    tiny.write_oracle(found.oracle, found.sequences)
    return found


@pytest.fixture(scope="session")
def own_drafts(models: Path) -> OwnDrafts:
    """Our own drafter on the tiny pair."""
    return OwnDrafts(models)


@dataclass(frozen=True)
class Chats:
    """What stock vLLM answers to messages."""

    messages: list[list[dict[str, str]]]
    said: list[str]
    sequences: list[tuple[str, list[int]]]


@pytest.fixture(scope="session")
def chats(engines: Engines) -> Chats:
    """Six short chats."""
    messages = [[{"role": "user", "content": f"why not {i}?"}] for i in range(6)]
    tokenizer = tiny.tokenizer()
    asked = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in messages
    ]
    requests = [{"prompt": prompt, "params": GREEDY} for prompt in asked]
    job = {"llm": engines.plain(), "batches": {"all": requests}}
    answers = engines.run("chats", job)["batches"]["all"]
    sequences = [
        ("interleaved", prompt + said["token_ids"])
        for prompt, said in zip(asked, answers, strict=True)
    ]
    return Chats(messages, [said["text"] for said in answers], sequences)


@pytest.fixture(scope="session")
def server(engines: Engines, texts: Texts, chats: Chats) -> Iterator[Server]:
    """`vllm serve` with trees and scripted drafts, and with too few blocks for all who ask."""
    oracle = engines.folder / "server.oracle"
    tiny.write_oracle(oracle, texts.sequences + chats.sequences)
    env = {
        **engines.environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "DDTREE_TEST_ORACLE": str(oracle),
    }
    job = engines.trees(num_gpu_blocks_override=48, max_num_seqs=24, max_model_len=256)
    program = Path(sys.executable).with_name("vllm")
    running = Server(
        [
            str(program),
            "serve",
            job.pop("model"),
            *_flags(job),
            "--logits-processors",
            REQUEST_CHECK,
        ],
        env,
        engines.folder / "serve.log",
    )
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def _flags(arguments: Json) -> list[str]:
    """The command line's way to say what `vllm.LLM` is told."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*flags, "--served-model-name", "tiny"]


@dataclass(frozen=True)
class Embedded:
    """The embedded default, and what stock vLLM says of it."""

    target: Path
    prompts: list[str]
    said: list[str]


@pytest.fixture(scope="session")
def embedded(engines: Engines) -> Embedded:
    """Chats with the target that ships with ddtree, in float32."""
    target = zoo.target_folder("smollm2-135m")
    asked = ["Count from one to twenty in words.", "Write a Python function that adds two numbers."]
    tokenizer = AutoTokenizer.from_pretrained(target)
    requests = [
        {
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            ),
            "params": {"temperature": 0, "max_tokens": 48},
        }
        for prompt in asked
    ]
    llm = engines.plain(model=str(target), kv_cache_memory_bytes=256 << 20)
    answer = engines.run("embedded", {"llm": llm, "batches": {"all": requests}})
    return Embedded(target, asked, [said["text"] for said in answer["batches"]["all"]])


@pytest.fixture(scope="session")
def embedded_server(engines: Engines, embedded: Embedded) -> Iterator[Server]:
    """`ddtree serve smollm2-135m`, as a user would start it."""
    program = Path(sys.executable).with_name("ddtree")
    memory = ["--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20)]
    running = Server(
        [str(program), "serve", "smollm2-135m", "--budget", "16", *memory, "--enforce-eager"],
        {**engines.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        engines.folder / "ddtree_serve.log",
    )
    try:
        running.wait()
        yield running
    finally:
        running.stop()
