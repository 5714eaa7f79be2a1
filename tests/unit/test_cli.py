"""The command line: results on standard output, all else on standard error, mistakes named."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

import ddtree
from ddtree.cli import app as cli
from ddtree.models import folder as model_folder
from ddtree.types import METHODS
from tests.support.checkpoints import edit_json, write_drafter, write_target
from tests.support.models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("unchecked")

PROGRAM = "from ddtree.cli.app import main; main()"
SHORT = ("--max-new-tokens", "12")


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs `ddtree` in this process."""

    def call(*arguments: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["ddtree", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Ran(ended.value.code or 0, captured.out, captured.err)

    verbosity = transformers_logging.get_verbosity()
    yield call
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


@dataclass(frozen=True)
class Folders:
    """A target and a drafter that fit together, as options."""

    target: Path
    drafter: Path

    @property
    def options(self) -> tuple[str, ...]:
        return ("--target", str(self.target), "--drafter", str(self.drafter))


@pytest.fixture(scope="module")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("checkpoints")
    return Folders(write_target(root / "target"), write_drafter(root / "drafter"))


@pytest.fixture(scope="module")
def pair(fitting: Folders) -> ddtree.Pair:
    """The same pair, through the Python API."""
    return ddtree.load(fitting.target, fitting.drafter)


@pytest.fixture
def own(fitting: Folders, tmp_path: Path) -> Folders:
    """A copy to break."""
    shutil.copytree(fitting.target, tmp_path / "target")
    return Folders(tmp_path / "target", fitting.drafter)


# The options.

OPTIONS = {
    "generate": [
        "PROMPT",
        "--target",
        "--drafter",
        "--method",
        "--budget",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--typical-p",
        "--repetition-penalty",
        "--presence-penalty",
        "--frequency-penalty",
        "--logit-bias",
        "--bad-word",
        "--suppress-token",
        "--json-schema",
        "--regex",
        "--seed",
        "--no-coupled",
        "--no-lookup",
        "--min-new-tokens",
        "--max-new-tokens",
        "--stop",
        "--ignore-eos",
        "--system",
        "--raw",
        "--device",
        "--dtype",
        "--allow-untested",
        "--json",
        "--logprobs",
        "--compare",
        "--trace",
        "--trace-ranks",
        "--profile",
    ],
    "convert": ["SOURCE", "--to", "--out", "--target"],
    "serve": [
        "MODEL",
        "--drafter",
        "--method",
        "--budget",
        "--max-nodes",
        "--max-batch-rows",
        "--no-lookup",
        "--no-transitions",
        "--print-command",
    ],
    "replay": ["FILE", "--builders", "--budgets", "--json"],
    "doctor": ["--target", "--drafter", "--json"],
    "bench": [
        "--suite",
        "--source",
        "--methods",
        "--budgets",
        "--assistant",
        "--temperature",
        "--limit",
        "--max-new-tokens",
        "--seed",
        "--out",
        "--trace",
        "--target",
        "--drafter",
        "--device",
        "--dtype",
        "--allow-untested",
    ],
    "bench report": ["FOLDER"],
    "bench compare": ["BEFORE", "AFTER"],
    "tree": [
        "PROMPT",
        "--html",
        "--rounds",
        "--max-nodes",
        "--target",
        "--drafter",
        "--method",
        "--budget",
        "--temperature",
        "--seed",
        "--max-new-tokens",
        "--system",
        "--raw",
        "--device",
        "--dtype",
    ],
    "train": [
        "--prompts",
        "--out",
        "--target",
        "--recipe",
        "--num-steps",
        "--num-workers",
        "--device",
        "--dtype",
        "--allow-untested",
    ],
    "train fit": [
        "--samples",
        "--out",
        "--target",
        "--recipe",
        "--num-steps",
        "--start-from",
        "--num-workers",
        "--device",
        "--dtype",
        "--allow-untested",
    ],
    "train respond": [
        "--prompts",
        "--out",
        "--target",
        "--max-new-tokens",
        "--num-rows",
        "--temperature",
        "--sampled-share",
        "--samples-per-prompt",
        "--seed",
        "--record-layers",
        "--num-workers",
        "--device",
        "--dtype",
        "--allow-untested",
    ],
    "train features": [
        "--responses",
        "--out",
        "--layers",
        "--target",
        "--num-workers",
        "--device",
        "--dtype",
        "--allow-untested",
    ],
    "train evaluate": [
        "--prompts",
        "--out",
        "--target",
        "--drafter",
        "--budgets",
        "--max-new-tokens",
        "--temperature",
        "--seed",
        "--limit",
        "--device",
        "--dtype",
        "--allow-untested",
    ],
}


def test_the_options_of_every_command_are_frozen() -> None:
    program = typer.main.get_command(cli.app)
    commands = dict(program.commands)
    for group in ("bench", "train"):
        parts = commands[group].commands
        commands.update({f"{group} {name}": command for name, command in parts.items()})
    found = {
        name: [p.opts[0] if p.opts[0].startswith("-") else p.opts[0].upper() for p in c.params]
        for name, c in commands.items()
    }
    assert found == OPTIONS
    assert [p.opts for p in program.params] == [["--version"]]


def test_the_target_of_a_recipe_is_a_default_where_a_recipe_is_read() -> None:
    train = dict(typer.main.get_command(cli.app).commands)["train"]
    for command in (train, train.commands["fit"]):
        (target,) = [p for p in command.params if "--target" in p.opts]
        assert target.show_default == "the recipe's, else smollm2-135m"


@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("doctor", "--help")])
def test_help_is_on_standard_output(arguments: tuple[str, ...], run: Run) -> None:
    done = run(*arguments)
    assert done.code == 0
    assert "Usage" in done.out
    assert done.err == ""


def test_the_version_is_one_line(run: Run) -> None:
    assert run("--version") == Ran(0, f"{ddtree.__version__}\n", "")


# Text.


@pytest.mark.parametrize("method", METHODS)
def test_text_goes_to_standard_output_and_one_line_of_statistics_to_standard_error(
    method: str, run: Run, fitting: Folders, pair: ddtree.Pair
) -> None:
    options = (*SHORT, "--method", method, "--budget", "16")
    done = run("generate", "hello", *fitting.options, *options)
    expected = pair.generate("hello", method=method, budget=16, max_new_tokens=12)
    assert done.code == 0
    assert done.out == expected.text + "\n"
    (line,) = done.err.splitlines()
    for part in (
        f"{expected.num_tokens} tokens",
        f"{expected.num_rounds} rounds",
        f"tau {expected.acceptance_length:.2f}",
        "tokens/s",
        "prefill",
        "verify",
        f"ended by {expected.finish_reason}",
    ):
        assert part in line
    assert ("draft" in line) == (method != "ar")


def test_a_text_is_the_same_without_coupled_drafting_and_its_rounds_are_others(
    run: Run, fitting: Folders, pair: ddtree.Pair
) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "budget": 20, "max_new_tokens": 24}
    arguments = [x for k, v in sampled.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    done = run("generate", "hello", *fitting.options, "--json", "--no-coupled", *arguments)
    apart = pair.generate("hello", coupled=False, **sampled)
    coupled = pair.generate("hello", **sampled)
    assert json.loads(done.out)["text"] == apart.text == coupled.text
    assert json.loads(done.out)["num_rounds"] == apart.num_rounds != coupled.num_rounds


def test_options_reach_the_generation(run: Run, fitting: Folders, pair: ddtree.Pair) -> None:
    sampled = {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "seed": 3, "budget": 5}
    arguments = [x for k, v in sampled.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    done = run("generate", "hello", *fitting.options, *SHORT, *arguments)
    assert done.out == pair.generate("hello", max_new_tokens=12, **sampled).text + "\n"
    assert done.out != run("generate", "hello", *fitting.options, *SHORT).out


def test_options_that_change_logits_reach_the_generation(
    run: Run, fitting: Folders, pair: ddtree.Pair
) -> None:
    options = {
        "temperature": 1.0,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "min_new_tokens": 3,
    }
    arguments = [x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    bans = {"logit_bias": {7: -5.0, 9: -math.inf}, "bad_words": ["fox"], "suppress_tokens": [4, 5]}
    arguments += ["--logit-bias", "7=-5", "--logit-bias", "9=-inf", "--bad-word", "fox"]
    arguments += ["--suppress-token", "4", "--suppress-token", "5"]
    done = run("generate", "hello", *fitting.options, *SHORT, *arguments)
    assert (
        done.out
        == pair.generate("hello", max_new_tokens=12, budget=16, **options, **bans).text + "\n"
    )


def test_log_probabilities_go_with_the_tokens_in_json(
    run: Run, fitting: Folders, pair: ddtree.Pair
) -> None:
    options = (*SHORT, "--json", "--logprobs", "2")
    found = strict_json(run("generate", "hello", *fitting.options, *options).out)
    assert list(found) == [*KEYS[:-1], "logprobs", KEYS[-1]]
    expected = pair.generate("hello", max_new_tokens=12, budget=16, logprobs=2).logprobs
    assert [token["token_id"] for token in found["logprobs"]] == found["token_ids"]
    for said, token in zip(found["logprobs"], expected, strict=True):
        assert said["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        assert [each["token_id"] for each in said["top"]] == [token_id for token_id, _ in token.top]
    compared = strict_json(run("generate", "hello", *fitting.options, *options, "--compare").out)
    assert [len(g["logprobs"]) for g in compared["generations"]] == [12, 12, 12]


def test_a_system_message_goes_first(run: Run, fitting: Folders, pair: ddtree.Pair) -> None:
    done = run("generate", "hello", *fitting.options, *SHORT, "--system", "why not")
    messages = [
        {"role": "system", "content": "why not"},
        {"role": "user", "content": "hello"},
    ]
    assert done.out == pair.generate(messages, max_new_tokens=12).text + "\n"


def test_raw_leaves_the_template_out(run: Run, fitting: Folders, pair: ddtree.Pair) -> None:
    done = run("generate", "hello", *fitting.options, *SHORT, "--raw")
    raw = pair.generate("hello", max_new_tokens=12, raw=True).text
    assert done.out == raw + "\n"
    assert raw != pair.generate("hello", max_new_tokens=12).text


def test_stop_may_be_repeated_and_the_first_to_occur_ends_the_text(
    run: Run, fitting: Folders, pair: ddtree.Pair
) -> None:
    free = pair.generate("hello", max_new_tokens=12).text
    early, late = free[4:7], free[8:11]
    assert free.index(early) < free.index(late)
    for order in ((early, late), (late, early)):
        stops = [x for stop in order for x in ("--stop", stop)]
        done = run("generate", "hello", *fitting.options, *SHORT, *stops)
        assert done.out == free[: free.index(early)] + "\n"
        assert "ended by stop" in done.err


def test_ignoring_stop_tokens_goes_on_to_the_length_limit(run: Run, own: Folders) -> None:
    said = json.loads(run("generate", "hello", *own.options, *SHORT, "--json").out)["token_ids"]
    edit_json(own.target / "generation_config.json", eos_token_id=said[3])
    stopped = json.loads(run("generate", "hello", *own.options, *SHORT, "--json").out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == said[: said.index(said[3]) + 1]
    on = run("generate", "hello", *own.options, *SHORT, "--json", "--ignore-eos")
    assert json.loads(on.out)["token_ids"] == said


def test_a_dash_reads_the_prompt_from_standard_input(run: Run, fitting: Folders) -> None:
    text = "hello world\nwhy not ünïcode"
    piped = run("generate", "-", *fitting.options, *SHORT, stdin=text.encode())
    assert piped.code == 0
    assert piped.out == run("generate", text, *fitting.options, *SHORT).out


def test_plain_decoding_needs_no_drafter(run: Run, fitting: Folders) -> None:
    done = run("generate", "hello", "--target", str(fitting.target), *SHORT, "--method", "ar")
    assert done.code == 0
    assert done.out == run("generate", "hello", *fitting.options, *SHORT).out


# JSON.

KEYS = [
    "text",
    "token_ids",
    "finish_reason",
    "method",
    "num_tokens",
    "num_rounds",
    "acceptance_length",
    "acceptance_histogram",
    "seconds",
    "tokens_per_s",
    "versions",
]
STAGES = ["prefill", "draft", "build", "verify", "walk", "commit", "elapsed"]


def strict_json(text: str) -> dict[str, object]:
    """One object and nothing else; NaN and Infinity, which are no JSON, are errors."""
    assert text.endswith("}\n")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_new", [1, 2, 12])
def test_json_is_one_object_with_the_promised_keys(
    method: str, num_new: int, run: Run, fitting: Folders, pair: ddtree.Pair
) -> None:
    options = ("--method", method, "--max-new-tokens", str(num_new), "--budget", "16", "--json")
    done = run("generate", "hello", *fitting.options, *options)
    assert (done.code, done.err) == (0, "")
    found = strict_json(done.out)
    expected = pair.generate("hello", method=method, budget=16, max_new_tokens=num_new)
    assert list(found) == KEYS
    assert found["text"] == expected.text
    assert found["token_ids"] == list(expected.token_ids)
    assert found["finish_reason"] == "length"
    assert found["method"] == method
    assert found["num_tokens"] == num_new
    assert found["num_rounds"] == expected.num_rounds
    assert found["acceptance_histogram"] == list(expected.acceptance_histogram)
    tau = None if num_new == 1 else pytest.approx(expected.acceptance_length)
    assert found["acceptance_length"] == tau
    assert list(found["seconds"]) == STAGES
    assert all(value >= 0 for value in found["seconds"].values())
    assert found["tokens_per_s"] == pytest.approx(num_new / found["seconds"]["elapsed"])
    assert list(found["versions"]) == ["ddtree", "python", "torch", "transformers"]


def test_compare_agrees_and_shows_a_table(run: Run, fitting: Folders) -> None:
    done = run("generate", "hello", *fitting.options, *SHORT, "--compare")
    assert done.code == 0
    assert done.out == run("generate", "hello", *fitting.options, *SHORT).out
    for part in (*METHODS, "tau", "speed", "1.00x", "All methods said the same tokens."):
        assert part in done.err


def test_budget_auto_is_the_default_and_measures_once(
    run: Run, fitting: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.models.zoo.profiles_folder", lambda: tmp_path / "profiles")
    first = run("generate", "hello", *fitting.options, *SHORT)
    assert first.code == 0
    assert first.err.startswith("Measuring what a round costs on this machine")
    again = run("generate", "hello", *fitting.options, *SHORT, "--budget", "auto")
    assert (again.code, again.out) == (0, first.out)
    assert "Measuring" not in again.err
    assert len(list((tmp_path / "profiles").iterdir())) == 1
    plain = run("generate", "hello", *fitting.options, *SHORT, "--method", "ar")
    assert plain.out == first.out


@pytest.mark.parametrize("num_new", [1, 12])
def test_compare_as_json_is_one_object(num_new: int, run: Run, fitting: Folders) -> None:
    options = ("--compare", "--json", "--max-new-tokens", str(num_new))
    done = run("generate", "hello", *fitting.options, *options)
    assert (done.code, done.err) == (0, "")
    found = strict_json(done.out)
    assert list(found) == ["agree", "divergences", "speedup", "generations"]
    assert found["agree"] is True
    assert found["divergences"] == []
    assert list(found["speedup"]) == list(METHODS)
    assert [list(g) for g in found["generations"]] == [KEYS] * 3
    assert [g["method"] for g in found["generations"]] == list(METHODS)


# With one token kept the gap is infinite, which JSON cannot say.
ONE_CHOICE = ("--temperature", "1", "--top-k", "1")


@pytest.mark.parametrize("options", [(), ONE_CHOICE], ids=str)
def test_compare_reports_a_divergence_and_exits_1(
    options: tuple[str, ...], run: Run, fitting: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows that see the context alone, and not themselves: the drafted methods go wrong.
    monkeypatch.setattr(
        "ddtree.verify.ancestor_mask",
        lambda tree: np.zeros((tree.num_rows, tree.num_rows), bool),
    )
    common = (*SHORT, "--compare", "--budget", "16")
    arguments = ("generate", "hello", *fitting.options, *common, *options)
    shown = run(*arguments)
    assert shown.code == 1
    assert "differs from ar at new token" in shown.err
    assert "apart (torch.float32)" in " ".join(shown.err.split())
    done = run(*arguments, "--json")
    assert done.code == 1
    found = strict_json(done.out)
    assert found["agree"] is False
    assert list(found["divergences"][0]) == ["method", "index", "expected_id", "got_id", "gap"]


# Mistakes.


def assert_refused(done: Ran, *named: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("error: "), done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) == 1
    for part in named:
        assert part in done.err


BAD_OPTIONS = [
    (("--budget", "-1"), "budget: expected a whole number from 0 to 4096, or auto, got -1"),
    (("--budget", "many"), "budget: expected a whole number from 0 to 4096, or auto, got 'many'"),
    (("--budget", "1.5"), "budget: expected a whole number from 0 to 4096, or auto, got '1.5'"),
    (("--temperature", "-0.5"), "temperature: expected a finite number >= 0, got -0.5"),
    (("--temperature", "nan"), "temperature: expected a finite number"),
    (("--top-p", "0"), "top_p: expected a number in (0, 1], got 0.0"),
    (("--top-p", "1.5"), "top_p: expected a number in (0, 1], got 1.5"),
    (("--logit-bias", "seven=1"), "--logit-bias: expected ID=VALUE, a token id and a number"),
    (("--logit-bias", "7"), "--logit-bias: expected ID=VALUE"),
    (("--logit-bias", "7=nan"), "logit_bias: expected pairs"),
    (("--suppress-token", "99"), "suppress_tokens: expected token ids from 0 to 60, got 99"),
    (("--bad-word", ""), "bad_words: expected strings with some text"),
    (("--min-new-tokens", "999"), "min_new_tokens: expected a whole number from 0 to"),
    (("--json-schema", "./nowhere"), "--json-schema: expected a readable file of UTF-8 text"),
    (("--regex", "(a", "--json-schema", "pyproject.toml"), "json_schema: expected a JSON object"),
    (("--regex", "(a", *SHORT), "grammar: expected stop tokens, with which a text"),
    (("--logprobs", "3"), "--logprobs: expected --json beside it, got 3 without --json"),
    (("--top-p", "nan"), "top_p: expected a number in (0, 1], got nan"),
    (("--top-k", "0"), "top_k: expected a whole number >= 1, got 0"),
    (("--seed", "-1"), "seed: expected a whole number from 0"),
    (("--max-new-tokens", "0"), "max_new_tokens: expected a whole number >= 1, got 0"),
    (("--max-new-tokens", "999"), "Ask for at most"),
    (("--stop", ""), "stop: expected non-empty strings"),
    (("--method", "medusa"), "method: expected one of ar, dflash, ddtree, got 'medusa'"),
    (("--device", "tpu"), "device: expected auto or a device of this machine"),
    (("--dtype", "int4"), "dtype: expected auto, float32"),
    (("--raw", "--system", "x"), "--system: expected no system message with --raw"),
    (("--target", "./nowhere"), "'./nowhere'"),
    (("--drafter", "./nowhere"), "drafter: expected a hub id"),
    (("--target", ""), "config.json"),
]


@pytest.mark.parametrize(("options", "named"), BAD_OPTIONS, ids=str)
def test_an_option_out_of_range_is_one_line_and_exit_code_2(
    options: tuple[str, ...], named: str, run: Run, fitting: Folders
) -> None:
    assert_refused(run("generate", "hello", *fitting.options, *options), named)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "hello", "--temperature", "hot"),
        ("generate", "hello", "--top-p", ""),
        ("generate", "hello", "--seed", "0x"),
        ("generate", "hello", "--no-such-option"),
        ("generate",),
        ("generate", "hello", "world"),
        ("degenerate",),
    ],
    ids=str,
)
def test_a_line_that_cannot_be_parsed_is_a_usage_error(
    arguments: tuple[str, ...], run: Run
) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Usage: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("prompt", "stdin", "named"),
    [
        ("", b"", "a prompt with some text"),
        (" \n", b"", "a prompt with some text"),
        ("-", b"", "a prompt with some text"),
        ("-", b"caf\xe9", "UTF-8 text on standard input"),
        ("caf\udce9", b"", "UTF-8"),
        ("hello " * 300, b"", "within the context of 256"),
    ],
    ids=["empty", "blank", "empty stdin", "latin-1 stdin", "latin-1 argument", "too long"],
)
def test_a_prompt_that_is_none_is_one_line_and_exit_code_2(
    prompt: str, stdin: bytes, named: str, run: Run, fitting: Folders
) -> None:
    done = run("generate", prompt, *fitting.options, *SHORT, stdin=stdin)
    assert_refused(done, "prompt: ", named)


def lack_a_tensor(own: Folders, name: str = "model.norm.weight") -> None:
    file = own.target / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def truncate(own: Folders) -> None:
    file = own.target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def hide_the_config(own: Folders) -> None:
    (own.target / "config.json").unlink()
    (own.target / "config.json").mkdir()


def forget_the_tokenizer(own: Folders) -> None:
    for file in own.target.glob("tokenizer*"):
        file.unlink()


BAD_TARGETS = [
    (lack_a_tensor, "missing keys: model.norm.weight"),
    (lambda own: edit_json(own.target / "config.json", num_hidden_layers=3), "unexpected keys"),
    (lambda own: edit_json(own.target / "config.json", vocab_size=70), "mismatched keys"),
    (lambda own: edit_json(own.target / "config.json", hidden_size="x"), "hidden_size"),
    (lambda own: edit_json(own.target / "config.json", model_type="gpt2"), "'gpt2'"),
    (lambda own: (own.target / "config.json").write_text("{"), "expected JSON"),
    (lambda own: (own.target / "tokenizer.json").write_text("{"), "tokenizer"),
    (lambda own: (own.target / "model.safetensors").unlink(), "model.safetensors"),
    (truncate, "readable weights"),
    (hide_the_config, "a readable config.json"),
    (forget_the_tokenizer, "token ids, since the target has no tokenizer"),
    (lambda own: (own.target / "chat_template.jinja").unlink(), "--raw"),
]


@pytest.mark.parametrize(("damage", "named"), BAD_TARGETS, ids=[n for _, n in BAD_TARGETS])
def test_a_broken_target_is_one_line_and_exit_code_2(
    damage: Callable[[Folders], object], named: str, run: Run, own: Folders
) -> None:
    damage(own)
    assert_refused(run("generate", "hello", *own.options, *SHORT), named)


MASK_AND_TAPS = {"mask_token_id": 3, "target_layer_ids": [0, 2]}
BAD_DRAFTERS: list[tuple[dict[str, object], str]] = [
    ({"edit": lambda tensors: tensors.pop("fc.weight")}, "1 missing: fc.weight [32, 64]"),
    ({"edit": lambda t: t.update(x=torch.zeros(2))}, "1 left over: x [2]"),
    ({"edit": lambda t: t.update({"norm.weight": torch.zeros(2)})}, "norm.weight [2] instead of"),
    ({"hidden_size": 16}, "hidden_size: expected 32"),
    ({"vocab_size": 100}, "vocab_size: expected 61"),
    ({"dflash_config": {**MASK_AND_TAPS, "mask_token_id": VOCAB_SIZE}}, "mask_token_id"),
    ({"dflash_config": {**MASK_AND_TAPS, "target_layer_ids": [4]}}, "target_layer_ids"),
    ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size: expected a whole number >= 1"),
]


@pytest.mark.parametrize(("changes", "named"), BAD_DRAFTERS, ids=[n for _, n in BAD_DRAFTERS])
def test_a_drafter_that_is_broken_or_does_not_fit_is_one_line_and_exit_code_2(
    changes: dict[str, object], named: str, run: Run, fitting: Folders, tmp_path: Path
) -> None:
    own = Folders(fitting.target, write_drafter(tmp_path, **changes))
    assert_refused(run("generate", "hello", *own.options, *SHORT), named)
    assert_refused(run("generate", "hello", *own.options, *SHORT, "--compare", "--json"), named)


def test_a_target_without_a_known_drafter_says_so(run: Run, fitting: Folders) -> None:
    done = run("generate", "hello", "--target", str(fitting.target), *SHORT)
    assert_refused(done, "drafter: expected a drafter for method ddtree", str(fitting.target))
    done = run("generate", "hello", "--target", str(fitting.target), *SHORT, "--compare")
    assert_refused(done, "drafter: expected a drafter")


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (OSError("the network is unreachable"), "Check the id and the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "Free some space"),
    ],
    ids=["no network", "full disk"],
)
def test_what_cannot_be_fetched_is_one_line_and_exit_code_2(
    failure: OSError, named: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **options: object) -> str:
        raise failure

    monkeypatch.setattr(model_folder, "snapshot_download", download)
    assert_refused(run("generate", "hello", "--target", "owner/model"), named)


def test_offline_a_model_that_is_not_in_the_cache_is_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    done = run("generate", "hello", "--target", "owner/model")
    assert_refused(done, "target: expected a model that the hub or the local cache has")


def test_a_cache_that_cannot_be_made_is_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "file"))
    assert_refused(run("generate", "hello"), "a writable cache folder", "DDTREE_CACHE")
    assert (tmp_path / "file").read_text() == "in the way"


# Doctor.


def test_doctor_finds_a_fitting_pair_well(run: Run, fitting: Folders) -> None:
    done = run("doctor", *fitting.options)
    assert (done.code, done.err) == (0, "")
    for part in (
        "transformers",
        "torch",
        "attention ddtree",
        "attention ddtree_split",
        "attention sdpa",
        "tree mask works",
        "float32 layers on a CPU",
        "bfloat16 products on a CPU",
        "tree builder",
        "compiled",
        "4 layers, hidden 32, vocabulary 61",
        "block size 8, 2 layers, features of target layers 0, 2; fits",
    ):
        assert part in done.out
    assert "✗" not in done.out


def test_doctor_names_what_does_not_fit_and_exits_2(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    other = Folders(fitting.target, write_drafter(tmp_path, vocab_size=100))
    done = run("doctor", *other.options)
    assert (done.code, done.err) == (2, "")
    (line,) = [line for line in done.out.splitlines() if "✗" in line]
    assert "drafter" in line
    assert "vocab_size: expected 61" in line
    assert "Use the drafter that was trained for this very target." in line


def test_doctor_as_json_is_one_object(run: Run, fitting: Folders, tmp_path: Path) -> None:
    done = run("doctor", *fitting.options, "--json")
    assert (done.code, done.err) == (0, "")
    found = strict_json(done.out)
    assert list(found) == ["well", "checks"]
    assert found["well"] is True
    assert all(list(check) == ["name", "well", "finding"] for check in found["checks"])
    assert [c["well"] for c in found["checks"] if c["name"] in ("target", "drafter")] == [True] * 2
    other = Folders(fitting.target, write_drafter(tmp_path, hidden_size=16))
    done = run("doctor", *other.options, "--json")
    assert done.code == 2
    found = strict_json(done.out)
    assert found["well"] is False
    (bad,) = [check for check in found["checks"] if check["well"] is False]
    assert "hidden_size" in bad["finding"]


def test_doctor_reads_no_weights(run: Run, own: Folders) -> None:
    (own.target / "model.safetensors").unlink()
    assert run("doctor", *own.options).code == 0


@pytest.mark.parametrize("target", ["./nowhere", "a/b/c"])
def test_doctor_finds_a_target_that_is_not_there(target: str, run: Run) -> None:
    done = run("doctor", "--target", target)
    assert (done.code, done.err) == (2, "")
    assert repr(target) in done.out


def test_doctor_without_a_known_drafter_is_information_and_no_fault(
    run: Run, fitting: Folders
) -> None:
    done = run("doctor", "--target", str(fitting.target))
    assert done.code == 0
    assert "none known for" in done.out


def test_doctor_says_that_the_embedded_target_is_still_to_be_fetched(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "new"))
    done = run("doctor")
    assert done.code == 0
    assert "smollm2-135m is not here yet" in done.out
    assert not (tmp_path / "new").exists()


# As a process of its own: what only shows there.


def test_as_a_process_json_is_all_of_standard_output(fitting: Folders) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "generate",
            "-",
            *fitting.options,
            *SHORT,
            "--json",
            "--budget",
            "16",
        ],
        input=b"hello",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    found = strict_json(done.stdout.decode())
    assert found["num_tokens"] == 12
    assert math.isfinite(found["tokens_per_s"])


def test_as_a_process_a_reader_that_leaves_early_gets_no_traceback(fitting: Folders) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "generate", "hello", *fitting.options, *SHORT],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


# Training.


def test_train_respond_answers_a_prompt_file_and_says_where(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "why not"}\n')
    arguments = ("--prompts", str(prompts), "--out", str(tmp_path / "out"))
    target = ("--target", str(fitting.target), "--max-new-tokens", "5")
    done = run("train", "respond", *arguments, *target)
    assert (done.code, done.out) == (0, "")
    lines = (tmp_path / "out" / "responses.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert "2 responses" in done.err
    again = run("train", "respond", *arguments, *target)
    assert "2 of 2 responses are there already" in " ".join(again.err.split())
    assert len((tmp_path / "out" / "responses.jsonl").read_text().splitlines()) == 2


def test_train_respond_names_a_missing_prompt_file(run: Run, tmp_path: Path) -> None:
    done = run("train", "respond", "--prompts", str(tmp_path / "no"), "--out", str(tmp_path / "o"))
    assert done.code == 2
    assert "expected a readable file of JSON lines" in done.err
    assert not (tmp_path / "o").exists()


def test_train_respond_records_and_train_features_computes_the_rest(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "why not"}\n')
    target = ("--target", str(fitting.target), "--out", str(out))
    respond = ("--prompts", str(prompts), "--max-new-tokens", "5", "--record-layers", "0,2")
    assert run("train", "respond", *respond, *target).code == 0
    (shard,) = (out / "samples").glob("*.safetensors")
    recorded = load_file(shard)
    features = ("--responses", str(out / "responses.jsonl"), "--layers", "0,2")
    done = run("train", "features", *features, *target)
    assert done.code == 0
    assert "2 of 2 samples are there already" in " ".join(done.err.split())
    shard.unlink()
    done = run("train", "features", *features, *target)
    assert (done.code, done.out) == (0, "")
    assert "2 samples" in done.err
    computed = load_file(out / "samples" / "samples-00000000.safetensors")
    assert sorted(computed) == sorted(recorded)
    assert_refused(run("train", "features", *features[:-1], "0,1", *target), "values of layer_ids")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--layers", "0,x"), "--layers: expected layer ids with commas between them, got '0,x'"),
        (("--layers", "0,4"), "layers: expected different layer ids from 0 to 3, got 0,4"),
        (("--layers", "0", "--num-workers", "0"), "num_workers: expected a whole number >= 1"),
        (("--layers", "0", "--responses", "nowhere.jsonl"), "nowhere.jsonl: expected a readable"),
    ],
)
def test_train_features_names_a_mistake_in_one_line(
    options: tuple[str, ...], named: str, run: Run, fitting: Folders, tmp_path: Path
) -> None:
    responses = tmp_path / "r.jsonl"
    responses.write_text('{"prompt": "hello", "response_ids": [1, 2]}\n')
    given = ("--responses", str(responses), "--out", str(tmp_path / "o"))
    done = run("train", "features", *given, "--target", str(fitting.target), *options)
    assert_refused(done, named)
    assert not (tmp_path / "o").exists()


def test_train_evaluate_measures_a_drafter_and_shows_what_it_found(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "held-out.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "why not"}\n')
    options = ("--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "4")
    done = run("train", "evaluate", *fitting.options, *options, "--budgets", "3", "--limit", "1")
    assert (done.code, done.out) == (0, "")
    for part in ("held-out", "chain", "B=3", "top 16", "same tokens on 1 of 1 prompts"):
        assert part in done.err
    for name in ("measured.jsonl", "evaluation.json", "evaluation.md", "evaluation.png"):
        assert (out / name).stat().st_size > 0
    done = run("train", "evaluate", *fitting.options, *options)
    assert_refused(done, "other values of budgets")
    done = run("train", "evaluate", *fitting.options, *options, "--budgets", "8;16")
    assert_refused(done, "budgets: expected whole numbers with commas between them, got '8;16'")


# Draft trees.


def test_tree_prints_the_trees_of_the_first_rounds(run: Run, fitting: Folders) -> None:
    done = run("tree", "hello", *fitting.options, *SHORT)
    assert done.code == 0
    headings = [line for line in done.out.splitlines() if line.startswith("round ")]
    assert [line.split(":")[0] for line in headings] == ["round 0", "round 1", "round 2", "round 3"]
    assert "16 nodes" in headings[1]
    assert "bonus" in done.out
    assert "ended by length" in done.err
    assert "--rounds 4-" in done.err
    assert not done.out.isascii()  # a pipe of this process takes UTF-8


def test_tree_prints_the_rounds_and_nodes_that_are_asked_for(run: Run, fitting: Folders) -> None:
    options = (*fitting.options, *SHORT, "--rounds", "2-3", "--budget", "8", "--max-nodes", "2")
    done = run("tree", "hello", *options)
    headings = [line for line in done.out.splitlines() if line.startswith("round ")]
    assert [line.split(",")[0] for line in headings] == ["round 2: 8 nodes", "round 3: 8 nodes"]
    assert done.out.count("more, less probable") == 2
    assert "not shown" not in done.err


@pytest.mark.parametrize("options", [("--method", "ar"), ("--budget", "0")])
def test_tree_shows_rounds_without_a_draft(
    options: tuple[str, ...], run: Run, fitting: Folders
) -> None:
    done = run("tree", "hello", *fitting.options, *SHORT, *options)
    assert "round 1: not drafted, 1 token\n" in done.out


def test_tree_writes_a_page_of_all_rounds_and_prints_nothing(
    run: Run, fitting: Folders, pair: ddtree.Pair, tmp_path: Path
) -> None:
    page = tmp_path / "tree.html"
    options = ("--html", str(page), "--raw", "--temperature", "1", "--seed", "3")
    done = run("tree", "hello", *fitting.options, *SHORT, *options)
    assert (done.code, done.out) == (0, "")
    assert f"Wrote {page}" in done.err
    sampled = {"budget": 16, "temperature": 1.0, "seed": 3, "max_new_tokens": 12, "raw": True}
    expected = pair.generate("hello", **sampled)
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    delivered = [piece for r in data["rounds"] for piece in r["delivered"]]
    assert [piece["id"] for piece in delivered] == list(expected.token_ids)
    assert "".join(piece["text"] for piece in delivered) == expected.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--rounds", "3-2"), "--rounds: expected a round or a first and a last one, got '3-2'"),
        (("--rounds", "-1"), "--rounds: expected a round or a first and a last one, got '-1'"),
        (("--rounds", "90"), "--rounds: expected rounds from 0 to"),
        (("--max-nodes", "-1"), "--max-nodes: expected a whole number >= 0, got -1"),
        (("--html", "nowhere/tree.html"), "--html: expected a file in a folder that is there"),
        (("--html", "."), "--html: expected a file in a folder that is there, got ."),
        (("--html", "tree.html", "--rounds", "1"), "--rounds: expected none with --html"),
        (("--html", "tree.html", "--max-nodes", "9"), "--max-nodes: expected none with --html"),
        (("--raw", "--system", "x"), "--system: expected no system message with --raw"),
        (("--budget", "few"), "budget: expected a whole number from 0 to 4096, or auto"),
    ],
)
def test_tree_names_a_mistake_in_one_line(
    options: tuple[str, ...],
    named: str,
    run: Run,
    fitting: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run("tree", "hello", *fitting.options, *SHORT, *options), named)
    assert list(tmp_path.iterdir()) == []


# Traces, profiles, replays.


def test_a_trace_and_a_profile_are_written_and_replayed(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    trace, profile = tmp_path / "t.jsonl", tmp_path / "p.json"
    files = ("--trace", str(trace), "--trace-ranks", "20", "--profile", str(profile))
    options = (*SHORT, "--budget", "8")
    done = run("generate", "hello", *fitting.options, *options, *files)
    assert done.code == 0
    assert done.out == run("generate", "hello", *fitting.options, *options).out
    assert f"{trace}: see `ddtree replay`" in done.err
    assert f"{profile}: open it in ui.perfetto.dev" in done.err
    assert {"X", "M"} == {e["ph"] for e in json.loads(profile.read_text())["traceEvents"]}
    shown = run("replay", str(trace), "--budgets", "8,24")
    assert (shown.code, shown.err) == (0, "")
    for part in ("tree", "chain", "agrees", "24*", "1 text"):
        assert part in shown.out
    found = strict_json(run("replay", str(trace), "--json").out)
    assert [(r["builder"], r["budget"]) for r in found["results"]] == [
        (builder, budget) for builder in ("tree", "chain") for budget in (8, 16, 32)
    ]
    assert [r["agrees"] for r in found["results"]] == [True, *[None] * 5]
    assert found["is_torn"] is False


def test_with_json_the_files_are_written_without_a_word(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("--method", "ar", "--json", "--trace", str(trace))
    done = run("generate", "hello", *fitting.options, *SHORT, *options)
    assert (done.code, done.err) == (0, "")
    strict_json(done.out)
    assert_refused(run("replay", str(trace)), "a generation that was drafted")


def test_a_replay_that_is_not_what_happened_exits_1(
    run: Run, fitting: Folders, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("--method", "dflash", "--budget", "8", "--trace", str(trace))
    assert run("generate", "hello", *fitting.options, *SHORT, *options).code == 0
    trace.write_text(trace.read_text().replace('"dflash"', '"ddtree"'))
    done = run("replay", str(trace), "--builders", "tree", "--budgets", "8")
    assert done.code == 1
    assert "differs from the real run first in round 0" in done.out


def test_a_builder_of_ones_own_is_found_in_the_current_folder(
    run: Run, fitting: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "t.jsonl"
    options = ("--budget", "8", "--trace", str(trace))
    assert run("generate", "hello", *fitting.options, *SHORT, *options).code == 0
    name = "builder_of_a_user"
    (tmp_path / f"{name}.py").write_text(
        "from ddtree import build_tree, build_chain\n"
        "none = 3\n"
        "def half(marginals, root_id, budget):\n"
        "    return build_tree(marginals, root_id, budget // 2)\n"
        "def more(marginals, root_id, budget):\n"
        "    return build_tree(marginals, root_id, budget + 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    builders = ("--builders", f"tree,{name}:half", "--json")
    done = run("replay", str(trace), "--budgets", "4,8", *builders)
    four, _, _, half_of_eight = strict_json(done.out)["results"]
    assert half_of_eight["builder"] == f"{name}:half"
    assert half_of_eight["nodes_per_round"] == four["nodes_per_round"]
    assert half_of_eight["acceptance_histogram"] == four["acceptance_histogram"]
    for builder, named in (
        (f"{name}:more", "builder: expected a ddtree.DraftTree of at most 8 nodes"),
        (f"{name}:none", "--builders: expected a function 'none' in module"),
        (f"{name}:nowhere", "--builders: expected a function 'nowhere' in module"),
        ("no_such_module:f", "a module 'no_such_module' in this folder or installed"),
        (":f", "--builders: expected a module ''"),
        ("medusa", "--builders: expected different ones of tree, chain and module:function"),
        ("tree,tree", "--builders: expected different ones of"),
    ):
        assert_refused(run("replay", str(trace), "--budgets", "8", "--builders", builder), named)


@pytest.mark.parametrize("budgets", ["", "8,", "8,8", "auto", "-1", "4097", "1.5", "8;16"])
def test_budgets_of_a_replay_are_different_numbers(budgets: str, run: Run) -> None:
    done = run("replay", "t.jsonl", "--budgets", budgets)
    assert_refused(done, "--budgets: expected different whole numbers from 0 to 4096")


def test_a_trace_that_is_none_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("hello\n")
    assert_refused(run("replay", str(tmp_path / "t.jsonl")), "a first line that is no JSON")
    assert_refused(run("replay", str(tmp_path / "none")), "none: expected a trace file")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--trace", "nowhere/t.jsonl"), "--trace: expected a file in a folder that is there"),
        (("--profile", "."), "--profile: expected a file in a folder that is there"),
        (("--trace-ranks", "8"), "--trace-ranks: expected a whole number >= 1, with --trace"),
        (("--trace", "t", "--trace-ranks", "0"), "--trace-ranks: expected a whole number >= 1"),
        (("--trace", "t", "--profile", "./t"), "--profile: expected another file than that of"),
        (("--trace", "t", "--compare"), "--trace: expected one generation, without --compare"),
        (("--profile", "t", "--compare"), "--profile: expected one generation, without"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_recorded_is_refused_before_any_work(
    options: tuple[str, ...],
    named: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("generate", "hello", "--target", "./nowhere", *options)
    assert_refused(done, named)
    assert list(tmp_path.iterdir()) == []
