"""Convert the GGUF file of a SmolLM2-like Llama into a plain Hugging Face folder.

The file is read directly: transformers needs three passes (20 to 30 s) for the same weights, builds
a tokenizer that differs between its versions, and refuses to save such a model. This module knows
the Llama names and SmolLM2's way of splitting text; not where the file comes from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from jaxtyping import Float32

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NORMAL_TOKEN = 1  # tokenizer.ggml.token_type: every other kind is special here


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config, float32 weights and tokenizer of `gguf_file` into `folder`.

    Args:
        gguf_file: a Llama model with SmolLM2's tokenizer, quantised in any way that gguf reads.
        folder: an existing folder; files of the same names are overwritten.

    Raises:
        OSError: `folder` cannot be written.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    config = _config(reader)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_tokenizer(reader, folder)
    _write_weights(reader, folder / "model.safetensors")
    # safetensors leaves mode 0600, which other users of a shared cache could not read.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _value(reader: GGUFReader, key: str) -> object:
    return reader.fields[key].contents()


def _config(reader: GGUFReader) -> dict[str, object]:
    """The config as the hub has it: transformers 4 reads `rope_theta` only, 5 reads both forms."""
    names = {
        "hidden_size": "llama.embedding_length",
        "intermediate_size": "llama.feed_forward_length",
        "num_hidden_layers": "llama.block_count",
        "num_attention_heads": "llama.attention.head_count",
        "num_key_value_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "max_position_embeddings": "llama.context_length",
        "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
        "rope_theta": "llama.rope.freq_base",
        "vocab_size": "llama.vocab_size",
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        **{name: _value(reader, key) for name, key in names.items()},
    }


def _generation_config(config: dict[str, object]) -> dict[str, object]:
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**ids, "do_sample": False}


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = list(reader.fields["tokenizer.ggml.tokens"].contents())
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    # The GGUF only names its splitting ("smollm"): single digits first, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind != _NORMAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    # Tokenizer.save raises a bare Exception when the disk is full; write_text an OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")

    named = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _value(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _value(reader, "tokenizer.chat_template"),
        **{name: tokens[reader.fields[key].contents()] for name, key in named.items()},
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(reader: GGUFReader, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(_tensors(reader)), path, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error


def _tensors(reader: GGUFReader) -> Iterator[tuple[str, Float32[np.ndarray, "*shape"]]]:
    import numpy as np
    from gguf import dequantize

    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    for tensor in reader.tensors:
        kind, prefix = tensor.name.removesuffix(".weight"), ""
        if kind.startswith("blk."):
            _, layer, kind = kind.split(".")
            prefix = f"model.layers.{layer}."
        weight = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            weight = _halves_from_pairs(weight, num_heads=heads[kind])
        name = prefix + _BLOCK_NAMES[kind] if prefix else _TOP_NAMES[kind]
        yield f"{name}.weight", np.ascontiguousarray(weight, dtype=np.float32)


def _halves_from_pairs(
    weight: Float32[np.ndarray, "out inp"], *, num_heads: int
) -> Float32[np.ndarray, "out inp"]:
    """Undo llama.cpp's order of rows: it rotates neighbours, Hugging Face rotates halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
