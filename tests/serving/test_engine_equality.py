"""Trees in the real engine say what stock vLLM says, token for token, and trees are at work."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import GREEDY, Engines, Texts
from tests.serving.own_drafts import OwnDrafts
from tests.serving.tiny import NUM_DEPTHS, SCRIPTS, prompts, write_oracle

Json = dict[str, Any]
# Between the engine's drafter and ours, both in float32.
ROUNDING = 2e-3


def tree_job(engines: Engines, texts: Texts, batches: Json, **llm: Any) -> Json:
    """Scripted drafts for `texts`, all that the drafter itself says listened to."""
    return {
        "llm": engines.trees(**llm),
        "env": {"DDTREE_TEST_ORACLE": str(texts.oracle), "DDTREE_TEST_LISTEN": "1"},
        "batches": batches,
        "rpc": ["tree_record", "drafts_seen", "tree_store_size"],
    }


@pytest.fixture(scope="module")
def by_script(engines: Engines, texts: Texts) -> Json:
    """One engine, asked for the texts of one script after the other."""
    batches = {script: texts.requests(script) for script in SCRIPTS}
    return engines.run("by_script", tree_job(engines, texts, batches))


@pytest.mark.parametrize("script", SCRIPTS)
def test_whatever_the_drafts_the_text_is_that_of_stock_vllm(
    script: str, by_script: Json, texts: Texts
) -> None:
    assert texts.wrong(by_script["batches"][script], script) == []


def test_right_drafts_save_steps_and_wrong_ones_cost_none(by_script: Json, texts: Texts) -> None:
    steps = by_script["steps"]
    longest = max(map(len, texts.outputs))
    assert steps["hostile"] >= longest
    assert steps["hostile"] <= longest + 6  # one request comes each step
    assert steps["perfect"] <= longest / NUM_DEPTHS + 6 + 2
    for script in ("interleaved", "high_rank", "mixed"):
        assert steps["perfect"] < steps[script] < steps["hostile"], script


def test_accepted_nodes_are_those_of_branches_too(by_script: Json) -> None:
    record = by_script["rpc"]["tree_record"][0]
    assert record["branching"] > 50
    assert record["accepted_off_place"] > 50
    assert len(record["sizes"]) > 5, "scripts make trees of many sizes"


def test_hostile_drafts_are_never_accepted(by_script: Json) -> None:
    metrics = by_script["metrics"]
    assert metrics["hostile"]["vllm:spec_decode_num_accepted_tokens"] == 0
    assert metrics["perfect"]["vllm:spec_decode_num_accepted_tokens"] > 100


CONFIGURATIONS: dict[str, Json] = {
    "compiled": {"enforce_eager": False},
    "chunked prefill": {"max_num_batched_tokens": 48, "max_num_seqs": 8},
    "preemption": {"num_gpu_blocks_override": 17, "max_model_len": 160},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "small budget": {"options": {"budget": 5}},
    "most rows of a step": {"options": {"max_batch_rows": 40}},
    "automatic budget": {"options": {"budget": "auto"}},
    "lookup": {"options": {"lookup": True}},
    "chains": {"options": {"method": "dflash"}},
    "no drafts": {"options": {"method": "ar"}},
    "bigger than a word": {"max_nodes": 80},
}


@pytest.fixture(scope="module")
def configured(engines: Engines, texts: Texts) -> Any:
    """The answer of a configuration's engine, made once."""
    answers: dict[str, Json] = {}

    def answer(name: str) -> Json:
        if name not in answers:
            job = tree_job(engines, texts, {"all": texts.requests()}, **CONFIGURATIONS[name])
            answers[name] = engines.run(name.replace(" ", "_"), job)
        return answers[name]

    return answer


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_however_the_engine_is_set_up_the_text_is_that_of_stock_vllm(
    name: str, configured: Any, texts: Texts
) -> None:
    answer = configured(name)
    assert texts.wrong(answer["batches"]["all"]) == []
    assert answer["rpc"]["tree_store_size"] == [0]


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "no drafts"])
def test_the_drafter_says_what_ours_says_behind_the_same_text(
    name: str, configured: Any, own_drafts: OwnDrafts
) -> None:
    seen = configured(name)["rpc"]["drafts_seen"][0]
    assert len(seen) > 100
    assert max(own_drafts.off(seen)) < ROUNDING


@pytest.mark.parametrize(
    "name", [name for name in CONFIGURATIONS if name not in ("no drafts", "chains")]
)
def test_trees_were_at_work(name: str, configured: Any, texts: Texts) -> None:
    record = configured(name)["rpc"]["tree_record"][0]
    assert record["branching"] > 30
    assert record["accepted_off_place"] > 20


def test_preemptions_happened(configured: Any) -> None:
    assert configured("preemption")["metrics"]["all"]["vllm:num_preemptions"] >= 2


def test_budgets_are_kept(configured: Any) -> None:
    assert configured("small budget")["rpc"]["tree_record"][0]["most_rows"] == 6
    assert configured("bigger than a word")["rpc"]["tree_record"][0]["most_rows"] > 65
    assert configured("chains")["rpc"]["tree_record"][0]["branching"] == 0
    assert configured("no drafts")["rpc"]["tree_record"][0]["trees"] == 0


def test_a_cached_prefix_serves_trees_and_the_drafter(
    engines: Engines, own_drafts: OwnDrafts
) -> None:
    prefix = prompts(1, lengths=(150, 150), seed=5)[0]
    asked = [prefix + end for end in prompts(4, lengths=(1, 8), seed=6)]
    params = {**GREEDY, "ignore_eos": True, "max_tokens": 100}
    requests = [
        {"prompt": prompt, "params": params, "at": 12 * i} for i, prompt in enumerate(asked)
    ]
    stock = engines.run("prefix_stock", {"llm": engines.plain(), "batches": {"a": requests}})
    outputs = [said["token_ids"] for said in stock["batches"]["a"]]
    sequences = [("interleaved", p + o) for p, o in zip(asked, outputs, strict=True)]
    # The texts themselves come back as prompts: what trees left in the cache is then read.
    again = [
        {"prompt": prompt + output[:90], "params": {**params, "max_tokens": 10}}
        for prompt, output in zip(asked, outputs, strict=True)
    ]
    job = {
        "llm": engines.trees(),
        "env": {
            "DDTREE_TEST_ORACLE": str(write_oracle(engines.folder / "prefix.oracle", sequences)),
            "DDTREE_TEST_LISTEN": "1",
        },
        "batches": {"a": requests, "again": again},
        "rpc": ["tree_record", "drafts_seen"],
    }
    answer = engines.run("prefix", job)
    assert [said["token_ids"] for said in answer["batches"]["a"]] == outputs
    assert [said["token_ids"] for said in answer["batches"]["again"]] == [o[90:] for o in outputs]
    assert all(said["num_cached_tokens"] >= 96 for said in answer["batches"]["a"][1:])
    # Beyond the prompts, which end before 160: keys and values that trees have written and moved.
    assert all(said["num_cached_tokens"] >= 192 for said in answer["batches"]["again"])
    assert max(own_drafts.off(answer["rpc"]["drafts_seen"][0])) < ROUNDING
    assert answer["rpc"]["tree_record"][0]["accepted_off_place"] > 20


def test_tensor_parallel_workers_agree(engines: Engines, texts: Texts) -> None:
    job = tree_job(
        engines, texts, {"all": texts.requests()}, tensor_parallel_size=2, enforce_eager=True
    )
    answer = engines.run("tensor_parallel", job)
    assert texts.wrong(answer["batches"]["all"]) == []
    first, second = answer["rpc"]["tree_record"]
    assert first == second
    assert first["accepted_off_place"] > 50


def test_texts_that_reach_the_longest_length_end_as_stock_vllms_do(engines: Engines) -> None:
    asked = prompts(8, lengths=(80, 127), seed=12)
    params = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    requests = [{"prompt": prompt, "params": params, "at": i} for i, prompt in enumerate(asked)]
    batches = {"a": requests}
    stock = engines.run(
        "longest_stock", {"llm": engines.plain(max_model_len=128), "batches": batches}
    )
    outputs = [said["token_ids"] for said in stock["batches"]["a"]]
    assert all(len(p) + len(o) == 128 for p, o in zip(asked, outputs, strict=True))
    whole = [("perfect", p + o) for p, o in zip(asked, outputs, strict=True)]
    job = {
        "llm": engines.trees(max_model_len=128),
        "env": {"DDTREE_TEST_ORACLE": str(write_oracle(engines.folder / "longest.oracle", whole))},
        "batches": batches,
        "rpc": ["tree_record", "tree_store_size"],
    }
    answer = engines.run("longest", job)
    for said, expected in zip(answer["batches"]["a"], stock["batches"]["a"], strict=True):
        assert said["token_ids"] == expected["token_ids"]
        assert said["finish_reason"] == expected["finish_reason"] == "length"
    # vLLM drafts for none while one request is as near to the end as a whole draft is long.
    assert answer["rpc"]["tree_record"][0]["accepted"] > 0
    assert answer["rpc"]["tree_store_size"] == [0]


# Sampled ------------------------------------------------------------------------------------------

SAMPLING = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.9},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.0},
)


@pytest.fixture(scope="module")
def sampled(engines: Engines) -> tuple[list[Json], list[list[int]], Json]:
    """Requests with seeds, what plain decoding by our rule says, and scripts for the oracle."""
    asked = prompts(12, seed=7)
    requests = [
        {
            "prompt": prompt,
            "params": {"max_tokens": 40, "seed": 100 + i, **SAMPLING[i % len(SAMPLING)]},
            "at": i,
        }
        for i, prompt in enumerate(asked)
    ]
    job = {"llm": engines.trees({"method": "ar"}), "batches": {"a": requests}}
    answer = engines.run("sampled_ar", job)
    outputs = [said["token_ids"] for said in answer["batches"]["a"]]
    whole = [
        (SCRIPTS[2 + i % 3], prompt + output)
        for i, (prompt, output) in enumerate(zip(asked, outputs, strict=True))
    ]
    oracle = write_oracle(engines.folder / "sampled.oracle", whole)
    return requests, outputs, {"DDTREE_TEST_ORACLE": str(oracle)}


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("drafts", ["scripted", "own"])
def test_one_seed_gives_one_text_whatever_the_method(
    method: str, drafts: str, engines: Engines, sampled: tuple[list[Json], list[list[int]], Json]
) -> None:
    requests, outputs, scripts = sampled
    job = {
        "llm": engines.trees({"method": method}),
        "env": scripts if drafts == "scripted" else {},
        "batches": {"a": requests, "again": requests},
        "rpc": ["tree_record"],
    }
    answer = engines.run(f"sampled_{method}_{drafts}", job)
    for batch in ("a", "again"):
        assert [said["token_ids"] for said in answer["batches"][batch]] == outputs
    record = answer["rpc"]["tree_record"][0]
    assert record["trees"] > 0
    if (method, drafts) == ("ddtree", "scripted"):
        assert record["accepted_off_place"] > 30


def test_neither_preemption_nor_chunks_change_a_seeds_text(
    engines: Engines, sampled: tuple[list[Json], list[list[int]], Json]
) -> None:
    requests, outputs, scripts = sampled
    job = {
        "llm": engines.trees(
            num_gpu_blocks_override=13, max_model_len=128, max_num_batched_tokens=128
        ),
        "env": scripts,
        "batches": {"a": requests},
    }
    answer = engines.run("sampled_preempted", job)
    assert [said["token_ids"] for said in answer["batches"]["a"]] == outputs
    assert answer["metrics"]["a"]["vllm:num_preemptions"] >= 1


def test_requests_without_a_seed_differ(engines: Engines) -> None:
    same = {"prompt": prompts(1)[0], "params": {"temperature": 1.0, "max_tokens": 20}}
    answer = engines.run("unseeded", {"llm": engines.trees(), "batches": {"a": [same] * 6}})
    assert len({tuple(said["token_ids"]) for said in answer["batches"]["a"]}) == 6


def test_seeds_matter(sampled: tuple[list[Json], list[list[int]], Json]) -> None:
    requests, outputs, _ = sampled
    assert len({tuple(output) for output in outputs}) == len(requests)
