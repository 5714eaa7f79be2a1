"""Two hundred requests at once, some of whom hang up: afterwards nothing is left of them."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from tests.serving.conftest import Texts
from tests.serving.server import Server
from tests.serving.tiny import prompts

openai = pytest.importorskip("openai")

NUM_REQUESTS = 200
NUM_CONNECTIONS = 200
LIMIT_S = 240.0

# What the requests of the crowd ask for, besides being greedy or not.
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    {"temperature": 1.0, "n": 2},
    {"logprobs": 2},
    {"stop": ["he", "Q"]},
    {"frequency_penalty": 1.0},
    {"extra_body": {"min_tokens": 20}},
    {"extra_body": {"structured_outputs": {"choice": ["quick brown fox", "lazy dog"]}}},
    {"extra_body": {"vllm_xargs": {"ddtree_method": "ar"}}},
    {"extra_body": {"vllm_xargs": {"ddtree_budget": 3}}},
    {"extra_body": {"repetition_penalty": 1.3}},
)


async def _crowd(server: Server, texts: Texts) -> tuple[int, int]:
    """How many were answered in full and how many hung up; every other answer is an error."""
    chooser = random.Random(4)
    strangers = prompts(NUM_REQUESTS, lengths=(3, 120), seed=9)
    full, gone = 0, 0
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as client:
        gate = asyncio.Semaphore(NUM_CONNECTIONS)

        async def ask(i: int, patience: float | None) -> bool:
            wish = {"temperature": 0, **WISHES[i % len(WISHES)]}
            known = texts.prompts[i % len(texts.prompts)]
            prompt = known if i % 3 else strangers[i]
            streams = i % 2 == 0

            async def said() -> None:
                answer = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=60, stream=streams, **wish
                )
                if streams:
                    async for _ in answer:
                        pass

            async with gate:
                if patience is None:
                    await said()
                    return True
                try:
                    await asyncio.wait_for(said(), patience)
                except TimeoutError:
                    return False
                return True

        impatient = [chooser.uniform(0.0, 3.0) if i % 4 == 1 else None for i in range(NUM_REQUESTS)]
        ended = await asyncio.gather(*(ask(i, p) for i, p in enumerate(impatient)))
        full, gone = sum(ended), NUM_REQUESTS - sum(ended)
    return full, gone


@pytest.fixture(scope="module")
def crowd(server: Server, texts: Texts) -> tuple[int, int]:
    before = server.metrics()["vllm:num_preemptions_total"]
    counts = asyncio.run(asyncio.wait_for(_crowd(server, texts), LIMIT_S))
    assert server.metrics()["vllm:num_preemptions_total"] > before, "there was no crowd"
    return counts


def test_every_request_is_answered_or_hangs_up(crowd: tuple[int, int]) -> None:
    full, gone = crowd
    assert full + gone == NUM_REQUESTS
    assert gone >= 10, "some requests must hang up"
    assert full >= NUM_REQUESTS * 3 // 4


def test_nothing_is_left_of_them(crowd: tuple[int, int], server: Server) -> None:
    limit = time.monotonic() + 30
    while server.call_workers("tree_store_size") != "0":
        assert time.monotonic() < limit, "requests that ended are still remembered"
        time.sleep(0.2)
    assert server.metrics()["vllm:num_requests_running"] == 0


def test_the_next_texts_are_right(crowd: tuple[int, int], server: Server, texts: Texts) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        said = [
            client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=40)
            for prompt in texts.prompts[:10]
        ]
    assert [answer.choices[0].text for answer in said] == texts.said[:10]
