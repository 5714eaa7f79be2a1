"""bfloat16 and float16: the methods run, and part only where the best two scores all but tie."""

from __future__ import annotations

import copy

import pytest
import torch

from ddtree.comparison import compare
from ddtree.config import DecodeConfig
from ddtree.models.target import Target
from ddtree.pair import Pair
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_model

PROMPTS = [[(seed * 13 + 7 * i) % VOCAB_SIZE for i in range(12)] for seed in range(4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_divergence_is_a_near_tie_and_says_so(dtype: torch.dtype, temperature: float) -> None:
    model = copy.deepcopy(tiny_model("qwen3")).to(dtype)
    target = Target(model, None, name="tiny")
    drafter = dflash_drafter(target)
    drafter.network.to(dtype)
    # Logits of these models reach about 10, where bfloat16 has steps of 1/16 and float16 of 1/128.
    step = {torch.bfloat16: 1 / 16, torch.float16: 1 / 128}[dtype]
    config = DecodeConfig(temperature=temperature, max_new_tokens=24)
    for prompt in PROMPTS:
        comparison = compare(Pair(target, drafter), prompt, config)
        assert all(g.num_tokens == 24 for g in comparison.generations)
        for divergence in comparison.divergences:
            assert divergence.gap <= 8 * step
