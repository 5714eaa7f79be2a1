"""Choices at the rows of trees are vLLM's own, made one row after another, with our noise.

The twin is vLLM's `Sampler` for plain decoding: one row, one request, all of its own processors,
its output so far extended by the row's path. Of random requests its processed logits are taken, and
our noise is added to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn
    pytest.importorskip("vllm.v1.worker.gpu_input_batch", reason="needs vLLM: make serving-env")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402
from vllm.v1.sample.logits_processor import (  # noqa: E402
    BUILTIN_LOGITS_PROCESSORS,
    LogitsProcessors,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.rejection_sampler import RejectionSampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

from ddtree.sampling.noise import Noise, gumbel_noise  # noqa: E402
from ddtree.serving.choosing import (  # noqa: E402
    NOT_CHOSEN,
    Chosen,
    choose_rows,
    choose_visited_rows,
    unsupported_processors,
)
from ddtree.serving.path_logprobs import (  # noqa: E402
    logprobs_along_paths,
    wants_logprobs,
    wants_processed,
)
from ddtree.serving.row_paths import RequestRule, StepRows  # noqa: E402
from ddtree.serving.step import chain_of, walk_tree  # noqa: E402
from ddtree.types import DraftTree  # noqa: E402

V = 48
BOTH = pytest.mark.parametrize("choose", [choose_rows, choose_visited_rows])
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@dataclass
class Asked:
    """A request: its text so far, and what it asks for."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [3, 4, 5])
    output: list[int] = field(default_factory=list)

    @property
    def rule(self) -> RequestRule:
        return RequestRule(
            num_tokens=len(self.prompt) + len(self.output),
            noise=Noise(self.params.seed or 0),
            sampling_params=self.params,
            output_token_ids=self.output,
        )


def params(bad_words: Sequence[Sequence[int]] = (), **asked: Any) -> SamplingParams:
    """Sampling parameters whose bad words are tokens already."""
    made = SamplingParams(max_tokens=64, detokenize=False, seed=5, **asked)
    if bad_words:
        made.bad_words = ["any"]
        made._bad_words_token_ids = [list(word) for word in bad_words]
    return made


# Tokens below 6 are frequent in prompts, outputs and trees, so that penalties and words meet them.
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "allowed": {"allowed_token_ids": [0, 1, 2, 3, 4, 5, 6, 17, 40]},
    "bad words": {"bad_words": [[1], [2, 3], [0, 1, 2], [4, 4], [1, 1, 1, 1]]},
    "minimum": {"min_tokens": 6, "stop_token_ids": [0, 1, 7]},
    "bias": {"logit_bias": {0: 4.0, 2: -100.0, 30: 2.5}},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.75},
}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all of them": {"temperature": 1.5, "min_p": 0.02, "top_k": 9, "top_p": 0.9},
}


def processors(kinds: Sequence[Callable[..., Any]]) -> LogitsProcessors:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))
    return LogitsProcessors(kind(config, torch.device("cpu"), False) for kind in kinds)


def input_batch(
    requests: Sequence[Asked], kinds: Sequence[Callable[..., Any]], **more: Any
) -> InputBatch:
    """The engine's own batch of these requests."""
    batch = InputBatch(
        max_num_reqs=8,
        max_model_len=128,
        max_num_batched_tokens=128,
        device=torch.device("cpu"),
        vocab_size=V,
        block_sizes=[16],
        max_num_blocks_per_req=[8],
        logitsprocs=processors(kinds),
        **more,
    )
    for i, asked in enumerate(requests):
        batch.add_request(
            CachedRequestState(
                req_id=str(i),
                prompt_token_ids=asked.prompt,
                mm_features=[],
                sampling_params=asked.params,
                generator=None,
                block_ids=([],),
                num_computed_tokens=0,
                output_token_ids=asked.output,
            )
        )
    batch.refresh_metadata()
    return batch


def metadata_of(requests: Sequence[Asked]) -> SamplingMetadata:
    """As a speculating engine makes it: of its processors it loads one only."""
    return input_batch(requests, [MinTokensLogitsProcessor], num_spec_tokens=8).sampling_metadata


def plain(logits_V: Tensor, asked: Asked, path: Sequence[int]) -> tuple[int, Tensor]:
    """Token and processed logits of plain decoding behind a path."""
    there = replace(asked, output=[*asked.output, *path])
    metadata = input_batch([there], BUILTIN_LOGITS_PROCESSORS).sampling_metadata
    metadata = replace(metadata, max_num_logprobs=-1)
    said = Sampler(logprobs_mode="processed_logits")(logits_V[None].clone(), metadata)
    processed = said.logprobs_tensors.logprobs[0]
    if asked.params.temperature == 0:
        return int(said.sampled_token_ids), processed
    noise = gumbel_noise(asked.params.seed, len(there.prompt) + len(there.output), V)
    return int((processed + noise).argmax()), processed


def random_tree(rng: np.random.Generator, num_rows: int) -> DraftTree:
    """Parents first; no two children of a row have one token."""
    parents, depths, token_ids = [-1], [0], [int(rng.integers(6))]
    while len(parents) < num_rows:
        parent, token = int(rng.integers(len(parents))), int(rng.integers(6))
        if (parent, token) not in zip(parents, token_ids, strict=True):
            parents.append(parent)
            depths.append(depths[parent] + 1)
            token_ids.append(token)
    return DraftTree(
        np.array(token_ids, np.int64),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.zeros(num_rows, np.int32),
        np.zeros(num_rows, np.float32),
    )


def random_logits(rng: np.random.Generator, num_rows: int) -> Tensor:
    """Tokens that trees are made of are likely, so that walks go somewhere."""
    logits = rng.normal(size=(num_rows, V)) * 2
    logits[:, :6] += 3
    return torch.from_numpy(logits.astype(np.float32))


def random_text(rng: np.random.Generator, longest: int) -> list[int]:
    return [int(t) for t in rng.integers(6, size=rng.integers(longest + 1))]


def random_requests(
    rng: np.random.Generator, asked: Sequence[SamplingParams]
) -> tuple[list[Asked], list[DraftTree], Tensor]:
    requests = [Asked(p, [1, *random_text(rng, 4)], random_text(rng, 7)) for p in asked]
    trees = [random_tree(rng, int(rng.integers(1, 9))) for _ in requests]
    return requests, trees, random_logits(rng, sum(tree.num_rows for tree in trees))


def assert_as_plain(requests: list[Asked], trees: list[DraftTree], logits: Tensor) -> None:
    """At every row, in one call; at the visited rows, level by level; processed logits too."""
    rows, metadata = StepRows.of(trees), metadata_of(requests)
    rules = [asked.rule for asked in requests]
    before = logits.clone()
    kept = choose_rows(logits, rows, metadata, rules, keep_processed=True)
    chosen = choose_rows(logits, rows, metadata, rules)
    visited = choose_visited_rows(logits, rows, metadata, rules)
    visited_kept = choose_visited_rows(logits, rows, metadata, rules, keep_processed=True)
    assert torch.equal(logits, before)
    for row in range(rows.num_rows):
        token, processed = plain(
            logits[row], requests[int(rows.request_of_row[row])], rows.path(row)
        )
        assert int(chosen.token_ids[row]) == int(kept.token_ids[row]) == token
        assert torch.equal(kept.processed[row], processed)
    start = 0
    for tree in trees:
        of_tree = slice(start, start + tree.num_rows)
        expected = walk_tree(tree, chosen.token_ids[of_tree].tolist())
        for found in (visited, visited_kept):
            assert walk_tree(tree, found.token_ids[of_tree].tolist()) == expected
        for node in (0, *expected.path):
            row = start + node
            assert torch.equal(visited_kept.processed[row], kept.processed[row])
        start += tree.num_rows


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_trees_rows_choose_as_plain_decoding_does(change: str, draw: str) -> None:
    asked = params(**CHANGES[change], **DRAWS[draw])
    for seed in range(6):
        assert_as_plain(*random_requests(np.random.default_rng(seed), [asked]))


@BOTH
@pytest.mark.parametrize("num_on_path", [0, 1, 2, 3])
def test_a_bad_word_may_begin_in_the_output_and_end_on_the_path(
    choose: Callable[..., Chosen], num_on_path: int
) -> None:
    word = [1, 2, 3, 4]
    output, path = word[: 3 - num_on_path], word[3 - num_on_path : 3]
    asked = Asked(params(temperature=0.0, bad_words=[word]), output=output)
    logits = torch.zeros(len(path) + 1, V)
    for row, token in enumerate([*path, word[-1]]):
        logits[row, token], logits[row, 9] = 2, 1
    rows = StepRows.of([chain_of(0, path)])
    chosen = choose(logits, rows, metadata_of([asked]), [asked.rule])
    assert chosen.token_ids.tolist() == [*path, 9]
    assert choose(
        logits, rows, metadata_of([Asked(params(temperature=0.0))]), [asked.rule]
    ).token_ids.tolist() == [*path, 4]


anything = st.builds(
    lambda changes, draw: params(
        **{k: v for name in changes for k, v in CHANGES[name].items()}, **DRAWS[draw]
    ),
    st.sets(st.sampled_from(list(CHANGES))),
    st.sampled_from(list(DRAWS)),
)


@settings(max_examples=150)
@given(st.lists(anything, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_requests_of_a_batch_choose_as_if_alone(asked: list[SamplingParams], seed: int) -> None:
    assert_as_plain(*random_requests(np.random.default_rng(seed), asked))


@BOTH
@pytest.mark.parametrize("draw", DRAWS)
def test_bfloat16_logits_are_decided_in_float32(choose: Callable[..., Chosen], draw: str) -> None:
    rng = np.random.default_rng(1)
    requests, trees, logits = random_requests(rng, [params(**DRAWS[draw])] * 2)
    narrow, rules = logits.bfloat16(), [asked.rule for asked in requests]
    given_rows = StepRows.of(trees), metadata_of(requests), rules
    assert torch.equal(
        choose(narrow, *given_rows).token_ids, choose(narrow.float(), *given_rows).token_ids
    )


def next_logits(text: Sequence[int]) -> Tensor:
    """A target: any function of the text."""
    return random_logits(np.random.default_rng([7, *text]), 1)[0]


@BOTH
@pytest.mark.parametrize("draw", DRAWS)
def test_one_seed_gives_one_text_whatever_the_trees(
    choose: Callable[..., Chosen], draw: str
) -> None:
    everything = {k: v for change in CHANGES.values() for k, v in change.items()}
    everything["allowed_token_ids"] = [0, 1, 2, 3, 4, 5, 17]
    asked = [Asked(params(**everything, **DRAWS[draw])), Asked(params(**DRAWS[draw]), [2, 2])]
    texts = []
    for request in asked:
        output: list[int] = []
        for _ in range(24):
            there = replace(request, output=output)
            token, _ = plain(next_logits(there.prompt + output), there, [])
            output.append(token)
        texts.append(output)
    rng = np.random.default_rng(3)
    rounds = accepted = 0
    while min(len(request.output) for request in asked) < 24:
        trees = [random_tree(rng, 12) for _ in asked]
        rows = StepRows.of(trees)
        logits = torch.stack(
            [
                next_logits([*asked[r].prompt, *asked[r].output, *rows.path(row)])
                for row, r in enumerate(rows.request_of_row.tolist())
            ]
        )
        rules = [request.rule for request in asked]
        chosen = choose(logits, rows, metadata_of(asked), rules).token_ids.tolist()
        for request, tree, start in zip(asked, trees, rows.root_rows.tolist(), strict=True):
            walk = walk_tree(tree, chosen[start : start + tree.num_rows])
            request.output.extend(walk.token_ids)
            accepted += len(walk.path)
        rounds += 1
    assert accepted > 3, "trees that are never walked would prove nothing"
    assert [request.output[:24] for request in asked] == texts


def test_rows_that_the_walk_does_not_come_to_are_left_out() -> None:
    tree = chain_of(1, [2, 3])
    logits = torch.zeros(3, V)
    logits[:, 9] = 100  # no child anywhere
    asked = Asked(params(temperature=1.0))
    found = choose_visited_rows(logits, StepRows.of([tree]), metadata_of([asked]), [asked.rule])
    assert found.token_ids.tolist() == [9, NOT_CHOSEN, NOT_CHOSEN]
    assert found.processed is None


def test_noise_is_drawn_once_for_each_position(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(seed: int, position: int, vocab_size: int, device: Any = "cpu") -> Tensor:
        drawn.append(position)
        return gumbel_noise(seed, position, vocab_size, device)

    monkeypatch.setattr("ddtree.sampling.noise.gumbel_noise", draw)
    rng = np.random.default_rng(0)
    sampled, greedy = Asked(params(temperature=1.0), output=[1]), Asked(params(temperature=0.0))
    tree = random_tree(rng, 12)
    rows = StepRows.of([tree, tree])
    rules = [sampled.rule, greedy.rule]
    for _ in range(2):
        choose_rows(random_logits(rng, 24), rows, metadata_of([sampled, greedy]), rules)
    assert sorted(drawn) == list(range(4, 5 + int(tree.depths.max())))


@BOTH
def test_a_grammar_that_allows_nothing_but_to_stop_may_stop_early(
    choose: Callable[..., Chosen],
) -> None:
    asked = Asked(
        params(
            temperature=0.0,
            min_tokens=5,
            stop_token_ids=[7, 8],
            structured_outputs=StructuredOutputsParams(regex="a"),
        )
    )
    logits = random_logits(np.random.default_rng(0), 2)
    logits[:, 7] = 50
    logits[0, torch.arange(V) != 7] = -torch.inf  # what the engine does to rows of a grammar
    requests, rows = [asked], StepRows.of([chain_of(1, [7])])
    chosen = choose(logits, rows, metadata_of(requests), [asked.rule])
    assert chosen.token_ids.tolist() == [plain(logits[i], asked, [7][:i])[0] for i in (0, 1)]
    assert chosen.token_ids[0] == 7 != chosen.token_ids[1]


@BOTH
def test_a_thinking_budget_ends_thinking_where_plain_decoding_would(
    choose: Callable[..., Chosen],
) -> None:
    reasoning = SimpleNamespace(reasoning_start_token_ids=[20], reasoning_end_token_ids=[21, 22])

    def requests() -> list[Asked]:
        thinks = params(temperature=0.0, thinking_token_budget=5)
        draws = params(temperature=1.0, thinking_token_budget=3)
        return [Asked(params(temperature=1.0)), Asked(thinks, [1, 20]), Asked(draws, [2, 20])]

    expected, found = requests(), requests()
    alone = [
        input_batch([asked], BUILTIN_LOGITS_PROCESSORS, reasoning_config=reasoning)
        for asked in expected
    ]
    together = input_batch(
        found, [MinTokensLogitsProcessor], reasoning_config=reasoning, num_spec_tokens=4
    )
    rng = np.random.default_rng(0)
    for _ in range(14):
        logits = random_logits(rng, 3)
        for i, asked in enumerate(expected):
            alone[i].refresh_metadata()
            metadata = replace(alone[i].sampling_metadata, max_num_logprobs=-1)
            said = Sampler(logprobs_mode="processed_logits")(logits[i : i + 1].clone(), metadata)
            processed = said.logprobs_tensors.logprobs[0]
            if asked.params.temperature > 0:
                position = len(asked.prompt) + len(asked.output)
                processed = processed + gumbel_noise(5, position, V)
            asked.output.append(int(processed.argmax()))
        together.refresh_metadata()
        rules, rows = [asked.rule for asked in found], StepRows.of([chain_of(1, [])] * 3)
        chosen = choose(logits, rows, together.sampling_metadata, rules)
        for asked, token in zip(found, chosen.token_ids.tolist(), strict=True):
            asked.output.append(token)
    assert [asked.output for asked in found] == [asked.output for asked in expected]
    assert found[1].output[5:7] == [21, 22] == found[2].output[3:5]


def test_processors_that_know_one_row_per_request_are_named() -> None:
    class Own(MinTokensLogitsProcessor):
        """A user's."""

    assert unsupported_processors(processors(BUILTIN_LOGITS_PROCESSORS)) == []
    assert unsupported_processors(processors([Own, MinTokensLogitsProcessor])) == ["Own"]


def along_paths(
    requests: list[Asked], trees: list[DraftTree], logits: Tensor, sampler: Sampler
) -> tuple[list[list[int]], LogprobsLists | None]:
    """Tokens and log-probabilities of a step, as vLLM's bookkeeping reads them."""
    rows, metadata = StepRows.of(trees), metadata_of(requests)
    chosen = choose_visited_rows(
        logits,
        rows,
        metadata,
        [asked.rule for asked in requests],
        keep_processed=wants_processed(metadata, sampler),
    )
    width = max(tree.num_rows for tree in trees) + 1
    path_rows = torch.from_numpy(rows.root_rows)[:, None].repeat(1, width)
    token_ids = torch.full((len(trees), width), -1, dtype=torch.int32)
    for r, (tree, start) in enumerate(zip(trees, rows.root_rows.tolist(), strict=True)):
        said = chosen.token_ids[start : start + tree.num_rows].tolist()
        walk = walk_tree(tree, said)
        path_rows[r, 1 : len(walk.path) + 1] = start + torch.tensor(walk.path, dtype=torch.int64)
        token_ids[r, : len(walk.token_ids)] = torch.tensor(walk.token_ids, dtype=torch.int32)
    tensors = logprobs_along_paths(
        logits, chosen, path_rows, token_ids, metadata=metadata, sampler=sampler
    )
    assert (tensors is not None) == wants_logprobs(metadata)
    return RejectionSampler.parse_output(token_ids, V, logprobs_tensors=tensors)


ASKED_LOGPROBS: dict[str, list[dict[str, Any]]] = {
    "none": [{}, {}],
    "the token's own": [{"logprobs": 0}, {}],
    "some": [{"logprobs": 2}, {"logprobs": 5}],
    "all": [{"logprobs": -1}, {"logprobs": 1}],
    "named": [{"logprob_token_ids": [4, 9, 30]}, {"logprob_token_ids": [2]}],
    "named and some": [{"logprob_token_ids": [4, 9]}, {"logprobs": 3}],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("logprobs", ASKED_LOGPROBS)
def test_logprobs_along_paths_are_those_of_plain_decoding(mode: str, logprobs: str) -> None:
    sampler, rng = Sampler(logprobs_mode=mode), np.random.default_rng(0)
    kinds = [
        CHANGES["repetition"] | CHANGES["bias"] | DRAWS["all of them"],
        CHANGES["minimum"] | DRAWS["greedy"],
    ]
    for _ in range(8):
        first, second = ASKED_LOGPROBS[logprobs]
        asked = [params(**kinds[0], **first), params(**kinds[1], **second)]
        requests, trees, logits = random_requests(rng, asked)
        token_ids, found = along_paths(requests, trees, logits, sampler)
        if logprobs == "none":
            assert found is None
            continue
        rows = StepRows.of(trees)
        for r, path in enumerate(token_ids):
            row = int(rows.root_rows[r])
            of_request = found.slice_request(r, len(path))
            for i, token in enumerate(path):
                expected = plain_logprobs(requests, r, path[:i], token, logits[row], sampler)
                for got, want in zip(of_request[:3], expected, strict=True):
                    np.testing.assert_array_equal(got[i], want)
                row = rows.children.get((row, token), -1)


def plain_logprobs(
    requests: list[Asked], r: int, path: list[int], token: int, logits_V: Tensor, sampler: Sampler
) -> list[Any]:
    """Of plain decoding in the same batch, with the token that our noise picks."""
    there = [replace(a, output=a.output + path) if i == r else a for i, a in enumerate(requests)]
    metadata = input_batch(there, BUILTIN_LOGITS_PROCESSORS).sampling_metadata
    logits = torch.zeros(len(requests), V)
    logits[r] = logits_V
    said = torch.zeros(len(requests), dtype=torch.int64)
    said[r] = token

    class Told(Sampler):
        """Says what it is told to."""

        def sample(self, *args: Any, **more: Any) -> tuple[Tensor, Tensor | None]:
            _, processed = super().sample(*args, **more)
            return said, processed

    tensors = Told(logprobs_mode=sampler.logprobs_mode)(logits, metadata).logprobs_tensors
    return [field[r].numpy() for field in tensors[:3]]
