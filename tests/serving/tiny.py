"""The tiny target and DFlash drafter that the engine serves, as folders, and prompts for them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.support.checkpoints import write_drafter
from tests.support.tokenizers import CHAT_TEMPLATE

VOCAB_SIZE = 320
EOS_ID = 0
# Ids 1 to this are the printable ASCII characters; behind them are parts of other letters.
NUM_LETTERS = 94
NUM_LAYERS = 4
HIDDEN_SIZE = 64
# vLLM's attention on a CPU knows no smaller head.
HEAD_DIM = 32
MAX_POSITIONS = 640
BLOCK_SIZE = 8
NUM_DEPTHS = BLOCK_SIZE - 1
# How the oracle can be told to draft (`oracle.SCRIPTS`).
SCRIPTS = ("perfect", "hostile", "interleaved", "high_rank", "mixed")

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
}
_TEXT = "the quick brown fox jumps over the lazy dog; user: assistant: system: hello world why not"


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that can spell every text, JSON included; id 0 ends a text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([_TEXT] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    fast.chat_template = CHAT_TEMPLATE
    assert len(fast) <= VOCAB_SIZE
    return fast


def write_target(folder: Path) -> Path:
    """A random Qwen3 in float32, with a tokenizer and a chat template."""
    torch.manual_seed(8)
    config = Qwen3Config(
        **_SHAPE,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        # Large weights spread the logits, so that no test lives on a near tie.
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_dflash(folder: Path) -> Path:
    """A random DFlash drafter for it, in z-lab's format: it drafts noise, by the real code."""
    return write_drafter(
        folder,
        **_SHAPE,
        block_size=BLOCK_SIZE,
        num_target_layers=NUM_LAYERS,
        intermediate_size=80,
        dtype="float32",
    )


def write_models(folder: Path) -> tuple[Path, Path]:
    """Target and drafter, below `folder`."""
    return write_target(folder / "target"), write_dflash(folder / "drafter")


def prompts(count: int, lengths: tuple[int, int] = (3, 60), seed: int = 0) -> list[list[int]]:
    """`count` different prompts of random tokens that are whole letters: they can be read."""
    chooser = random.Random(seed)
    return [
        [chooser.randint(1, NUM_LETTERS) for _ in range(chooser.randint(*lengths))]
        for _ in range(count)
    ]


def write_oracle(path: Path, sequences: list[tuple[str, list[int]]]) -> Path:
    """What `oracle.Oracle` reads.

    Args:
        path: of the file.
        sequences: the name of a script, and a prompt with its true continuation.
    """
    entries = [{"script": script, "token_ids": token_ids} for script, token_ids in sequences]
    path.write_text(json.dumps({"vocab_size": VOCAB_SIZE, "sequences": entries}))
    return path
