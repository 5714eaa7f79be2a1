"""Log-probabilities of delivered tokens: the target's own, whatever the method and the rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddtree.errors import OptionError
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.types import METHODS, Generation, Method
from tests.support import drafters
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.tokenizers import tiny_tokenizer

PROMPT = [5, 17, 42, 8, 23, 11, 2]
RULES: list[dict[str, object]] = [
    {},
    {"temperature": 1.2, "seed": 4, "top_k": 9},
    {"repetition_penalty": 1.6, "suppress_tokens": [39], "logits_processor": [lambda i, s: s * 2]},
]

pytestmark = pytest.mark.usefixtures("unchecked")


def pair(script: list[int] | None = None) -> Pair:
    target = Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    return Pair(target, drafters.perfect(script or [0] * 99, VOCAB_SIZE))


def plain_log_probs(token_ids: tuple[int, ...]) -> Tensor:
    """The model's own forward over the whole text, no cache: [new tokens, V]."""
    text = torch.tensor([[*PROMPT, *token_ids]])
    with torch.inference_mode():
        logits = tiny_model("llama")(input_ids=text, use_cache=False).logits[0]
    return logits[len(PROMPT) - 1 : -1].log_softmax(-1)


def check(generation: Generation, num_alternatives: int) -> None:
    expected = plain_log_probs(generation.token_ids)
    assert generation.logprobs is not None
    assert [token.token_id for token in generation.logprobs] == list(generation.token_ids)
    for row, token in zip(expected, generation.logprobs, strict=True):
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
        best = row.topk(num_alternatives)
        assert [token_id for token_id, _ in token.top] == best.indices.tolist()
        assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "processed"])
def test_they_are_the_targets_own_before_the_rule_with_every_method(
    rule: dict[str, object], method: Method
) -> None:
    plain = pair().generate(PROMPT, method="ar", max_new_tokens=20, **rule)
    assert plain.logprobs is None
    drafted = pair(PROMPT + list(plain.token_ids)).generate(
        PROMPT, method=method, budget=16, max_new_tokens=20, logprobs=3, **rule
    )
    assert drafted.token_ids == plain.token_ids
    assert method == "ar" or drafted.num_rounds < 6
    check(drafted, 3)


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_the_length_limit_inside_an_accepted_path_ends_them_too(num_new: int) -> None:
    free = pair().generate(PROMPT, method="ar", max_new_tokens=20).token_ids
    perfect = pair(PROMPT + list(free))
    check(perfect.generate(PROMPT, budget=16, max_new_tokens=num_new, logprobs=1), 1)


def test_a_stop_string_inside_an_accepted_path_ends_them_too() -> None:
    free = pair().generate(PROMPT, method="ar", max_new_tokens=20).token_ids
    perfect = pair(PROMPT + list(free))
    stop = tiny_tokenizer().decode(free[4:6])
    stopped = perfect.generate(PROMPT, budget=16, max_new_tokens=20, stop=stop, logprobs=0)
    assert stopped.num_tokens < 8
    check(stopped, 0)


def test_a_stream_carries_them_at_its_end_as_generate_does() -> None:
    *pieces, last = pair().stream(PROMPT, budget=4, max_new_tokens=6, logprobs=2)
    assert pieces
    assert last.logprobs == pair().generate(PROMPT, budget=4, max_new_tokens=6, logprobs=2).logprobs


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (token,) = pair().generate(PROMPT, budget=0, max_new_tokens=1, logprobs=1000).logprobs
    assert sorted(token_id for token_id, _ in token.top) == list(range(VOCAB_SIZE))
    assert sum(torch.tensor([p for _, p in token.top]).exp()).item() == pytest.approx(1, abs=1e-4)


def test_true_is_no_number_of_alternatives() -> None:
    with pytest.raises(OptionError, match="logprobs: expected a whole number from 0 to 1000"):
        pair().generate(PROMPT, logprobs=True)
