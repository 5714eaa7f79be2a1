"""Around the engine: the vLLM that is here, its real configuration, `ddtree serve` over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn
    pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make serving-env")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import validate_logits_processors_parameters  # noqa: E402

from ddtree.errors import OptionError  # noqa: E402
from ddtree.serving.compatibility import (  # noqa: E402
    check_config,
    check_signatures,
    check_versions,
)
from ddtree.serving.options import ServingOptions, serving_options  # noqa: E402
from ddtree.serving.plugin import (  # noqa: E402
    CPU_WORKER,
    REQUEST_CHECK,
    runs_our_worker,
    without_request_check,
)
from tests.serving import tiny  # noqa: E402
from tests.serving.conftest import ENVIRONMENT, ROOT  # noqa: E402

Json = dict[str, Any]
START_LIMIT_S = 300.0
MAX_NODES = 12


def test_the_vllm_that_is_here_is_one_that_we_know() -> None:
    assert check_versions().startswith("0.32.")
    check_signatures()


def real_config(models: Path, **changes: object) -> Any:
    options = ServingOptions(max_nodes=MAX_NODES)
    arguments: Json = {
        "model": str(models / "target"),
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "worker_cls": CPU_WORKER,
        "speculative_config": {
            "method": "dflash",
            "model": str(models / "drafter"),
            "num_speculative_tokens": MAX_NODES,
        },
        "additional_config": options.as_additional_config(),
        "logits_processors": [REQUEST_CHECK],
        "async_scheduling": False,
        **changes,
    }
    return EngineArgs(**arguments).create_engine_config()


def test_what_serve_says_makes_a_configuration_that_passes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = real_config(models)
    check_config(config)
    assert runs_our_worker(config)
    options = serving_options(config.additional_config, num_speculative_tokens=MAX_NODES)
    assert options == ServingOptions(max_nodes=MAX_NODES)
    others = real_config(models, logits_processors=[REQUEST_CHECK, "a.b:C"])
    with pytest.raises(OptionError, match="--logits-processors"):
        check_config(others)
    assert without_request_check(others.model_config.logits_processors) == ["a.b:C"]
    assert without_request_check(config.model_config.logits_processors) is None
    assert not runs_our_worker(
        real_config(models, worker_cls="auto", additional_config={}, logits_processors=None)
    )


def test_a_wrong_option_of_a_request_is_refused_where_it_comes_in() -> None:
    def check(**extra_args: object) -> None:
        params = SamplingParams(extra_args=extra_args)
        validate_logits_processors_parameters([REQUEST_CHECK], params)

    check()
    check(ddtree_method="ar", ddtree_budget=3, another=1)
    with pytest.raises(VLLMValidationError, match=r"ddtree_budget: expected a whole number"):
        check(ddtree_budget=-1)


# Over HTTP.


@dataclass(frozen=True)
class Server:
    """A running `ddtree serve`."""

    port: int
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], **changes: object) -> tuple[int, Json]:
        """Status and answer of a completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, **changes}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metrics(self) -> dict[str, float]:
        """Samples of our metrics and vLLM's about drafts, by name and bucket."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith(("ddtree:", "vllm:spec_decode_num")) and "position=" not in line:
                key, _, number = line.rpartition(" ")
                assert 'model_name="tiny"' in key
                assert 'engine="0"' in key
                bucket = key.partition('le="')[2].partition('"')[0]
                found[key.partition("{")[0] + bucket] = float(number)
        return found


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(models / "target"), "--drafter", str(models / "drafter")]
    words += ["--max-nodes", str(MAX_NODES), "--port", str(port), "--host", "127.0.0.1"]
    words += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    words += ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--enforce-eager"]
    words += ["--return-tokens-as-token-ids", "--max-num-seqs", "8"]
    kept = {k: v for k, v in ENVIRONMENT.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    path = os.pathsep.join([kept["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    log = folder / "log"
    process = subprocess.Popen(
        [sys.executable, "-c", "from ddtree.cli.app import main; main()", *words],
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        env={**os.environ, **kept, "PYTHONPATH": path, "VLLM_CACHE_ROOT": str(folder / "cache")},
        cwd=ROOT,
    )
    running = Server(port, log)
    try:
        _wait(running, process)
        yield running
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_LIMIT_S:
        assert process.poll() is None, server.log.read_text()[-8000:]
        try:
            server.get("/health")
            return
        except (OSError, urllib.error.URLError):
            time.sleep(1)
    pytest.fail(server.log.read_text()[-8000:])


def test_methods_of_one_server_say_the_same(server: Server) -> None:
    for prompt in tiny.prompts(3):
        said = []
        for xargs in (
            {},
            {"ddtree_method": "ar"},
            {"ddtree_method": "dflash"},
            {"ddtree_method": "ddtree", "ddtree_budget": 5},
            {"ddtree_budget": 1000},
        ):
            status, answer = server.complete(prompt, vllm_xargs=xargs)
            assert status == 200, answer
            said.append(answer["choices"][0]["text"])
        assert said == [said[0]] * 5


def test_a_wrong_request_is_a_400_that_says_why_and_the_server_goes_on(server: Server) -> None:
    prompt = tiny.prompts(1)[0]
    for xargs, named in (
        ({"ddtree_budget": -1}, "ddtree_budget: expected a whole number from 0 to 4096, got -1"),
        ({"ddtree_method": "x"}, "ddtree_method: expected one of ar, dflash, ddtree, got 'x'"),
        ({"ddtree_budgt": 1}, "ddtree_budgt: expected one of ddtree_method, ddtree_budget"),
    ):
        status, answer = server.complete(prompt, vllm_xargs=xargs)
        assert status == 400
        assert answer["error"]["message"].startswith(named)
    assert server.complete(prompt)[0] == 200


def test_metrics_of_drafts_are_served_and_agree_with_vllms(server: Server) -> None:
    prompt = tiny.prompts(1, lengths=(20, 30))[0]
    server.complete(prompt, vllm_xargs={"ddtree_method": "dflash", "ddtree_budget": 3})
    before = server.metrics()
    for ours, vllms in (
        ("rounds", "drafts"),
        ("drafted_tokens", "draft_tokens"),
        ("accepted_tokens", "accepted_tokens"),
    ):
        assert before[f"ddtree:{ours}_total"] == before[f"vllm:spec_decode_num_{vllms}_total"]
    rounds = before["ddtree:rounds_total"]
    assert rounds > 0
    assert before["ddtree:acceptance_length_sum"] == rounds + before["ddtree:accepted_tokens_total"]
    assert before["ddtree:tree_nodes_sum"] == before["ddtree:drafted_tokens_total"]
    assert before["ddtree:tree_nodes_count"] == before["ddtree:acceptance_length_count"] == rounds
    assert 0 < before["ddtree:budget"] <= MAX_NODES
    assert before["ddtree:tree_nodes_bucket16.0"] == rounds
    server.complete(prompt, vllm_xargs={"ddtree_method": "ar"})
    assert server.metrics()["ddtree:rounds_total"] == rounds
