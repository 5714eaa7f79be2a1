"""After every commit, target cache, drafter context and features equal plain decoding's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddtree.budget import FixedBudget
from ddtree.commit import commit
from ddtree.decode import Stages, decode
from ddtree.models.drafter import DFlashSession
from ddtree.models.target import FINAL_HIDDEN
from ddtree.prefill import Context
from ddtree.sampling.rule import Greedy
from ddtree.stopping import TextStopping
from tests.support import drafters
from tests.support.models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    dflash_drafter,
    greedy_reference,
    tiny_model,
    tiny_target,
)

PROMPT = [(5 * i + 1) % VOCAB_SIZE for i in range(15)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_after_every_commit_the_caches_equal_plain_decodings(architecture: str) -> None:
    target = tiny_target(architecture)
    reference = greedy_reference(tiny_model(architecture), PROMPT, 30)
    script = PROMPT + reference
    drafter = drafters.right_at_rank(lambda position: position % 3, script, VOCAB_SIZE)
    commits = 0

    def checked(context: Context, start: int, path: tuple[int, ...], features: object) -> None:
        nonlocal commits
        commit(context, start, path, features)  # type: ignore[arg-type]
        commits += 1
        length = start + 1 + len(path)
        assert context.cache.length == length == len(context.token_ids) - 1
        plain = target.new_cache(length)
        output = target.prefill(
            torch.tensor(context.token_ids[:-1]), plain, capture=context.layer_ids
        )
        for ours, theirs in zip(context.cache.stores, plain.stores, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(ours.values, theirs.values, atol=2e-5, rtol=2e-5)
        seen = torch.cat(drafter.sessions[-1].features)
        torch.testing.assert_close(seen, output.features, atol=5e-5, rtol=5e-5)
        assert drafter.sessions[-1].token_ids == context.token_ids[:-1]

    rounds = list(
        decode(
            target,
            drafter,
            PROMPT,
            stages=replace(Stages(), commit=checked),
            rule=Greedy(),
            stopping=TextStopping(30, (), None),
            budget=FixedBudget(24),
        )
    )
    assert commits == len(rounds) - 1
    assert any(path != tuple(range(1, len(path) + 1)) for path in (r.path for r in rounds))


@pytest.mark.parametrize("changes", [{}, {"block_size": 3}], ids=["b8", "b3"])
def test_the_drafters_context_does_not_depend_on_how_it_grew(changes: dict[str, int]) -> None:
    target = tiny_target("llama")
    drafter = dflash_drafter(target, **changes)
    torch.manual_seed(0)
    features = torch.randn(20, 2 * target.hidden_size)
    with torch.inference_mode():
        whole, grown = drafter.start(4), drafter.start(4)
        drafters.feed(whole, features)
        for piece in (features[:11], features[11:12], features[12:20]):
            drafters.feed(grown, piece)
            grown.propose(5, num_depths=2, num_ranks=4)  # must leave no trace
        first = whole.propose(9, num_depths=2, num_ranks=10)
        second = grown.propose(9, num_depths=2, num_ranks=10)
    assert isinstance(grown, DFlashSession)
    assert grown.length == 20
    assert first.token_ids.tolist() == second.token_ids.tolist()
    torch.testing.assert_close(first.log_probs, second.log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2-mixed", "mistral-window"])
def test_the_final_hidden_states_are_what_the_head_reads(architecture: str) -> None:
    target = tiny_target(architecture)
    ids = torch.tensor(PROMPT)
    capture = (1, FINAL_HIDDEN)
    with torch.inference_mode():
        cache = target.new_cache(4)
        prompt = target.prefill(ids, cache, capture=capture, num_logits=len(PROMPT))
        depths = torch.tensor([0, 1, 1])
        ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        tree = target.verify(torch.tensor([3, 4, 5]), depths, ancestors, cache, capture=capture)
        width = target.hidden_size
        for output in (prompt, tree):
            assert output.features.shape[1] == 2 * width
            torch.testing.assert_close(target.head(output.features[:, width:]), output.logits)
        # All rows of a prompt, whose logits are mostly not wanted.
        last = target.prefill(ids, target.new_cache(4), capture=(FINAL_HIDDEN,))
    assert (last.logits.shape[0], last.features.shape[0]) == (1, len(PROMPT))
    torch.testing.assert_close(last.features, prompt.features[:, width:])


def test_features_are_the_outputs_of_the_layers_before_the_final_norm() -> None:
    model, target = tiny_model("llama"), tiny_target("llama")
    ids = torch.tensor(PROMPT)
    with torch.inference_mode():
        plain = model(input_ids=ids[None], output_hidden_states=True)
        capture = (0, 2, target.num_layers - 1)
        output = target.prefill(ids, target.new_cache(4), capture=capture)
    width = target.hidden_size
    # hidden_states[0] is the embedding, so layer i's output is entry i + 1 ...
    torch.testing.assert_close(output.features[:, :width], plain.hidden_states[1][0])
    torch.testing.assert_close(output.features[:, width : 2 * width], plain.hidden_states[3][0])
    # ... except for the last, which transformers hands out behind the final norm.
    last = model.model.norm(output.features[:, 2 * width :])
    torch.testing.assert_close(last, plain.hidden_states[-1][0])
