"""Which vLLM is taken, and what of its configuration is refused, each by its name."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest

from ddtree.errors import BackendError, OptionError, UnsupportedModelError, UserError
from ddtree.serving import compatibility
from ddtree.serving.compatibility import (
    check_config,
    check_layers,
    check_signatures,
    check_versions,
)
from ddtree.serving.inner_parts import CALLEES, Callee
from ddtree.serving.plugin import REQUEST_CHECK

# vLLM, as far as it is read here.


def write_vllm(root: Path, callees: tuple[Callee, ...] = CALLEES, version: str = "0.32.0") -> Path:
    """Source files in which all that we rely on is as it should be."""
    files: dict[str, dict[str, list[str]]] = {}
    for callee in callees:
        owner, _, method = callee.name.rpartition(".")
        lines = files.setdefault(callee.module, {}).setdefault(owner or callee.name, [])
        if method and owner:
            lines.append(f"    def {method}({', '.join(('self', *callee.parameters))}): ...")
        elif callee.name[0].isupper():
            lines += [f"    {name}: object" for name in callee.parameters]
        else:
            lines.append(f"def {callee.name}({', '.join(callee.parameters)}): ...")
    for module, parts in files.items():
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = ""
        for owner, lines in parts.items():
            text += f"class {owner}:\n" * (owner[0].isupper()) + "\n".join(lines) + "\n"
        path.write_text(text)
    (root / "_version.py").write_text(f"__version__ = version = {version!r}\n")
    return root


def test_the_versions_of_0_32_are_taken(tmp_path: Path) -> None:
    for version in ("0.32.0", "0.32.4", "0.32.1rc2+cpu", "0.32.1.dev3+g1234"):
        assert check_versions(root=write_vllm(tmp_path, (), version)) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.320", "dev"])
def test_another_version_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=rf"vllm: expected version 0.32.* got {version}\."):
        check_versions(root=write_vllm(tmp_path, (), version))


def test_a_vllm_that_is_not_there_is_said_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match="one that does not say its version"):
        check_versions(root=tmp_path)
    monkeypatch.setattr(compatibility, "_folder", lambda: None)
    with pytest.raises(BackendError, match=r"got no such package.*pip install \"ddtree\[vllm\]\""):
        check_versions()


def test_inner_parts_that_are_as_they_were_pass(tmp_path: Path) -> None:
    check_signatures(root=write_vllm(tmp_path))


def test_every_difference_is_named_in_one_error(tmp_path: Path) -> None:
    runner = "v1.worker.gpu_model_runner"
    changed = {
        f"{runner} GPUModelRunner._sample": ("logits", "metadata", "more"),
        "v1.outputs SamplerOutput": ("sampled_token_ids",),
    }
    gone = "GPUModelRunner._update_states"
    callees = tuple(
        Callee(c.module, c.name, changed.get(f"{c.module} {c.name}", c.parameters))
        for c in CALLEES
        if c.name != gone
    )
    with pytest.raises(BackendError) as refused:
        check_signatures(root=write_vllm(tmp_path, callees))
    for part in (
        f"vllm.{runner}.GPUModelRunner._sample has (logits, metadata, more) and not "
        "(logits, spec_decode_metadata)",
        f"vllm.{runner}.{gone} is missing",
        "vllm.v1.outputs.SamplerOutput has (sampled_token_ids) and not "
        "(sampled_token_ids, logprobs_tensors)",
    ):
        assert part in str(refused.value)
    assert str(refused.value).count("; ") == 2


def test_a_missing_file_is_a_difference(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    (tmp_path / "v1" / "outputs.py").unlink()
    with pytest.raises(BackendError, match="DraftTokenIds is missing"):
        check_signatures(root=tmp_path)


# An engine's configuration.


def engine() -> Namespace:
    """What a supported engine's configuration says, as far as it is read."""
    text = Namespace(model_type="qwen3", layer_types=["full_attention"] * 2, sliding_window=None)
    draft = Namespace(
        architectures=["DFlashDraftModel"], block_size=8, dflash_config={"mask_token_id": 1}
    )
    return Namespace(
        device_config=Namespace(device_type="cpu"),
        scheduler_config=Namespace(async_scheduling=False),
        use_v2_model_runner=False,
        parallel_config=Namespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            tensor_parallel_size=2,
            enable_dbo=False,
        ),
        lora_config=None,
        model_config=Namespace(
            enable_prompt_embeds=False,
            uses_mrope=False,
            is_multimodal_model=False,
            is_hybrid=False,
            has_inner_state=False,
            is_encoder_decoder=False,
            use_mla=False,
            is_diffusion=False,
            hf_text_config=text,
            runner_type="generate",
            disable_cascade_attn=True,
            logits_processors=[REQUEST_CHECK],
        ),
        cache_config=Namespace(
            cache_dtype="auto", kv_sharing_fast_prefill=False, kv_offloading_size=None
        ),
        kv_transfer_config=None,
        attention_config=Namespace(backend=None, backend_per_kind={}),
        speculative_config=Namespace(
            method="dflash",
            num_speculative_tokens=16,
            disable_padded_drafter_batch=False,
            use_heterogeneous_vocab=False,
            num_speculative_tokens_per_batch_size=None,
            rejection_sample_method="standard",
            draft_sample_method="greedy",
            kv_cache_dtype=None,
            draft_model_config=Namespace(hf_config=draft),
        ),
    )


def put(config: Namespace, path: str, value: object) -> Namespace:
    """The same with one attribute changed."""
    changed = copy.deepcopy(config)
    *owners, name = path.split(".")
    owner = changed
    for each in owners:
        owner = getattr(owner, each)
    setattr(owner, name, value)
    return changed


def text(**attributes: object) -> Namespace:
    return Namespace(model_type="some", **attributes)


def draft(**attributes: object) -> Namespace:
    return Namespace(**{"architectures": ["DFlashDraftModel"], "block_size": 8, **attributes})


def test_a_supported_engine_passes() -> None:
    config = engine()
    check_config(config)
    for path, value in (
        ("model_config.logits_processors", None),
        ("cache_config.cache_dtype", "bfloat16"),
        ("scheduler_config.async_scheduling", None),
        ("attention_config.backend", Namespace(name="CPU_ATTN")),
        ("model_config.hf_text_config", text(sliding_window=None)),
        ("speculative_config.num_speculative_tokens", 7),
        ("speculative_config.draft_model_config.hf_config", draft(block_size=None)),
    ):
        check_config(put(config, path, value))


SPECULATIVE = "speculative_config"
REFUSED = [
    ("scheduler_config.async_scheduling", True, OptionError, "--async-scheduling: expected sync"),
    ("use_v2_model_runner", True, OptionError, "VLLM_USE_V2_MODEL_RUNNER: expected the V1 model"),
    ("parallel_config.pipeline_parallel_size", 2, OptionError, "--pipeline-parallel-size: "),
    ("parallel_config.data_parallel_size", 2, OptionError, "--data-parallel-size: expected 1"),
    ("parallel_config.decode_context_parallel_size", 2, OptionError, "--decode-context-parallel-"),
    ("parallel_config.prefill_context_parallel_size", 2, OptionError, "--prefill-context-paralle"),
    ("parallel_config.enable_dbo", True, OptionError, "--enable-dbo: expected no dual batch"),
    ("lora_config", Namespace(), OptionError, "--enable-lora: expected no LoRA adapters"),
    (
        "model_config.enable_prompt_embeds",
        True,
        OptionError,
        "--enable-prompt-embeds: expected no prompts of embeddings",
    ),
    ("model_config.uses_mrope", True, UnsupportedModelError, "MODEL: expected a target without M-"),
    (
        "model_config.is_multimodal_model",
        True,
        UnsupportedModelError,
        "MODEL: expected a target without images, sound or video, got model type qwen3",
    ),
    ("model_config.is_hybrid", True, UnsupportedModelError, "MODEL: expected a target without rec"),
    ("model_config.has_inner_state", True, UnsupportedModelError, "MODEL: expected a target witho"),
    ("model_config.is_encoder_decoder", True, UnsupportedModelError, "MODEL: expected a target w"),
    ("model_config.use_mla", True, UnsupportedModelError, "MODEL: expected a target without laten"),
    ("model_config.is_diffusion", True, UnsupportedModelError, "MODEL: expected a target without "),
    (
        "model_config.hf_text_config",
        text(layer_types=["full_attention", "sliding_attention"]),
        UnsupportedModelError,
        "MODEL: expected a target without sliding-window or chunked layers, got model type some "
        "with full_attention, sliding_attention",
    ),
    (
        "model_config.hf_text_config",
        text(sliding_window=4096),
        UnsupportedModelError,
        "MODEL: expected a target without sliding-window or chunked layers",
    ),
    (
        "model_config.hf_text_config",
        Namespace(model_type="gpt_oss", layer_types=["full_attention"]),
        UnsupportedModelError,
        "MODEL: expected a target without attention sinks, got model type gpt_oss",
    ),
    (
        "model_config.hf_text_config",
        text(add_swa_attention_sink_bias=True),
        UnsupportedModelError,
        "MODEL: expected a target without attention sinks",
    ),
    ("model_config.runner_type", "pooling", OptionError, "--runner: expected generate, got 'pool"),
    ("model_config.disable_cascade_attn", False, OptionError, "--no-disable-cascade-attn: "),
    (
        "model_config.logits_processors",
        [REQUEST_CHECK, "my.own:Processor"],
        OptionError,
        "--logits-processors: expected no custom logits processors",
    ),
    ("cache_config.cache_dtype", "fp8", OptionError, "--kv-cache-dtype: expected one of auto, flo"),
    ("cache_config.kv_sharing_fast_prefill", True, OptionError, "--kv-sharing-fast-prefill: exp"),
    ("cache_config.kv_offloading_size", 4.0, OptionError, "--kv-offloading-size: expected no off"),
    ("kv_transfer_config", Namespace(), OptionError, "--kv-transfer-config: expected no KV conne"),
    (
        "attention_config.backend",
        Namespace(name="FLEX_ATTENTION"),
        BackendError,
        "--attention-backend: expected one that knows trees: CPU_ATTN, got FLEX_ATTENTION",
    ),
    ("attention_config.backend_per_kind", {"full": 1}, OptionError, "--attention-config backend_p"),
    ("device_config.device_type", "tpu", BackendError, "--device: expected one that knows draft t"),
    (SPECULATIVE, None, OptionError, "--speculative-config: expected a drafter"),
    (f"{SPECULATIVE}.method", "eagle3", OptionError, "--speculative-config method: expected dflas"),
    (
        f"{SPECULATIVE}.num_speculative_tokens",
        6,
        OptionError,
        "--speculative-config num_speculative_tokens: expected at least 7, the depths that this "
        "drafter predicts, got 6",
    ),
    (
        f"{SPECULATIVE}.disable_padded_drafter_batch",
        True,
        OptionError,
        "--speculative-config disable_padded_drafter_batch: expected false",
    ),
    (f"{SPECULATIVE}.use_heterogeneous_vocab", True, OptionError, "--speculative-config use_het"),
    (
        f"{SPECULATIVE}.num_speculative_tokens_per_batch_size",
        [(1, 2, 3)],
        OptionError,
        "--speculative-config num_speculative_tokens_per_batch_size: expected null",
    ),
    (
        f"{SPECULATIVE}.rejection_sample_method",
        "synthetic",
        OptionError,
        "--speculative-config rejection_sample_method: expected standard",
    ),
    (
        f"{SPECULATIVE}.draft_sample_method",
        "probabilistic",
        OptionError,
        "--speculative-config draft_sample_method: expected greedy",
    ),
    (f"{SPECULATIVE}.kv_cache_dtype", "fp8", OptionError, "--speculative-config kv_cache_dtype:"),
    (
        f"{SPECULATIVE}.draft_model_config.hf_config",
        draft(architectures=["DFlash2DraftModel"]),
        UnsupportedModelError,
        "--speculative-config model: expected a drafter of architecture DFlashDraftModel, got "
        "DFlash2DraftModel",
    ),
    (
        f"{SPECULATIVE}.draft_model_config.hf_config",
        draft(dflash_config={"sample_from_anchor": True}),
        UnsupportedModelError,
        "--speculative-config model: expected a drafter whose root slot predicts nothing",
    ),
]


@pytest.mark.parametrize(("path", "value", "kind", "named"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_does_not_go_with_trees_is_refused_by_name(
    path: str, value: object, kind: type[UserError], named: str
) -> None:
    with pytest.raises(kind) as refused:
        check_config(put(engine(), path, value))
    assert type(refused.value) is kind
    assert str(refused.value).startswith(named)
    assert refused.value.remedy


def test_all_that_is_wrong_is_named_at_once() -> None:
    config = put(engine(), "lora_config", Namespace())
    config = put(config, "scheduler_config.async_scheduling", True)
    config = put(config, "speculative_config.method", "ngram")
    with pytest.raises(OptionError) as refused:
        check_config(config)
    said = str(refused.value)
    assert said.startswith("--async-scheduling: expected synchronous scheduling, got True.")
    for part in ("Give --no-async-scheduling.", "Besides: --enable-lora (Leave", "method (Give"):
        assert part in said


def test_a_configuration_that_lacks_what_is_read_is_refused() -> None:
    config = engine()
    del config.model_config.uses_mrope
    with pytest.raises(BackendError, match=r"an attribute model_config.uses_mrope"):
        check_config(config)


# Loaded layers.


def layer(**attributes: object) -> Namespace:
    impl = Namespace(
        sinks=None, alibi_slopes=None, logits_soft_cap=0, kv_sharing_target_layer_name=None
    )
    backend = Namespace(get_name=lambda: "CPU_ATTN")
    found = Namespace(impl=impl, sliding_window=None, attn_backend=backend)
    for path, value in attributes.items():
        owner = found.impl if hasattr(impl, path) else found
        setattr(owner, path, value)
    return found


def test_plain_attention_layers_pass() -> None:
    check_layers({"a": layer(), "b": layer(logits_soft_cap=None)}, device_type="cpu")


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"sliding_window": 128}, "got a sliding window in second"),
        ({"sinks": [0.0]}, "got attention sinks in second"),
        ({"alibi_slopes": [0.0]}, "got ALiBi in second"),
        ({"logits_soft_cap": 50.0}, "got a soft cap in second"),
        ({"kv_sharing_target_layer_name": "first"}, "got another layer's cache in second"),
    ],
    ids=str,
)
def test_a_layer_that_is_more_than_that_is_named(attributes: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        check_layers({"first": layer(), "second": layer(**attributes)}, device_type="cpu")
    assert named in str(refused.value)


def test_a_layer_of_another_backend_is_refused() -> None:
    other = layer(attn_backend=Namespace(get_name=lambda: "FLASHINFER"))
    with pytest.raises(BackendError, match=r"got FLASHINFER. Give --attention-backend FLASH_ATTN"):
        check_layers({"a": other}, device_type="cuda")
