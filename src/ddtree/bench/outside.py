"""What transformers itself does with the target, to set our methods beside: greedy decoding only.

Its sampling draws from another stream of noise, so that at a temperature its text is another and
neither equality nor speed could be compared fairly. Its `generate` gets the very model object that
our own arms run, with its packed layers and its attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ddtree.bench.records import Arm, ArmRecord
from ddtree.errors import OptionError, PairMismatchError, UserError
from ddtree.models.loading import load_target
from ddtree.models.target import Target

# The library has no default for it; this is the value of its own documentation.
PROMPT_LOOKUP_TOKENS = 10


@dataclass(frozen=True, kw_only=True)
class Assistant:
    """A small model that drafts for transformers' assisted generation.

    Args:
        name: as the user called it.
        model: with the target's vocabulary.
    """

    name: str
    model: PreTrainedModel


def load_assistant(
    source: str, target: Target, *, say: Callable[[str], None] | None = None
) -> Assistant:
    """Load an assistant onto the target's device and in its dtype.

    Args:
        source: hub id, local folder or alias of a causal LM.
        target: whose tokenizer it must share.
        say: told what takes long.

    Raises:
        UserError: see `load_target`.
        PairMismatchError: another tokenizer.
    """
    dtype = target.dtype_name.removeprefix("torch.")
    try:
        small = load_target(source, device=str(target.device), dtype=dtype, say=say)
    except UserError as error:
        # It is loaded as any model is, but it is not what the user calls the target.
        argument = error.argument.replace("target", "assistant", 1)
        raise type(error)(
            argument, expected=error.expected, got=error.got, remedy=error.remedy
        ) from error
    ours, theirs = target.tokenizer, small.tokenizer
    if ours is None or theirs is None or ours.get_vocab() != theirs.get_vocab():
        raise PairMismatchError(
            f"assistant {source}",
            expected=f"the tokenizer of target {target.name}",
            got="none" if theirs is None else "another",
            remedy="Use a smaller model of the target's own family.",
        )
    return Assistant(name=source, model=small.model)


def run_outside(
    arm: Arm,
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    assistant: Assistant | None,
) -> ArmRecord:
    """Generate greedily with transformers, and take the time.

    Args:
        arm: of an outside method.
        target: as our own arms run it.
        prompt_ids: chat template included.
        max_new_tokens: length limit.
        assistant: of arm "assistant".

    Raises:
        OptionError: transformers refuses the method for this model.
    """
    options: dict[str, Any] = {}
    if arm.method == "prompt-lookup":
        options = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    elif arm.method == "assistant":
        assert assistant is not None, "checked before the run"
        options = {"assistant_model": assistant.model}
    with _plainly_greedy(target):
        begin = time.perf_counter()
        ids = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=target.device)
        try:
            output = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                **options,
            )
        except (ValueError, NotImplementedError) as error:
            raise OptionError(
                "methods",
                expected=f"methods that transformers has for {target.name}",
                got=f"{arm.name}: {error}",
                remedy=f"Leave {arm.method} out.",
            ) from error
        new_ids = output[0, len(prompt_ids) :].tolist()  # waits for the device
        elapsed_s = time.perf_counter() - begin
    return ArmRecord(
        arm=arm.name,
        token_ids=tuple(new_ids),
        elapsed_s=elapsed_s,
        prefill_s=None,
        rounds=(),
        node_bins=(),
    )


@contextmanager
def _plainly_greedy(target: Target) -> Iterator[None]:
    """The target without the defaults of its generation_config.json, during the block.

    A repetition penalty in it, for one, would change what greedy decoding says; ours has none.
    """
    model, stop_ids = target.model, sorted(target.eos_token_ids)
    before = model.generation_config
    # One row is never padded; an id is only wanted so that none has to be guessed.
    model.generation_config = GenerationConfig(
        eos_token_id=stop_ids or None, pad_token_id=stop_ids[0] if stop_ids else 0
    )
    try:
        yield
    finally:
        model.generation_config = before
