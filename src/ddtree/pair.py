"""The Python API: a target and a drafter, loaded once, that generate text.

pair = ddtree.load("smollm2-135m")
print(pair.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ddtree.budget import AutoBudget, Budget, Experience, FixedBudget
from ddtree.config import AUTO, DecodeConfig
from ddtree.costs import profile_for
from ddtree.coupled import CoupledDrafting, Draft
from ddtree.decode import BUILDERS, Stages, decode
from ddtree.draft import Drafter, draft
from ddtree.errors import OptionError
from ddtree.legal import LegalDrafting
from ddtree.logprobs import LogprobRecorder
from ddtree.lookup import LookupDrafting
from ddtree.models import zoo
from ddtree.models.loading import load_drafter, load_target
from ddtree.models.target import Target
from ddtree.options import as_json, as_pairs, as_tuple, as_tuples, check_options
from ddtree.prompt import Prompt, check_fits, encode
from ddtree.sampling.coupling import Coupling, CouplingWeights
from ddtree.sampling.grammar import Grammar, Grammars
from ddtree.sampling.legality import legality_of
from ddtree.sampling.lookup import Guessing, new_weights
from ddtree.sampling.mixture import MixtureWeights
from ddtree.sampling.processors import LogitsProcessor, words_as_tokens
from ddtree.sampling.rule import Rule, rule_for, sampling_of
from ddtree.stopping import TextStopping
from ddtree.text import TextStream
from ddtree.timing import Stopwatch
from ddtree.types import Generation, Method, Round
from ddtree.untested import check_first_text


def load(
    target: str | Path | PreTrainedModel,
    drafter: str | Path | Drafter | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str = "auto",
    dtype: str = "auto",
    allow_untested: bool = False,
    say: Callable[[str], None] | None = None,
) -> Pair:
    """Load a target and its drafter.

    Args:
        target: a hub id, a local folder, the alias "smollm2-135m", or a loaded causal LM.
        drafter: the same for a drafter, or any `Drafter`. None takes the drafter that is
            known for this target; without one, only method "ar" can be used.
        tokenizer: used in place of the target's own; needed with a loaded model to work with text.
        device: "auto" (cuda, mps, cpu in this order) or a name.
        dtype: "auto" (float32 on a CPU, else the checkpoint's) or a name, see `load_target`.
        allow_untested: let in a target of an architecture that is not in the table, see
            `load_target`; the first text is held against plain decoding.
        say: told what takes long, such as a download.

    Raises:
        UserError: see `load_target` and `load_drafter`.
    """
    loaded = load_target(
        target,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        allow_untested=allow_untested,
        say=say,
    )
    source = zoo.known_drafter(loaded.name) if drafter is None else drafter
    if isinstance(source, str | Path):
        return Pair(loaded, load_drafter(source, loaded, say=say))
    if source is not None and not isinstance(source, Drafter):
        raise OptionError(
            "drafter",
            expected="a hub id, a folder, or an object with layer_ids, num_depths and start",
            got=type(source).__name__,
            remedy="Give the drafter's checkpoint itself; ddtree loads it.",
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
        min_p: float | None = None,
        typical_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[str] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        suppress_tokens: Sequence[int] = (),
        min_new_tokens: int = 0,
        json_schema: str | Mapping[str, object] | None = None,
        regex: str | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        logprobs: int | None = None,
        seed: int = 0,
        coupled: bool = True,
        lookup: bool = True,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        raw: bool = False,
    ) -> Generation:
        """Generate one text: the target's own, whatever the method.

        Args:
            prompt: text, chat messages, or token ids.
            raw: take a text prompt as it is, without the chat template.
            logits_processor: called at every token with all token ids so far [1, T] and the scores
                [1, V], behind the penalties and bans and before temperature: transformers'
                `LogitsProcessor`s, or functions like them. They see drafted tokens only where the
                target said the same.
            logit_bias: numbers to add to logits, by token id.
            json_schema: what the text is held to, as JSON or what JSON would give; needs the extra
                "grammar".
            method, budget, temperature, top_k, top_p, min_p, typical_p, repetition_penalty,
                presence_penalty, frequency_penalty, bad_words, bad_words_ids, suppress_tokens,
                min_new_tokens, regex, logprobs, seed, coupled, lookup, max_new_tokens, stop,
                ignore_eos:
                see `DecodeConfig`.

        Raises:
            OptionError, PromptError, ContextLengthError: before any work; OptionError also where
                what was banned leaves no token.
        """
        *_, generation = self.stream(
            prompt,
            method=method,
            budget=budget,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            bad_words=bad_words,
            bad_words_ids=bad_words_ids,
            suppress_tokens=suppress_tokens,
            min_new_tokens=min_new_tokens,
            json_schema=json_schema,
            regex=regex,
            logits_processor=logits_processor,
            logprobs=logprobs,
            seed=seed,
            coupled=coupled,
            lookup=lookup,
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
        min_p: float | None = None,
        typical_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[str] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
        suppress_tokens: Sequence[int] = (),
        min_new_tokens: int = 0,
        json_schema: str | Mapping[str, object] | None = None,
        regex: str | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        logprobs: int | None = None,
        seed: int = 0,
        coupled: bool = True,
        lookup: bool = True,
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
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=as_pairs(logit_bias),
            bad_words=as_tuple(bad_words),
            bad_words_ids=as_tuples(bad_words_ids),
            suppress_tokens=as_tuple(suppress_tokens),
            min_new_tokens=min_new_tokens,
            json_schema=as_json(json_schema),
            regex=regex,
            logprobs=logprobs,
            seed=seed,
            coupled=coupled,
            lookup=lookup,
            max_new_tokens=max_new_tokens,
            stop=as_tuple(stop),
            ignore_eos=ignore_eos,
        )
        return self.run(prompt, config, raw=raw, logits_processor=logits_processor)

    def run(
        self,
        prompt: Prompt,
        config: DecodeConfig,
        *,
        raw: bool = False,
        logits_processor: Sequence[LogitsProcessor] = (),
        observe: Callable[[Stages], Stages] | None = None,
    ) -> Iterator[str | Generation]:
        """`stream` with the options as one record.

        Args:
            prompt: see `generate`.
            config: all options.
            raw: see `generate`.
            logits_processor: see `generate`.
            observe: wraps the stages, to hear what passes through them; their time then includes
                the hearing.
        """
        check_options(config, self.target, self.drafter)
        prompt_ids = encode(prompt, self.target, raw=raw)
        check_fits(len(prompt_ids), config.max_new_tokens, self.target)
        rule = self.rule(config, len(prompt_ids), logits_processor)
        stages = self._stages(config, rule)
        observed = stages if observe is None else observe(stages)
        pieces = self._run(prompt_ids, config, rule, observed)
        if not self.target.untested or config.method == "ar":
            return pieces
        return self._checked(pieces, prompt_ids, config, logits_processor)

    def _checked(
        self,
        pieces: Iterator[str | Generation],
        prompt_ids: list[int],
        config: DecodeConfig,
        logits_processor: Sequence[LogitsProcessor],
    ) -> Iterator[str | Generation]:
        """The first text of a target that is not in the table, held against plain decoding."""
        for item in pieces:
            if isinstance(item, Generation):
                plain = replace(config, method="ar")
                *_, expected = self.run(prompt_ids, plain, logits_processor=logits_processor)
                assert isinstance(expected, Generation)
                rule = self.rule(config, len(prompt_ids), logits_processor)
                check_first_text(self.target, rule, prompt_ids, drafted=item, plain=expected)
                self.target.untested = False
            yield item

    def rule(
        self,
        config: DecodeConfig,
        num_prompt_tokens: int,
        logits_processor: Sequence[LogitsProcessor] = (),
    ) -> Rule:
        """The decoding rule of one generation with these options, which `run` has checked.

        Args:
            config: all options.
            num_prompt_tokens: of the prompt of this generation.
            logits_processor: see `generate`.
        """
        if config.bad_words:
            assert self.target.tokenizer is not None
            words = words_as_tokens(config.bad_words, self.target.tokenizer)
            config = replace(config, bad_words=(), bad_words_ids=(*config.bad_words_ids, *words))
        return rule_for(
            config,
            num_prompt_tokens=num_prompt_tokens,
            stop_token_ids=self._stop_token_ids(config),
            device=self.target.device,
            logits_processor=logits_processor,
            grammar=self._grammar(config),
        )

    def _grammar(self, config: DecodeConfig) -> Grammar | None:
        if config.json_schema is None and config.regex is None:
            return None
        return self._grammars.of(config)

    @cached_property
    def _grammars(self) -> Grammars:
        target = self.target
        return Grammars(target.tokenizer, target.vocab_size, target.eos_token_ids)

    def _run(
        self, prompt_ids: list[int], config: DecodeConfig, rule: Rule, stages: Stages
    ) -> Iterator[str | Generation]:
        tokenizer = self.target.tokenizer
        stream = TextStream(tokenizer, config.stop) if tokenizer is not None else None
        recorder = None if config.logprobs is None else LogprobRecorder(config.logprobs)
        stages = stages if recorder is None else recorder.listening(stages)
        stopping = TextStopping(config.max_new_tokens, self._stop_token_ids(config), stream)
        budget = self._budget(config)  # may measure first, which is no part of the generation
        stopwatch = Stopwatch(self.target.device)
        rounds: list[Round] = []
        begin = time.perf_counter()
        for done in decode(
            self.target,
            None if config.method == "ar" else self.drafter,
            prompt_ids,
            stages=stopwatch.timed(stages),
            rule=rule,
            stopping=stopping,
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
            logprobs=None if recorder is None else recorder.found,
        )

    @cached_property
    def coupling_weights(self) -> CouplingWeights:
        """What coupled drafting has learnt of this pair; outlives a generation."""
        assert self.drafter is not None, "there is nothing to couple"
        return CouplingWeights(self.drafter.num_depths)

    def _stages(self, config: DecodeConfig, rule: Rule) -> Stages:
        stages = stages_for(config.method)
        if config.method == "ar":
            return stages
        ask: Draft = draft
        legality = legality_of(rule, self.target.vocab_size)
        legal = None if legality is None else LegalDrafting(legality, config.method)
        if legal is not None:
            stages, ask = replace(stages, draft=legal.ask), legal.ask
        sampling = sampling_of(rule)
        if config.coupled and sampling is not None:
            coupling = Coupling(
                temperature=sampling.temperature,
                noise=sampling.noise,
                weights=self.coupling_weights,
            )
            stages = CoupledDrafting(coupling, ask).attached(stages)
        if config.lookup and config.method == "ddtree":
            stages = LookupDrafting(Guessing(self.lookup_weights(config))).attached(stages)
        return stages if legal is None else legal.attached(stages)

    def lookup_weights(self, config: DecodeConfig) -> MixtureWeights:
        """What the text's own repetitions are worth in drafts of this kind; outlives a generation.

        Args:
            config: tells the kind: texts of one temperature repeat themselves alike.
        """
        return self._lookup_weights.setdefault(_kind_of(config), new_weights())

    @cached_property
    def _lookup_weights(self) -> dict[tuple[float, bool], MixtureWeights]:
        return {}

    @cached_property
    def experience(self) -> Experience:
        """What budget "auto" knows of this pair, greedy; the first access measures, if nobody has.

        Costs measured are kept in the cache folder, by machine, versions and models.
        """
        return self._measured(None)

    @cached_property
    def _experiences(self) -> dict[tuple[float, bool], Experience]:
        """The same for each temperature above 0 and for text in a grammar: a drafter is worth more
        or less there, and otherwise."""
        return {}

    def _experience_of(self, config: DecodeConfig) -> Experience:
        greedy = self.experience
        kind = _kind_of(config)
        if kind == (0, False):
            return greedy
        assert self.drafter is not None, "plain decoding has no budget"
        if kind not in self._experiences:
            self._experiences[kind] = Experience(greedy.profile, self.drafter.num_depths)
        return self._experiences[kind]

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
        return AutoBudget(self._experience_of(config))

    def _stop_token_ids(self, config: DecodeConfig) -> frozenset[int]:
        return frozenset() if config.ignore_eos else self.target.eos_token_ids


def _kind_of(config: DecodeConfig) -> tuple[float, bool]:
    """Texts of one kind are drafted alike: by temperature, and in a grammar or not."""
    return config.temperature, config.json_schema is not None or config.regex is not None


def stages_for(method: Method) -> Stages:
    """The stages of a method: they differ in the builder alone."""
    builder = BUILDERS.get(method)
    return Stages() if builder is None else Stages(build=builder)
