"""What requests may ask for besides tokens, in one batch with trees: as stock vLLM answers it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.serving.conftest import GREEDY, Engines, Texts
from tests.serving.tiny import EOS_ID, prompts, write_oracle

Json = dict[str, Any]

_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "lazy": {"type": "boolean"}},
    "required": ["kind", "lazy"],
    "additionalProperties": False,
}
# Each is asked of two prompts. vLLM refuses min_p and logit_bias beside any speculation.
FEATURES: dict[str, Json] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "chosen logprob alone": {"logprobs": 0},
    "stop token": {"stop_token_ids": list(range(1, 40))},
    "stop string": {"stop": ["a", "e"], "include_stop_str_in_output": True},
    "ignored end": {"ignore_eos": True, "allowed_token_ids": [EOS_ID, 7, 9]},
    "repetition penalty": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    "bad words": {"bad_words": ["e", "the", " fo"]},
    "least tokens": {"min_tokens": 20, "stop_token_ids": list(range(1, 160))},
    "allowed tokens": {"allowed_token_ids": list(range(20, 60))},
    "json": {"structured_outputs": {"json": _SCHEMA}},
    "choice": {"structured_outputs": {"choice": ["quick brown fox", "quick lazy dog"]}},
    "penalties and logprobs": {"frequency_penalty": 1.1, "logprobs": 2},
}


@pytest.fixture(scope="module")
def requests() -> list[Json]:
    asked = prompts(2 * len(FEATURES), seed=3)
    features = [feature for feature in FEATURES.values() for _ in range(2)]
    return [
        {"prompt": prompt, "params": {**GREEDY, **feature}, "at": i % 5}
        for i, (prompt, feature) in enumerate(zip(asked, features, strict=True))
    ]


@pytest.fixture(scope="module")
def stock(engines: Engines, requests: list[Json]) -> list[Json]:
    """What vLLM alone says."""
    job = {"llm": engines.plain(), "batches": {"all": requests}}
    answers: list[Json] = engines.run("features_stock", job)["batches"]["all"]
    return answers


@pytest.fixture(scope="module")
def answer(engines: Engines, requests: list[Json], stock: list[Json]) -> Json:
    """What an engine with trees says, most of the truth in branches."""
    whole = [
        ("interleaved", request["prompt"] + said["token_ids"])
        for request, said in zip(requests, stock, strict=True)
    ]
    oracle = write_oracle(engines.folder / "features.oracle", whole)
    job = {
        "llm": engines.trees(),
        "env": {"DDTREE_TEST_ORACLE": str(oracle)},
        "batches": {"all": requests},
        "rpc": ["tree_record", "tree_store_size"],
    }
    return engines.run("features", job)


def _pairs(feature: str, stock: list[Json], answer: Json) -> list[tuple[Json, Json]]:
    i = 2 * list(FEATURES).index(feature)
    return list(zip(stock[i : i + 2], answer["batches"]["all"][i : i + 2], strict=True))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_request_gets_what_stock_vllm_says(feature: str, stock: list[Json], answer: Json) -> None:
    for expected, said in _pairs(feature, stock, answer):
        for key in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert said[key] == expected[key], key


@pytest.mark.parametrize("feature", [name for name, f in FEATURES.items() if "logprobs" in f])
def test_log_probs_are_those_of_the_path(feature: str, stock: list[Json], answer: Json) -> None:
    for expected, said in _pairs(feature, stock, answer):
        assert len(said["logprobs"]) == len(said["token_ids"])
        for row, expected_row in zip(said["logprobs"], expected["logprobs"], strict=True):
            assert row.keys() == expected_row.keys()
            assert all(math.isclose(row[k], expected_row[k], abs_tol=1e-3) for k in row)


def test_the_features_did_something(stock: list[Json], requests: list[Json]) -> None:
    said = dict(zip([f for f in FEATURES for _ in range(2)], stock, strict=True))
    assert said["stop token"]["finish_reason"] == "stop"
    assert said["stop string"]["finish_reason"] == "stop"
    assert EOS_ID in said["ignored end"]["token_ids"][:-1]
    assert said["least tokens"]["finish_reason"] == "stop"
    assert 20 <= len(said["least tokens"]["token_ids"]) < 40
    assert set(said["allowed tokens"]["token_ids"]) <= set(range(20, 60))
    assert json.loads(said["json"]["text"])["kind"] in ("fox", "dog")
    assert said["choice"]["text"] in ("quick brown fox", "quick lazy dog")


def test_trees_were_at_work_beside_them(answer: Json) -> None:
    record = answer["rpc"]["tree_record"][0]
    assert record["branching"] > 100
    assert record["accepted_off_place"] > 100
    assert answer["rpc"]["tree_store_size"] == [0]


def test_a_request_may_opt_out_or_ask_for_less(engines: Engines, texts: Texts) -> None:
    def asked(extra: Json) -> list[Json]:
        return [
            {**request, "params": {**request["params"], "extra_args": extra}}
            for request in texts.requests("interleaved")
        ]

    batches = {
        "as the server": asked({}),
        "of others": asked({"somebody_elses": 1}),
        "plain": asked({"ddtree_method": "ar"}),
        "zero": asked({"ddtree_budget": 0}),
        "chain": asked({"ddtree_method": "dflash"}),
        "four": asked({"ddtree_budget": 4}),
    }
    job = {
        "llm": engines.trees(),
        "env": {"DDTREE_TEST_ORACLE": str(texts.oracle)},
        "batches": batches,
    }
    answer = engines.run("opt_out", job)
    for name, answers in answer["batches"].items():
        assert texts.wrong(answers, "interleaved") == [], name
    steps, metrics = answer["steps"], answer["metrics"]
    drafted = {n: m["vllm:spec_decode_num_draft_tokens"] for n, m in metrics.items()}
    assert steps["plain"] == steps["zero"] >= max(map(len, texts.outputs))
    assert drafted["plain"] == drafted["zero"] == 0
    assert steps["of others"] == steps["as the server"] < steps["four"] < steps["plain"]
    assert drafted["four"] < drafted["as the server"]
    assert steps["as the server"] < steps["chain"] < steps["plain"]


def test_opted_out_requests_share_a_batch_with_trees(engines: Engines, texts: Texts) -> None:
    extras = [{"ddtree_method": "ar"}, {"ddtree_budget": 3}, {"ddtree_method": "dflash"}, {}]
    requests = [
        {**request, "params": {**request["params"], "extra_args": extras[i % len(extras)]}}
        for i, request in enumerate(texts.requests())
    ]
    job = {
        "llm": engines.trees(),
        "env": {"DDTREE_TEST_ORACLE": str(texts.oracle)},
        "batches": {"all": requests},
        "rpc": ["tree_record"],
    }
    answer = engines.run("mixed_methods", job)
    assert texts.wrong(answer["batches"]["all"]) == []
    assert answer["rpc"]["tree_record"][0]["accepted_off_place"] > 20
