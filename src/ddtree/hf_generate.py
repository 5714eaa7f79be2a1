"""Draft trees inside transformers' own `model.generate`, for people who stay there.

    model.generate(**inputs, custom_generate=ddtree.custom_generate, drafter=drafter, budget=16)

The library prepares logits processors, stopping criteria and limits as always; they are applied at
every token, each with exactly the tokens before it. Greedy output equals the library's own.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ddtree.budget import FixedBudget
from ddtree.config import AUTO, DecodeConfig
from ddtree.coupled import CoupledDrafting
from ddtree.decode import Stages, decode
from ddtree.draft import Drafter
from ddtree.errors import OptionError
from ddtree.models.loading import load_drafter
from ddtree.models.target import Target
from ddtree.options import check_budget
from ddtree.pair import stages_for
from ddtree.prompt import check_fits
from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.processors import Foreign
from ddtree.sampling.rule import Greedy, Processed, Sampling, sampling_of
from ddtree.types import FinishReason, Method


def custom_generate(
    model: PreTrainedModel,
    input_ids: Int64[Tensor, "R T"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    drafter: str | Path | Drafter | None = None,
    method: Method = "ddtree",
    budget: int = 16,
    seed: int | None = None,
    coupled: bool = True,
    **model_kwargs: Any,
) -> Int64[Tensor, "R S"] | GenerateDecoderOnlyOutput:
    """A decoding method for `model.generate(..., custom_generate=ddtree.custom_generate)`.

    The library calls it with its own arguments; these are added to `generate`:

    Args:
        drafter: a checkpoint, or better a loaded one (`ddtree.load_drafter`), which is not
            read again by every call. Not needed for method "ar".
        method: "ar", "dflash" or "ddtree".
        budget: B, nodes per round besides the root; a number ("auto" is `ddtree.Pair.generate`'s).
        seed: for do_sample; None draws one from torch's generator, so `torch.manual_seed` holds.
        coupled: with do_sample, the drafter hears the noise; the text is the same either way.

    Returns:
        As `generate`: [1, S] token ids, or an output object if return_dict_in_generate is set.

    Raises:
        OptionError: more than one sequence, beams, padding, or scores asked for; a drafter that
            cannot be coupled.
    """
    _check_supported(input_ids, generation_config, model_kwargs)
    target = Target(model, None, name=model.config.name_or_path or "the model")
    if target.context_limit < model.config.max_position_embeddings:
        # A shorter limit is one beyond which a tree would be verified wrongly (LongRoPE).
        num_new = (generation_config.max_length or 0) - input_ids.shape[1]
        check_fits(input_ids.shape[1], num_new, target)
    if budget == AUTO:  # type: ignore[comparison-overlap]
        raise OptionError(
            "budget",
            expected="a whole number with custom_generate=ddtree.custom_generate",
            got=repr(budget),
            remedy="Use ddtree.load(model).generate for a budget that chooses itself.",
        )
    options = DecodeConfig(
        method=method, budget=budget, seed=0 if seed is None else seed, coupled=coupled
    )
    check_budget(0 if method == "ar" else budget, target)
    if method == "ar":
        drafter = None
    elif isinstance(drafter, str | Path):
        drafter = load_drafter(drafter, target)
    elif drafter is None:
        raise OptionError(
            "drafter",
            expected=f"a drafter for method {method}",
            got="none",
            remedy="Pass drafter=ddtree.load_drafter(...) to generate.",
        )
    if seed is None and generation_config.do_sample:
        seed = int(torch.randint(2**62, ()))
    streamer = streamer or _streamer_of_generate()
    prompt_ids = input_ids[0].tolist()
    stopping = _LibraryStopping(
        stopping_criteria, input_ids[0], generation_config.max_length, streamer
    )
    rule = _library_rule(logits_processor, seed if generation_config.do_sample else None)
    stages = stages_for(options.method)
    if coupled and drafter is not None:
        stages = _coupled(stages, rule, logits_processor, drafter.num_depths)
    for _ in decode(
        target,
        drafter,
        prompt_ids,
        stages=stages,
        rule=rule,
        stopping=stopping,
        budget=FixedBudget(budget),
    ):
        pass
    if streamer is not None:
        streamer.end()
    sequences = stopping.token_ids[None].to(input_ids.device)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _library_rule(processors: LogitsProcessorList, seed: int | None) -> Processed:
    """The library's processors, temperature among them, with our noise if it samples."""
    then = Greedy() if seed is None else Sampling(temperature=1.0, seed=seed)
    return Processed([Foreign((processors,))], then, num_prompt_tokens=0)


def _coupled(
    stages: Stages, rule: Processed, processors: LogitsProcessorList, num_depths: int
) -> Stages:
    """The same stages, coupled if the rule samples. What is learnt ends with this call."""
    sampling = sampling_of(rule)
    if sampling is None:
        return stages
    # The rule's own is 1: the library's processors have divided by theirs before.
    temperatures = [p.temperature for p in processors if isinstance(p, TemperatureLogitsWarper)]
    coupling = Coupling(
        temperature=math.prod(temperatures),
        noise=sampling.noise,
        weights=CouplingWeights(num_depths),
    )
    return CoupledDrafting(coupling).attached(stages)


@dataclass
class _LibraryStopping:
    """The library's stopping criteria and streamer, told of every token."""

    criteria: StoppingCriteriaList
    token_ids: Int64[Tensor, " T"]
    max_length: int
    streamer: BaseStreamer | None

    @property
    def room(self) -> int:
        return self.max_length - self.token_ids.shape[0]

    def push(self, token: int) -> FinishReason | None:
        new = self.token_ids.new_tensor([token])
        self.token_ids = torch.cat([self.token_ids, new])
        if self.streamer is not None:
            self.streamer.put(new.cpu())
        if self.room <= 0:
            return "length"
        return "stop" if bool(self.criteria(self.token_ids[None], None)[0]) else None


def _check_supported(
    input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    mask = model_kwargs.get("attention_mask")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    checks: tuple[tuple[bool, str, str, object], ...] = (
        (config.num_beams in (None, 1), "num_beams", "1", config.num_beams),
        (input_ids.shape[0] == 1, "input_ids", "one sequence", f"{input_ids.shape[0]} sequences"),
        (input_ids.shape[1] > 0, "input_ids", "at least one token", "an empty prompt"),
        (
            not any((config.output_scores, config.output_logits, config.output_attentions)),
            "output_scores, output_logits, output_attentions",
            "False",
            "True",
        ),
        (not config.output_hidden_states, "output_hidden_states", "False", "True"),
        (mask is None or bool((mask == 1).all()), "attention_mask", "no padding", "a padded row"),
        (cache is None or cache.get_seq_length() == 0, "cache", "an empty cache", "a filled one"),
    )
    for fine, name, expected, got in checks:
        if not fine:
            raise OptionError(
                name,
                expected=f"{expected} with custom_generate=ddtree.custom_generate",
                got=got,
                remedy="Call generate once per prompt, or leave custom_generate out.",
            )


def _streamer_of_generate() -> BaseStreamer | None:
    """The streamer given to `generate`, which transformers up to 5.24 does not pass on.

    It drops `streamer` for callables (`_extract_generation_mode_kwargs`) after telling it of the
    prompt: without this look at the calling frame, a reader of the streamer would wait forever.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        in_library = frame.f_globals.get("__name__") == "transformers.generation.utils"
        if in_library and frame.f_code.co_name == "generate":
            streamer = frame.f_locals.get("streamer")
            return streamer if isinstance(streamer, BaseStreamer) else None
        frame = frame.f_back
    return None
