"""`vllm serve` with trees, asked as any client would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.conftest import Chats, Embedded, Texts
from tests.serving.server import Server

openai = pytest.importorskip("openai")

MODEL: Any = {"model": "tiny", "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completions_are_those_of_stock_vllm_many_at_once(client: Any, texts: Texts) -> None:
    def ask(prompt: list[int]) -> str:
        return str(client.completions.create(prompt=prompt, **MODEL).choices[0].text)

    with ThreadPoolExecutor(15) as pool:
        assert list(pool.map(ask, texts.prompts)) == texts.said


def test_streams_are_the_same_text_in_pieces(client: Any, texts: Texts) -> None:
    def ask(prompt: list[int]) -> list[str]:
        stream = client.completions.create(prompt=prompt, stream=True, **MODEL)
        return [chunk.choices[0].text for chunk in stream if chunk.choices]

    with ThreadPoolExecutor(10) as pool:
        pieces = list(pool.map(ask, texts.prompts[:10]))
    assert ["".join(each) for each in pieces] == texts.said[:10]
    long = [i for i in range(10) if len(texts.outputs[i]) == 40]
    assert all(len(pieces[i]) > 3 for i in long)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_answered_as_stock_vllm_does(stream: bool, client: Any, chats: Chats) -> None:
    def ask(messages: list[dict[str, str]]) -> str:
        said = client.chat.completions.create(messages=messages, stream=stream, **MODEL)
        if not stream:
            return str(said.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in said if chunk.choices)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, chats.messages)) == chats.said


def test_a_request_may_opt_out_over_http(client: Any, server: Server, texts: Texts) -> None:
    def drafted(xargs: dict[str, Any]) -> float:
        before = server.metrics()["vllm:spec_decode_num_draft_tokens_total"]
        body = {"vllm_xargs": xargs}
        said = client.completions.create(prompt=texts.prompts[0], extra_body=body, **MODEL)
        assert said.choices[0].text == texts.said[0]
        return server.metrics()["vllm:spec_decode_num_draft_tokens_total"] - before

    assert drafted({"ddtree_method": "ar"}) == 0
    assert 0 < drafted({"ddtree_budget": 2}) < drafted({})


@pytest.mark.parametrize("xargs", [{"ddtree_method": "oak"}, {"ddtree_size": 3}])
def test_wrong_options_are_the_clients_fault(xargs: Any, client: Any, texts: Texts) -> None:
    with pytest.raises(openai.BadRequestError, match="ddtree_"):
        client.completions.create(
            prompt=texts.prompts[0], extra_body={"vllm_xargs": xargs}, **MODEL
        )


def test_metrics_have_ours_beside_vllms(client: Any, server: Server, texts: Texts) -> None:
    before = server.metrics()
    for i in (0, 2, 4):
        client.completions.create(prompt=texts.prompts[i], **MODEL)
    grown = {name: value - before.get(name, 0.0) for name, value in server.metrics().items()}
    assert grown["ddtree:rounds_total"] == grown["vllm:spec_decode_num_drafts_total"] > 0
    assert grown["ddtree:drafted_tokens_total"] > grown["ddtree:accepted_tokens_total"] > 0
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert grown["ddtree:accepted_tokens_total"] == accepted
    assert grown["ddtree:tree_nodes_sum"] == grown["ddtree:drafted_tokens_total"]


def test_trees_were_at_work(server: Server) -> None:
    record = server.call_workers("tree_record")
    assert record["branching"] > 50
    assert record["accepted_off_place"] > 50


@pytest.mark.embedded
def test_ddtree_serve_answers_as_stock_vllm_does_and_its_drafter_helps(
    embedded: Embedded, embedded_server: Server
) -> None:
    with openai.OpenAI(
        base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        model = client.models.list().data[0].id

        def ask(prompt: str) -> str:
            said = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=48,
            )
            return str(said.choices[0].message.content)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(ask, embedded.prompts)) == embedded.said
    metrics = embedded_server.metrics()
    assert metrics["ddtree:rounds_total"] > 5
    # Measured: 52 accepted tokens in 24 rounds.
    assert metrics["ddtree:accepted_tokens_total"] > 1.5 * metrics["ddtree:rounds_total"]
