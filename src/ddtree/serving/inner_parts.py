"""Which inner parts of vLLM the plugin overrides and calls, and whether they are as they were.

They are no public interface. Their parameters are read from vLLM's source files: nothing of it is
imported, so `ddtree serve` can look before it starts an engine. Knows no torch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Callee:
    """A function, method or record of vLLM and the parameters that our code relies on.

    Args:
        module: where it stands, without "vllm.".
        name: qualified within the module. A class stands for its fields.
        parameters: their names in order, `self` left out.
    """

    module: str
    name: str
    parameters: tuple[str, ...]


def _callee(module: str, name: str, parameters: str) -> Callee:
    return Callee(module, name, tuple(parameters.split()))


_RUNNER, _BASE_PROPOSER = "v1.worker.gpu_model_runner", "v1.spec_decode.llm_base_proposer"
_DFLASH, _CPU_ATTENTION = "v1.spec_decode.dflash", "v1.attention.backends.cpu_attn"
_DRAFTER, _GPU_WORKER = "model_executor.models.qwen3_dflash", "v1.worker.gpu_worker"
_FLASH_ATTENTION = "v1.attention.backends.flash_attn"
_TRITON_ATTENTION = "v1.attention.backends.triton_attn"
_FORWARD = "layer query key value kv_cache attn_metadata output output_scale output_block_scale"

CALLEES = (
    _callee(_RUNNER, "GPUModelRunner._prepare_inputs", "scheduler_output num_scheduled_tokens"),
    _callee(
        _RUNNER,
        "GPUModelRunner._build_attention_metadata",
        "num_tokens num_reqs max_query_len num_tokens_padded num_reqs_padded ubatch_slices "
        "logits_indices max_num_sampled_tokens use_spec_decode for_cudagraph_capture "
        "num_scheduled_tokens slot_mappings",
    ),
    _callee(_RUNNER, "GPUModelRunner._sample", "logits spec_decode_metadata"),
    _callee(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        "scheduler_output sampled_token_ids sampling_metadata hidden_states sample_hidden_states "
        "aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings",
    ),
    _callee(_RUNNER, "GPUModelRunner._get_draft_token_ids_cpu", ""),
    _callee(_RUNNER, "GPUModelRunner._copy_draft_token_ids_to_cpu", "scheduler_output zeros_only"),
    _callee(_RUNNER, "GPUModelRunner.take_draft_token_ids", ""),
    _callee(_RUNNER, "GPUModelRunner.execute_model", "scheduler_output intermediate_tensors"),
    _callee(_RUNNER, "GPUModelRunner.sample_tokens", "grammar_output"),
    _callee(_RUNNER, "GPUModelRunner._update_states", "scheduler_output"),
    _callee(_RUNNER, "GPUModelRunner.load_model", "load_dummy_weights model"),
    _callee(_DFLASH, "DFlashProposer.__init__", "vllm_config device runner"),
    _callee(
        _BASE_PROPOSER,
        "SpecDecodeBaseProposer.propose",
        "num_speculative_tokens target_token_ids target_positions target_hidden_states "
        "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata "
        "mm_embed_inputs num_rejected_tokens_gpu slot_mappings",
    ),
    _callee(
        _BASE_PROPOSER,
        "SpecDecodeBaseProposer._sample_draft_tokens",
        "hidden_states sampling_metadata",
    ),
    _callee(_BASE_PROPOSER, "SpecDecodeBaseProposer.load_model", "target_model"),
    _callee(
        _DFLASH,
        "DFlashProposer.set_inputs_first_pass",
        "target_token_ids next_token_ids target_positions target_hidden_states "
        "token_indices_to_sample cad num_rejected_tokens_gpu",
    ),
    _callee(
        _DFLASH,
        "DFlashProposer.build_model_inputs_first_pass",
        "num_tokens num_input_tokens mm_embed_inputs",
    ),
    _callee("v1.worker.gpu_input_batch", "InputBatch.update_async_output_token_ids", ""),
    _callee(
        "v1.sample.ops.bad_words",
        "apply_bad_words",
        "logits bad_words_token_ids past_tokens_ids",
    ),
    _callee(
        "v1.sample.ops.penalties",
        "apply_all_penalties",
        "logits prompt_token_ids presence_penalties frequency_penalties repetition_penalties "
        "output_token_ids",
    ),
    _callee("v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", "logits k p"),
    _callee(
        "v1.sample.metadata",
        "SamplingMetadata",
        "temperature all_greedy all_random top_p top_k generators max_num_logprobs no_penalties "
        "prompt_token_ids frequency_penalties presence_penalties repetition_penalties "
        "output_token_ids allowed_token_ids_mask bad_words_token_ids logitsprocs "
        "logprob_token_ids spec_token_ids thinking_budget_state_holder",
    ),
    _callee("v1.outputs", "SamplerOutput", "sampled_token_ids logprobs_tensors"),
    _callee(
        "v1.outputs",
        "LogprobsTensors",
        "logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens "
        "cu_num_generated_tokens_tensor",
    ),
    _callee("v1.outputs", "DraftTokenIds", "req_ids draft_token_ids"),
    _callee(
        "v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        "draft_token_ids num_draft_tokens cu_num_draft_tokens cu_num_sampled_tokens "
        "target_logits_indices bonus_logits_indices logits_indices",
    ),
    _callee(
        "v1.spec_decode.metrics",
        "SpecDecodingStats",
        "num_spec_tokens num_drafts num_draft_tokens num_accepted_tokens "
        "num_accepted_tokens_per_pos num_draft_tokens_per_pos",
    ),
    _callee(_DRAFTER, "DFlashQwen3Model._normalize_context_k", "all_k"),
    _callee(_GPU_WORKER, "Worker._make_model_runner", ""),
    _callee(_GPU_WORKER, "Worker.load_model", "load_dummy_weights"),
    _callee(_GPU_WORKER, "Worker.compile_or_warm_up_model", ""),
    _callee(_FLASH_ATTENTION, "FlashAttentionImpl.forward", _FORWARD),
    _callee(_TRITON_ATTENTION, "TritonAttentionImpl.forward", _FORWARD),
    _callee("v1.worker.cpu_worker", "CPUWorker.init_device", ""),
    _callee("v1.worker.cpu_model_runner", "CPUModelRunner.__init__", "vllm_config device"),
    _callee("v1.attention.backends.registry", "register_backend", "backend class_path is_mamba"),
    _callee(
        _CPU_ATTENTION,
        "CPUAttentionMetadataBuilder.build",
        "common_prefix_len common_attn_metadata fast_build",
    ),
    _callee(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.forward",
        "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    _callee(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.do_kv_cache_update",
        "layer key value kv_cache slot_mapping",
    ),
    *(
        _callee(module, f"{backend}Impl.{name}", parameters)
        for module, backend in (
            ("v1.attention.backends.flash_attn", "FlashAttention"),
            ("v1.attention.backends.triton_attn", "TritonAttention"),
        )
        for name, parameters in (
            (
                "forward",
                "layer query key value kv_cache attn_metadata output output_scale "
                "output_block_scale",
            ),
            ("do_kv_cache_update", "layer key value kv_cache slot_mapping"),
        )
    ),
    _callee("v1.worker.gpu_worker", "Worker.init_device", ""),
    _callee("v1.worker.gpu_worker", "Worker.load_model", "load_dummy_weights"),
    _callee("v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ""),
    _callee("v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", ""),
    _callee(_RUNNER, "GPUModelRunner.__init__", "vllm_config device"),
)


def differences(root: Path) -> list[str]:
    """What is not as this code was written for, a clause each.

    Args:
        root: vLLM's folder.
    """
    sources = _Sources(root)
    found = [_difference(callee, sources) for callee in CALLEES]
    return [difference for difference in found if difference is not None]


class _Sources:
    """vLLM's files, parsed once each."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed: dict[str, ast.Module | None] = {}

    def parameters(self, callee: Callee) -> tuple[str, ...] | None:
        """Parameters of a function without `self`, or the fields of a class; None if missing."""
        node: ast.AST | None = self._module(callee.module)
        for name in callee.name.split("."):
            node = None if node is None else _member(node, name)
        if isinstance(node, ast.ClassDef):
            return tuple(
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            )
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        a = node.args
        names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        names += [f"*{arg.arg}" for arg in (a.vararg, a.kwarg) if arg is not None]
        return tuple(name for name in names if name != "self")

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._parsed:
            file = self._root.joinpath(*name.split(".")).with_suffix(".py")
            text = file.read_text(encoding="utf-8") if file.is_file() else None
            self._parsed[name] = None if text is None else ast.parse(text)
        return self._parsed[name]


def _member(node: ast.AST, name: str) -> ast.AST | None:
    """The class or function of this name in a module or class; the last one, as Python would."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = [n for n in getattr(node, "body", ()) if isinstance(n, kinds) and n.name == name]
    return named[-1] if named else None


def _difference(callee: Callee, sources: _Sources) -> str | None:
    found = sources.parameters(callee)
    if found == callee.parameters:
        return None
    where = f"vllm.{callee.module}.{callee.name}"
    if found is None:
        return f"{where} is missing"
    return f"{where} has ({', '.join(found)}) and not ({', '.join(callee.parameters)})"
