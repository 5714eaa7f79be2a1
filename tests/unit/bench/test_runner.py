"""The runner: every arm on every prompt, in random order, and resumed after a stop."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ddtree.bench import runner
from ddtree.bench.arms import DEFAULT_BUDGETS, check_arms, plan_arms
from ddtree.bench.records import Arm, PromptRecord, Run, read_run
from ddtree.bench.run_bench import BenchJob, run_bench, show_disagreement
from ddtree.bench.runner import Bench, BenchConfig, TurnKey, measure, plan_prompts, warm_up
from ddtree.bench.workloads import BenchPrompt, Suite
from ddtree.config import DecodeConfig
from ddtree.errors import CheckpointError, ContextLengthError, OptionError, PromptError
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.prompt import encode
from ddtree.types import Generation
from tests.support.models import dflash_drafter, tiny_model, tiny_target
from tests.support.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def pair() -> Pair:
    target = Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    return Pair(target, dflash_drafter(target))


def suite(name: str, num_prompts: int = 2, turns: tuple[str, ...] = ("why",)) -> Suite:
    prompts = [
        BenchPrompt(id=f"{name}/{i}", turns=tuple(f"{turn} {i}" for turn in turns))
        for i in range(num_prompts)
    ]
    return Suite(name=name, source="test", prompts=tuple(prompts))


def bench(pair: Pair, methods: str = "ar,dflash,ddtree", budgets: str | None = "3", **options):
    if "ddtree" not in methods:
        budgets = None
    config = BenchConfig(**{"max_new_tokens": 6, **options})
    return Bench(pair=pair, arms=plan_arms(methods, budgets), config=config)


def measured(whole: Bench, *suites: Suite, done: tuple[PromptRecord, ...] = ()):
    plan = plan_prompts(whole, suites)
    known = {TurnKey.of(record): record for record in done}
    return list(measure(whole, plan.prompts, known, tell=lambda key, arm: None))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


# Arms.


def test_plain_decoding_is_the_first_arm_whether_it_is_named_or_not() -> None:
    for methods in ("dflash,ddtree", "dflash,ar,ddtree", "ar, dflash ,ddtree"):
        assert plan_arms(methods, "8,auto") == (
            Arm(name="ar", method="ar"),
            Arm(name="dflash", method="dflash"),
            Arm(name="ddtree-8", method="ddtree", budget=8),
            Arm(name="ddtree-auto", method="ddtree", budget="auto"),
        )


def test_trees_have_default_budgets_and_other_methods_none() -> None:
    names = [arm.name for arm in plan_arms("ddtree", None)]
    assert names == ["ar", *(f"ddtree-{budget}" for budget in DEFAULT_BUDGETS.split(","))]
    assert [arm.name for arm in plan_arms("ar,hf-generate", None)] == ["ar", "hf-generate"]


@pytest.mark.parametrize(
    ("methods", "budgets", "named"),
    [
        ("medusa", None, "methods: expected some of ar, dflash, ddtree, ddtree-no-lookup"),
        ("ar,ar", None, "each once, got 'ar,ar'"),
        ("", None, "got ''"),
        ("ar,dflash", "8", "budgets: expected no budgets without method ddtree"),
        ("ddtree", "8,8", "budgets: expected whole numbers from 1 to 4096 or auto, each once"),
        ("ddtree", "0", "got '0'"),
        ("ddtree", "4097", "got '4097'"),
        ("ddtree", "-3", "got '-3'"),
        ("ddtree", "8;16", "got '8;16'"),
        ("ddtree", "", "got ''"),
        ("ddtree", "9" * 5000, "budgets: expected whole numbers"),
    ],
)
def test_methods_and_budgets_that_are_none_are_refused(
    methods: str, budgets: str | None, named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        plan_arms(methods, budgets)


@pytest.mark.parametrize(
    ("methods", "temperatures", "assistant", "named"),
    [
        ("ar,prompt-lookup", (1.0,), None, "temperature: expected 0 among others for prompt-look"),
        ("ar,assistant", (0.0,), None, "assistant: expected a model .*, got none"),
        ("ar,dflash", (0.0,), "small", "assistant: expected .* none without it, got 'small'"),
    ],
)
def test_arms_that_could_not_run_are_refused(
    methods: str, temperatures: tuple[float, ...], assistant: str | None, named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        check_arms(plan_arms(methods, None), temperatures, assistant)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperatures": ()}, "temperature: expected one or more"),
        ({"temperatures": (1.0, 1.0)}, "temperature: expected one or more, all different"),
        ({"temperatures": (0.0, -1.0)}, "temperature: expected a finite number"),
        ({"max_new_tokens": 1}, "max_new_tokens: expected a whole number >= 2, got 1"),
        ({"seed": -1}, "seed"),
        ({"limit": 0}, "limit: expected a whole number >= 1, got 0"),
    ],
)
def test_options_outside_their_range_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        BenchConfig(**options)


# Plans.


def test_suites_take_turns_and_the_limit_is_of_each(pair: Pair) -> None:
    plan = plan_prompts(bench(pair, limit=2), [suite("b", 3), suite("a", 1), suite("c", 2)])
    found = [(each.prompt.id, each.index) for each in plan.prompts]
    assert found == [("b/0", 0), ("a/0", 0), ("c/0", 0), ("b/1", 1), ("c/1", 1)]


def test_prompts_that_do_not_fit_are_left_out_and_named(pair: Pair) -> None:
    long = BenchPrompt(id="long", turns=("word " * 200,))
    talk = BenchPrompt(id="talk", turns=("hello",) * 9)  # its answers alone would be too long
    fine = suite("s", 3).prompts
    mixed = Suite(name="s", source="test", prompts=(fine[0], long, talk, fine[1], fine[2]))
    plan = plan_prompts(bench(pair, max_new_tokens=40, limit=2), [mixed])
    assert plan.left_out == {"s": ("long", "talk")}
    assert [(each.prompt.id, each.index) for each in plan.prompts] == [("s/0", 0), ("s/1", 1)]
    with pytest.raises(ContextLengthError, match="suite s: expected prompts that fit"):
        plan_prompts(bench(pair), [Suite(name="s", source="test", prompts=(long,))])


def test_what_no_arm_could_do_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "prefill", lambda *args, **options: pytest.fail("work was done"))
    plain = Pair(Target(tiny_model("llama"), tiny_tokenizer(), name="tiny"), None)
    with pytest.raises(OptionError, match="drafter: expected a drafter for method dflash"):
        plan_prompts(bench(plain), [suite("a")])
    silent = Pair(tiny_target("llama"), None)
    with pytest.raises(PromptError, match="the target has no tokenizer"):
        plan_prompts(bench(silent, "ar"), [suite("a")])


# Measuring.


def test_every_arm_says_what_plain_decoding_says(pair: Pair) -> None:
    whole = bench(pair, "dflash,ddtree,prompt-lookup,hf-generate", "3,auto", limit=1)
    (record,) = measured(whole, suite("a"))
    names = ["ar", "dflash", "ddtree-3", "ddtree-auto", "prompt-lookup", "hf-generate"]
    assert [arm.arm for arm in record.arms] == names
    assert sorted(record.order) == sorted(names)
    expected = pair.generate("why 0", method="ar", max_new_tokens=6)
    assert {arm.token_ids for arm in record.arms} == {expected.token_ids}
    assert record.disagreeing == ()
    assert record.num_prompt_tokens == len(encode("why 0", pair.target, raw=False))
    assert all(arm.elapsed_s > 0 for arm in record.arms)
    assert {arm.arm: arm.prefill_s is None for arm in record.arms} == {
        name: name in ("prompt-lookup", "hf-generate") for name in names
    }
    nodes = {arm.arm: max((r.nodes for r in arm.rounds), default=None) for arm in record.arms}
    assert (nodes["ar"], nodes["ddtree-3"], nodes["hf-generate"]) == (0, 3, None)
    assert nodes["dflash"] == 4  # of 7 depths, no more than the five tokens that are left allow


def test_sampled_arms_agree_and_outside_arms_stay_out(pair: Pair) -> None:
    whole = bench(pair, "dflash,hf-generate", temperatures=(0.0, 1.0), limit=1, seed=3)
    greedy, sampled = measured(whole, suite("a"))
    assert [arm.arm for arm in greedy.arms] == ["ar", "dflash", "hf-generate"]
    assert [arm.arm for arm in sampled.arms] == ["ar", "dflash"]
    assert greedy.temperature == 0
    said = pair.generate("why 0", method="ar", temperature=1.0, seed=3, max_new_tokens=6)
    assert {arm.token_ids for arm in sampled.arms} == {said.token_ids}
    assert said.token_ids != greedy.arms[0].token_ids


def test_the_order_of_arms_is_random_by_seed_and_turn_and_the_same_again(pair: Pair) -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        whole = bench(pair, budgets="2,3,4,5", seed=seed, max_new_tokens=2)
        return [record.order for record in measured(whole, suite("a", 2), suite("b", 1))]

    first = orders(0)
    assert first == orders(0)
    assert len(set(first)) == 3
    assert first != orders(1)


def test_the_answer_of_plain_decoding_is_in_every_arms_next_prompt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    original = runner.generate

    def listen(pair: Pair, prompt_ids: list[int], config: DecodeConfig) -> Generation:
        asked.append(prompt_ids)
        return original(pair, prompt_ids, config)

    monkeypatch.setattr(runner, "generate", listen)
    whole = bench(pair, temperatures=(0.0, 1.0), limit=1)
    records = measured(whole, suite("a", turns=("why", "and")))
    assert [(r.turn, r.temperature) for r in records] == [(0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)]
    for place, temperature in ((0, 0.0), (2, 1.0)):
        answer = pair.generate("why 0", method="ar", temperature=temperature, max_new_tokens=6)
        talk = [
            {"role": "user", "content": "why 0"},
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "and 0"},
        ]
        expected = encode(talk, pair.target, raw=False)
        assert asked[3 * place + 3 : 3 * place + 6] == [expected] * 3
        assert records[place + 1].num_prompt_tokens == len(expected)


def test_a_conversation_goes_on_where_it_was_stopped(pair: Pair) -> None:
    whole, talks = bench(pair, limit=1), suite("a", turns=("why", "and", "so"))
    records = measured(whole, talks)
    (last,) = measured(whole, talks, done=tuple(records[:2]))
    assert (last.turn, last.order) == (2, records[2].order)
    assert last.num_prompt_tokens == records[2].num_prompt_tokens
    assert last.arms[0].token_ids == records[2].arms[0].token_ids


def test_every_arm_is_warm_before_anything_is_measured(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, float, int]] = []
    original = runner._run_arm

    def listen(whole: Bench, arm: Arm, ids: list[int], temperature: float, limit: int) -> object:
        ran.append((arm.name, temperature, limit))
        return original(whole, arm, ids, temperature, limit)

    monkeypatch.setattr(runner, "_run_arm", listen)
    whole = bench(pair, "dflash,hf-generate", temperatures=(0.0, 1.0), max_new_tokens=10)
    warm_up(whole, plan_prompts(whole, [suite("a")]).prompts[0])
    greedy = [(name, 0.0, 8) for name in ("ar", "dflash", "hf-generate")]
    assert ran == [*greedy, ("ar", 1.0, 8), ("dflash", 1.0, 8)]


# Whole runs.


def job(pair: Pair, out: Path, *suites: Suite, **options: object) -> BenchJob:
    whole = bench(pair, **{"budgets": "3,auto", **options})
    return BenchJob(bench=whole, suites=suites or (suite("a"), suite("b")), out=out)


def measured_ids(out: Path) -> list[str]:
    lines = (out / "measured.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line)["id"] for line in lines]


def test_a_run_leaves_results_that_can_be_read_with_a_card_that_says_all(
    pair: Pair, tmp_path: Path
) -> None:
    run = run_bench(job(pair, tmp_path, limit=1, seed=5), quiet())
    again = read_run(tmp_path)
    assert again.as_json() == run.as_json()
    assert [record.id for record in again.prompts] == ["a/0", "b/0"]
    card = again.card
    for key in ("command", "commit", "versions", "machine", "date"):
        assert key in card
    assert (card["target"], card["drafter"], card["dtype"]) == ("tiny", "random", "float32")
    assert (card["device"], card["seed"]) == ("cpu", 5)
    assert card["options"]["budgets"] == [3, "auto"]
    assert card["suites"]["a"] == {
        "source": "test",
        "num_prompts": 1,
        "sha256": suite("a").sha256,
        "left_out": [],
    }
    assert card["cost_profile"] == json.loads(
        json.dumps(dataclasses.asdict(pair.experience.profile))
    )
    assert len(card["sessions"]) == 1


def test_without_a_drafting_arm_there_is_no_cost_profile(tmp_path: Path) -> None:
    plain = Pair(Target(tiny_model("llama"), tiny_tokenizer(), name="tiny"), None)
    run = run_bench(job(plain, tmp_path, methods="ar,hf-generate", limit=1), quiet())
    assert (run.card["cost_profile"], run.card["drafter"]) == (None, None)


def stop_after(num_generations: int, whole: BenchJob) -> None:
    """Run a job that is stopped before it generates once more."""
    original, left = runner._run_arm, [num_generations]

    def stopping(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_run_arm", stopping)
        patch.setattr("ddtree.bench.run_bench.warm_up", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            run_bench(whole, quiet())


def test_a_run_that_is_stopped_anywhere_goes_on_to_the_results_of_an_unbroken_one(
    pair: Pair, tmp_path: Path
) -> None:
    stopped = job(pair, tmp_path / "x", max_new_tokens=3)
    lines = tmp_path / "x" / "measured.jsonl"
    # Before anything, between two prompts, within one, and in the middle of a line.
    for num_generations, expected in [(0, 0), (4, 1), (7, 2), (3, 2)]:
        stop_after(num_generations, stopped)
        assert measured_ids(tmp_path / "x") == ["a/0", "b/0", "a/1"][:expected]
        lines.write_text(lines.read_text() + '{"suite": "a", "id"')
    assert not (tmp_path / "x" / "results.json").exists()
    resumed = run_bench(stopped, quiet())
    unbroken = run_bench(job(pair, tmp_path / "y", max_new_tokens=3), quiet())
    assert list(map(timeless, resumed.prompts)) == list(map(timeless, unbroken.prompts))
    assert [record.id for record in resumed.prompts] == ["a/0", "b/0", "a/1", "b/1"]
    assert len(resumed.card["sessions"]) == 5


def timeless(record: PromptRecord) -> object:
    arms = [(arm.arm, arm.token_ids) for arm in record.arms]
    return (TurnKey.of(record), record.index, record.order, arms)


def test_the_limit_may_be_raised_and_lowered_in_the_same_folder(pair: Pair, tmp_path: Path) -> None:
    many = (suite("a", 3), suite("b", 1))

    def results(limit: int | None) -> list[str]:
        few = {"methods": "ar", "max_new_tokens": 2}
        run_bench(job(pair, tmp_path, *many, limit=limit, **few), quiet())
        return [record.id for record in read_run(tmp_path).prompts]

    assert results(2) == ["a/0", "b/0", "a/1"]
    before = measured_ids(tmp_path)
    assert results(None) == ["a/0", "b/0", "a/1", "a/2"]
    assert measured_ids(tmp_path) == [*before, "a/2"]
    assert results(1) == ["a/0", "b/0"]
    assert measured_ids(tmp_path) == [*before, "a/2"]
    assert len(read_run(tmp_path).card["sessions"]) == 2  # the last one measured nothing


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"max_new_tokens": 7}, "max_new_tokens"),
        ({"temperatures": (0.0, 1.0)}, "temperatures"),
        ({"budgets": "3"}, "arms"),
        ({"methods": "ar,dflash"}, "arms"),
    ],
)
def test_the_folder_of_another_run_is_refused_by_what_changed(
    changes: dict[str, object], named: str, pair: Pair, tmp_path: Path
) -> None:
    stop_after(0, job(pair, tmp_path, limit=1))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=rf"other values of {named}\. .* in bench\.json"):
        run_bench(job(pair, tmp_path, **{"limit": 1, **changes}), quiet())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_other_prompts_another_drafter_or_machine_is_another_run(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(0, job(pair, tmp_path, limit=1))
    with pytest.raises(CheckpointError, match="other values of suites"):
        run_bench(job(pair, tmp_path, suite("a", 3), suite("b"), limit=1), quiet())
    other = Pair(pair.target, dflash_drafter(pair.target, seed=1))
    with pytest.raises(CheckpointError, match="other values of drafter"):
        run_bench(job(other, tmp_path, limit=1), quiet())
    monkeypatch.setattr("ddtree.provenance._machine", lambda: "another")
    with pytest.raises(CheckpointError, match="other values of machine"):
        run_bench(job(pair, tmp_path, limit=1), quiet())


def test_a_drafter_is_told_apart_by_weights_that_are_packed(pair: Pair, tmp_path: Path) -> None:
    def packed(shift: float) -> Pair:
        drafter = dflash_drafter(pair.target)
        with torch.no_grad():
            drafter.network.fc.weight.add_(shift)
        drafter.pack()
        return Pair(pair.target, drafter)

    stop_after(0, job(packed(0.0), tmp_path, limit=1))
    stop_after(0, job(packed(0.0), tmp_path, limit=1))
    with pytest.raises(CheckpointError, match="other values of drafter"):
        run_bench(job(packed(0.1), tmp_path, limit=1), quiet())


def test_what_was_left_out_is_said(pair: Pair, tmp_path: Path) -> None:
    console = quiet()
    long = BenchPrompt(id="long", turns=("word " * 200,))
    mixed = Suite(name="a", source="test", prompts=(long, *suite("a").prompts))
    run = run_bench(job(pair, tmp_path, mixed, limit=1, methods="ar"), console)
    assert "a: left out 1 prompts too long for the context: long" in console.file.getvalue()
    assert run.card["suites"]["a"]["left_out"] == ["long"]


# Agreement.


@pytest.fixture
def run(pair: Pair, tmp_path: Path) -> Run:
    return run_bench(job(pair, tmp_path, methods="ar,dflash", limit=2), quiet())


def said(run: Run, *, exact: bool) -> str:
    console = quiet()
    show_disagreement(run, console, exact=exact)
    return console.file.getvalue()


def broken(run: Run) -> Iterator[PromptRecord]:
    """The same, but the chain said one token less on the second prompt and on the third."""
    for place, record in enumerate(run.prompts):
        plain, chain = record.arms
        if place in (1, 2):
            chain = dataclasses.replace(chain, token_ids=chain.token_ids[:-1])
        yield dataclasses.replace(record, arms=(plain, chain))


def test_of_agreement_nothing_is_said(run: Run) -> None:
    assert said(run, exact=True) == ""


@pytest.mark.parametrize(
    ("exact", "begin"), [(True, "FAILED: arms"), (False, "Rounding in float32: arms")]
)
def test_disagreement_is_counted_and_located(run: Run, exact: bool, begin: str) -> None:
    wrong = dataclasses.replace(run, prompts=tuple(broken(run)))
    first, second, third = said(wrong, exact=exact).strip().split("\n")
    assert first == f"{begin} differ from ar on 2 of 4 turns: dflash 2."
    assert second == "  b b/0, turn 0, temperature 0: dflash at new token 5"
    assert third.startswith("  a a/1, turn 0")
