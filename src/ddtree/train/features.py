"""Stage "features": what the target thinks of responses that are there already.

One pass over prompt and response gives what stage respond records while it answers, since at each
position the target has seen the same tokens. For responses that nobody recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ddtree.errors import CheckpointError, OptionError, PromptError
from ddtree.models.target import Target
from ddtree.prompt import check_fits, encode
from ddtree.train.responses import Response
from ddtree.train.samples import (
    MIN_RESPONSE_TOKENS,
    Sample,
    SampleSet,
    favourites,
    to_half,
)


def compute_samples(
    target: Target,
    responses: Sequence[Response],
    layer_ids: Sequence[int],
    *,
    done: Collection[int] = frozenset(),
    part: tuple[int, int] = (0, 1),
) -> Iterator[Sample]:
    """The sample of every response that has none yet, in order; one is in memory at a time.

    Args:
        target: with a tokenizer and a chat template.
        responses: what it said, or another model; too short ones are passed over.
        layer_ids: 0-based ids of the layers to keep the outputs of.
        done: indices of responses that have a sample.
        part: (i, n) takes every n-th of the missing ones only, from the i-th on.

    Raises:
        OptionError: a layer that the target has not.
        PromptError: no chat template, or a token that the target has not.
        ContextLengthError: a prompt and response that do not fit.
    """
    check_layers(layer_ids, target.num_layers)
    place, num_parts = part
    for response in missing(responses, done)[place::num_parts]:
        yield _sample(target, response, layer_ids)


def missing(responses: Sequence[Response], done: Collection[int]) -> list[Response]:
    """The responses that still want a sample."""
    return [r for r in responses if r.index not in done and is_trainable(r)]


def is_trainable(response: Response) -> bool:
    """Whether a drafter can learn from it."""
    return len(response.response_ids) >= MIN_RESPONSE_TOKENS


@torch.inference_mode()
def _sample(target: Target, response: Response, layer_ids: Sequence[int]) -> Sample:
    prompt_ids = encode(response.prompt, target, raw=False)
    num_new = len(response.response_ids)
    check_fits(len(prompt_ids), num_new, target)
    _check_tokens(response, target)
    token_ids = torch.tensor([*prompt_ids, *response.response_ids])
    # The last token is said, not read: nothing behind it is to be predicted.
    seen = token_ids[:-1].to(target.device)
    output = target.prefill(
        seen, target.new_cache(seen.shape[0]), capture=layer_ids, num_logits=num_new
    )
    top_ids, top_log_probs = favourites(output.logits.float())
    return Sample(
        index=response.index,
        token_ids=token_ids.to(torch.int32),
        num_prompt_tokens=len(prompt_ids),
        features=to_half(output.features).cpu(),
        top_ids=top_ids.cpu(),
        top_log_probs=top_log_probs.cpu(),
    )


def _check_tokens(response: Response, target: Target) -> None:
    highest = max(response.response_ids)
    if highest >= target.vocab_size:
        raise PromptError(
            f"response {response.index}",
            expected=f"token ids from 0 to {target.vocab_size - 1} of target {target.name}",
            got=highest,
            remedy="Give the target whose tokenizer the responses were made with.",
        )


def check_layers(layer_ids: Sequence[int], num_layers: int) -> None:
    """Refuse layers that a target has not, and one asked for twice.

    Raises:
        OptionError: names the ids that there are.
    """
    known = set(range(num_layers))
    if not layer_ids or not known.issuperset(layer_ids) or len(set(layer_ids)) < len(layer_ids):
        raise OptionError(
            "layers",
            expected=f"different layer ids from 0 to {num_layers - 1}",
            got=",".join(map(str, layer_ids)) or "none",
            remedy="They decide what the drafter sees; five, evenly spread, are usual.",
        )


def check_same_responses(samples: SampleSet, responses: Sequence[Response]) -> None:
    """Refuse samples of other responses under the same index: they would be taken for these.

    Raises:
        CheckpointError: names the first one.
    """
    wanted = {response.index: response.response_ids for response in responses}
    for index, response_ids in samples.response_ids():
        if wanted.get(index, response_ids) != response_ids:
            raise CheckpointError(
                f"sample {index}",
                expected="the response of that index in the file of responses",
                got="another one",
                remedy="Give another --out: the folder holds samples of another file.",
            )
