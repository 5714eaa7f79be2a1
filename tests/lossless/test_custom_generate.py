"""Inside `model.generate`: same text, same processors, criteria and streamers as without us."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import (
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import BaseStreamer

import ddtree
from ddtree.errors import OptionError
from ddtree.models.drafter import DFlashDrafter
from tests.support import drafters
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_model, tiny_target
from tests.support.tokenizers import tiny_tokenizer

PROMPT = torch.tensor([[5, 17, 42, 8, 23, 11, 2]])
# The library's own names for what changes greedy decoding, one row per case.
OPTIONS = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.2, "bad_words_ids": [[7], [9, 3]], "min_new_tokens": 10},
    {"suppress_tokens": [31, 45], "begin_suppress_tokens": [4]},
    {"eos_token_id": [24, 11], "pad_token_id": 0},
    {"max_length": 20},
]


def generate(**options: object) -> torch.Tensor:
    options = {"max_new_tokens": 40, "do_sample": False, **options}
    if "max_length" in options:
        del options["max_new_tokens"]
    model = tiny_model("llama")
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)


@pytest.fixture
def drafter() -> DFlashDrafter:
    return dflash_drafter(tiny_target("llama"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree"])
def test_greedy_options_of_the_library_give_the_librarys_text(
    options: dict[str, object], method: str, drafter: DFlashDrafter
) -> None:
    expected = generate(**options)
    ours = generate(
        **options, custom_generate=ddtree.custom_generate, drafter=drafter, method=method
    )
    assert ours.tolist() == expected.tolist()
    # The other way round: a good drafter, so that options act inside accepted paths.
    script = expected[0].tolist()
    scripted = drafters.right_at_rank(lambda position: position % 2, script, VOCAB_SIZE)
    ours = generate(
        **options, custom_generate=ddtree.custom_generate, drafter=scripted, method=method
    )
    assert ours.tolist() == expected.tolist()


def test_sampling_follows_the_seed_and_not_the_method(drafter: DFlashDrafter) -> None:
    options = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.9}
    texts = {
        method: generate(
            **options,
            custom_generate=ddtree.custom_generate,
            drafter=drafter,
            method=method,
            seed=11,
        ).tolist()
        for method in ("ar", "dflash", "ddtree")
    }
    assert texts["ar"] == texts["dflash"] == texts["ddtree"]
    expected = ddtree.Pair(tiny_target("llama"), None).generate(
        PROMPT[0].tolist(),
        method="ar",
        temperature=1.2,
        top_k=20,
        top_p=0.9,
        seed=11,
        max_new_tokens=40,
    )
    assert texts["ar"][0][PROMPT.shape[1] :] == list(expected.token_ids)


def knowing(text: list[int]) -> drafters.LogitsDrafter:
    """A drafter with the target's logits along this text, and an error on top."""
    with torch.inference_mode():
        logits = tiny_model("llama")(input_ids=torch.tensor([text])).logits[0]
    logits = logits + 0.1 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return drafters.LogitsDrafter(
        lambda length, root_id, num_depths: logits[length : length + num_depths]
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampling_is_coupled_with_the_librarys_temperature_and_says_the_same_text(
    temperature: float,
) -> None:
    options = {"do_sample": True, "temperature": temperature, "seed": 7, "top_k": 0}
    options |= {"custom_generate": ddtree.custom_generate, "budget": 8, "max_new_tokens": 64}
    expected = generate(**options, method="ar")
    rounds = {}
    for coupled in (True, False):
        drafter = knowing(expected[0].tolist())
        drafts = []
        logits = drafter.logits
        drafter.logits = lambda *place, logits=logits, drafts=drafts: (
            drafts.append(place) or logits(*place)
        )
        ours = generate(**options, drafter=drafter, coupled=coupled)
        assert ours.tolist() == expected.tolist()
        assert drafter.num_perturbed == (len(drafts) if coupled else 0)
        rounds[coupled] = len(drafts)
    assert rounds[True] <= 0.8 * rounds[False], rounds


def test_greedy_generation_is_not_coupled() -> None:
    drafter = knowing(generate()[0].tolist())
    generate(custom_generate=ddtree.custom_generate, drafter=drafter)
    assert drafter.num_perturbed == 0


def test_without_a_seed_torchs_own_seed_decides(drafter: DFlashDrafter) -> None:
    options = {"do_sample": True, "custom_generate": ddtree.custom_generate, "drafter": drafter}
    torch.manual_seed(5)
    first = generate(**options).tolist()
    other = generate(**options).tolist()
    torch.manual_seed(5)
    assert generate(**options).tolist() == first
    assert other != first


class StopAfter(StoppingCriteria):
    """Stops when a token has been said; remembers every length it was asked at."""

    def __init__(self, token: int) -> None:
        self.token, self.lengths = token, []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_stopping_criteria_are_asked_at_every_token(drafter: DFlashDrafter) -> None:
    free = generate()[0].tolist()
    script = drafters.perfect(free, VOCAB_SIZE)
    criterion = StopAfter(free[20])
    ours = generate(
        custom_generate=ddtree.custom_generate,
        drafter=script,
        stopping_criteria=StoppingCriteriaList([criterion, MaxLengthCriteria(40)]),
    )
    end = free.index(free[20], PROMPT.shape[1]) + 1
    assert ours[0].tolist() == free[:end]
    assert criterion.lengths == list(range(PROMPT.shape[1] + 1, end + 1))


class Recorder(BaseStreamer):
    """Remembers what a streamer is told."""

    def __init__(self) -> None:
        self.tokens, self.ended = [], False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_every_token_and_the_end(drafter: DFlashDrafter) -> None:
    streamer = Recorder()
    ours = generate(custom_generate=ddtree.custom_generate, drafter=drafter, streamer=streamer)
    assert streamer.tokens == ours[0].tolist()
    assert streamer.ended


def test_a_text_iterator_streamer_in_a_thread_ends(
    drafter: DFlashDrafter,
) -> None:
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=generate,
        kwargs={
            "custom_generate": ddtree.custom_generate,
            "drafter": drafter,
            "streamer": streamer,
        },
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    ids = generate()[0, PROMPT.shape[1] :]
    assert text == tiny_tokenizer().decode(ids)


def test_return_dict_in_generate_is_honoured(drafter: DFlashDrafter) -> None:
    output = generate(
        custom_generate=ddtree.custom_generate, drafter=drafter, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == generate().tolist()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "input_ids"),
        ({"num_beams": 3}, "num_beams"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"budget": -1}, "budget"),
        ({"method": "magic"}, "method"),
        ({"drafter": None}, "drafter"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    options: dict[str, object], name: str, drafter: DFlashDrafter
) -> None:
    with pytest.raises(OptionError, match=name):
        generate(**{"custom_generate": ddtree.custom_generate, "drafter": drafter, **options})


def test_padding_is_refused(drafter: DFlashDrafter) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, 0] = 0
    with pytest.raises(OptionError, match="attention_mask"):
        tiny_model("llama").generate(
            PROMPT,
            attention_mask=mask,
            max_new_tokens=4,
            custom_generate=ddtree.custom_generate,
            drafter=drafter,
        )
