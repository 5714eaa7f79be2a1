"""The Python API: a target and a drafter, loaded once, that generate text.

pair = ddtree.load("smollm2-135m")
print(pair.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ddtree.budget import AutoBudget, Budget, Experience, FixedBudget
from ddtree.config import AUTO, DecodeConfig
from ddtree.costs import profile_for
from ddtree.decode import BUILDERS, Stages, decode
from ddtree.draft import Drafter
from ddtree.errors import OptionError
from ddtree.models import zoo
from ddtree.models.loading import load_drafter, load_target
from ddtree.models.target import Target
from ddtree.prompt import Prompt, check_fits, encode
from ddtree.sampling.rule import rule_for
from ddtree.stopping import TextStopping
from ddtree.text import TextStream
from ddtree.timing import Stopwatch
from ddtree.types import Generation, Method, Round


def load(
    target: str | Path | PreTrainedModel,
    drafter: str | Path | Drafter | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Pair:
    """Load a target and its drafter.

    Args:
        target: a hub id, a local folder, the alias "smollm2-135m", or a loaded causal LM.
        drafter: the same for a DFlash checkpoint, or any `Drafter`. None takes the drafter that is
            known for this target; without one, only method "ar" can be used.
        tokenizer: used in place of the target's own; needed with a loaded model to work with text.
        device: "auto" (cuda, mps, cpu in this order) or a name.
        dtype: "auto" (float32 on a CPU, else the checkpoint's) or a name.
        say: told what takes long, such as a download.

    Raises:
        UserError: see `load_target` and `load_drafter`.
    """
    loaded = load_target(target, tokenizer=tokenizer, device=device, dtype=dtype, say=say)
    source = zoo.known_drafter(loaded.name) if drafter is None else drafter
    if isinstance(source, str | Path):
        return Pair(loaded, load_drafter(source, loaded, say=say))
    if source is not None and not isinstance(source, Drafter):
        raise OptionError(
            "drafter",
            expected="a hub id, a folder, or an object with layer_ids, num_depths and start",
            got=type(source).__name__,
            remedy="Give the DFlash checkpoint itself; ddtree loads it.",
        )
    return Pair(loaded, source)


@dataclass(frozen=True)
class Pair:
    """A target and, unless only plain decoding is wanted, its drafter."""

    target: Target
    drafter: Drafter | None

    def generate(
        self,
        prompt: Prompt,
        *,
        method: Method = "ddtree",
        budget: int | Literal["auto"] = AUTO,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        raw: bool = False,
    ) -> Generation:
        """Generate one text: the target's own, whatever the method.

        Args:
            prompt: text, chat messages, or token ids.
            raw: take a text prompt as it is, without the chat template.
            method, budget, temperature, top_k, top_p, seed, max_new_tokens, stop, ignore_eos:
                see `DecodeConfig`.

        Raises:
            OptionError, PromptError, ContextLengthError: before any work.
        """
        *_, generation = self.stream(
            prompt,
            method=method,
            budget=budget,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=stop,
            ignore_eos=ignore_eos,
            raw=raw,
        )
        assert isinstance(generation, Generation)
        return generation

    def stream(
        self,
        prompt: Prompt,
        *,
        method: Method = "ddtree",
        budget: int | Literal["auto"] = AUTO,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        raw: bool = False,
    ) -> Iterator[str | Generation]:
        """As `generate`, yielding pieces of text as they come and the `Generation` at the end.

        The pieces joined are `Generation.text`. Options are checked by the call itself.
        """
        config = DecodeConfig(
            method=method,
            budget=budget,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            max_new_tokens=max_new_tokens,
            stop=_as_tuple(stop),
            ignore_eos=ignore_eos,
        )
        return self.run(prompt, config, raw=raw)

    def run(
        self,
        prompt: Prompt,
        config: DecodeConfig,
        *,
        raw: bool = False,
        observe: Callable[[Stages], Stages] | None = None,
    ) -> Iterator[str | Generation]:
        """`stream` with the options as one record.

        Args:
            prompt: see `generate`.
            config: all options.
            raw: see `generate`.
            observe: wraps the stages, to hear what passes through them; their time then includes
                the hearing.
        """
        self._check(config)
        prompt_ids = encode(prompt, self.target, raw=raw)
        check_fits(len(prompt_ids), config.max_new_tokens, self.target)
        stages = stages_for(config.method)
        return self._run(prompt_ids, config, stages if observe is None else observe(stages))

    def _run(
        self, prompt_ids: list[int], config: DecodeConfig, stages: Stages
    ) -> Iterator[str | Generation]:
        tokenizer = self.target.tokenizer
        stream = TextStream(tokenizer, config.stop) if tokenizer is not None else None
        stop_token_ids = frozenset() if config.ignore_eos else self.target.eos_token_ids
        budget = self._budget(config)  # may measure first, which is no part of the generation
        stopwatch = Stopwatch(self.target.device)
        rounds: list[Round] = []
        begin = time.perf_counter()
        for done in decode(
            self.target,
            None if config.method == "ar" else self.drafter,
            prompt_ids,
            stages=stopwatch.timed(stages),
            rule=rule_for(config),
            stopping=TextStopping(config.max_new_tokens, stop_token_ids, stream),
            budget=budget,
        ):
            rounds.append(done)
            if stream is not None and (piece := stream.take()):
                yield piece
        elapsed_s = time.perf_counter() - begin
        if stream is not None:
            stream.finish()
            if piece := stream.take():
                yield piece
        reason = rounds[-1].finish_reason
        assert reason is not None, "the last round says why it is the last"
        yield Generation(
            text=None if stream is None else stream.text,
            token_ids=tuple(token for r in rounds for token in r.token_ids),
            finish_reason=reason,
            method=config.method,
            rounds=tuple(rounds),
            spans=stopwatch.spans(),
            elapsed_s=elapsed_s,
        )

    @cached_property
    def experience(self) -> Experience:
        """What budget "auto" knows of this pair; the first access measures, if nobody has before.

        Costs measured are kept in the cache folder, by machine, versions and models.
        """
        return self._measured(None)

    def measure(self, say: Callable[[str], None] | None = None) -> None:
        """Measure now what budget "auto" must know, and not in the first generation.

        Args:
            say: told before a measurement, which takes seconds.
        """
        if "experience" not in self.__dict__:
            self.__dict__["experience"] = self._measured(say)

    def _measured(self, say: Callable[[str], None] | None) -> Experience:
        assert self.drafter is not None, "plain decoding has no budget"
        profile = profile_for(self.target, self.drafter, zoo.profiles_folder(), say=say)
        return Experience(profile, self.drafter.num_depths)

    def _budget(self, config: DecodeConfig) -> Budget:
        if config.budget != AUTO:
            return FixedBudget(config.budget)
        if self.drafter is None or config.method == "ar":
            return FixedBudget(0)
        return AutoBudget(self.experience)

    def _check(self, config: DecodeConfig) -> None:
        if self.drafter is None and config.method != "ar":
            raise OptionError(
                "drafter",
                expected=f"a drafter for method {config.method}",
                got=f"none, and none is known for {self.target.name}",
                remedy='Give a DFlash checkpoint as the drafter, or use method "ar".',
            )
        if config.stop and self.target.tokenizer is None:
            raise OptionError(
                "stop",
                expected="a tokenizer to find stop strings with",
                got="a target without one",
                remedy="Load a tokenizer with the model, or stop at token ids.",
            )


def stages_for(method: Method) -> Stages:
    """The stages of a method: they differ in the builder alone."""
    builder = BUILDERS.get(method)
    return Stages() if builder is None else Stages(build=builder)


def _as_tuple(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    # What is no sequence goes on as it is: the config refuses it by name.
    return tuple(stop) if isinstance(stop, Sequence) else stop
