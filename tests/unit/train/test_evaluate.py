"""The stage "evaluate": drafters whose worth is known are found to be worth just that."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from ddtree.draft import Drafter
from ddtree.errors import (
    BackendError,
    CacheWriteError,
    CheckpointError,
    ContextLengthError,
    OptionError,
    PromptError,
)
from ddtree.host_marginals import HostMarginals
from ddtree.models.target import Target, TargetOutput
from ddtree.overhear import OverheardDrafter, Proposal, propose_along
from ddtree.pair import Pair
from ddtree.prompt import encode
from ddtree.train.accuracy import count_bins, count_hits
from ddtree.train.evaluate import (
    EvaluateConfig,
    PromptResult,
    SuitePrompt,
    evaluate,
    read_suites,
)
from ddtree.train.evaluation import Evaluation, summarise
from ddtree.train.run_evaluate import EvaluateJob, parse_budgets, run_evaluate
from tests.support.disk import fill_disk
from tests.support.drafters import ScriptedDrafter, hostile, right_at_rank, right_for
from tests.support.models import VOCAB_SIZE, dflash_drafter, tiny_model
from tests.support.tokenizers import tiny_tokenizer

PROMPT = SuitePrompt(suite="test", index=0, prompt="the quick brown fox")
L = 7
B = L + 1
LENGTH = 1 + 2 * B


def target() -> Target:
    return Target(tiny_model("llama"), tiny_tokenizer(), name="tiny")


def prompt_ids() -> list[int]:
    return encode(PROMPT.prompt, target(), raw=False)


def script(num_tokens: int = LENGTH) -> list[int]:
    """Prompt and greedy response."""
    alone = Pair(target(), None).generate(
        PROMPT.prompt, method="ar", max_new_tokens=num_tokens, ignore_eos=True
    )
    return [*prompt_ids(), *alone.token_ids]


def measure(drafter: Drafter, **options: object) -> PromptResult:
    config = EvaluateConfig(**{"budgets": (8,), "max_new_tokens": LENGTH, **options})
    (result,) = evaluate(Pair(target(), drafter), [PROMPT], config)
    return result


def sure(truth: Sequence[int]) -> ScriptedDrafter:
    """Right at every depth, and names no other token: its trees are chains."""
    return ScriptedDrafter(lambda p: [truth[p] if p < len(truth) else 0], num_depths=L)


# Accuracy and tau.


def test_a_perfect_drafter_is_right_at_all_depths_and_has_tau_b() -> None:
    result = measure(sure(script()), budgets=(8, 16))
    evaluation = summarise([result], ["test"])
    assert evaluation.agree
    assert evaluation.arms == ("chain", "8", "16")
    assert evaluation.taus == (B, B, B)
    for accuracy in (evaluation.along, evaluation.in_rounds, evaluation.suites[0].along):
        assert accuracy.top_1 == accuracy.top_5 == accuracy.top_16 == (1.0,) * L
    assert result.in_rounds.num_positions == (2,) * L
    # The first root is the prefill's token; depth k of a root ends k positions before the text.
    assert result.along.num_positions == tuple(LENGTH - k for k in range(1, B))


def test_the_last_round_of_a_perfect_drafter_ends_with_the_text() -> None:
    result = measure(sure(script(LENGTH + 3)), max_new_tokens=LENGTH + 3)
    assert [arm.accepted for arm in result.arms] == [(L, L, 2)] * 2
    assert result.arms[0].num_tokens == LENGTH + 2
    assert result.in_rounds.num_positions == (3, 3, 2, 2, 2, 2, 2)


def test_a_hostile_drafter_is_never_right_and_has_tau_1() -> None:
    evaluation = summarise([measure(hostile(script(), VOCAB_SIZE))], ["test"])
    assert evaluation.agree
    assert evaluation.taus == (1.0, 1.0)
    for accuracy in (evaluation.along, evaluation.in_rounds):
        assert accuracy.top_1 == accuracy.top_5 == accuracy.top_16 == (0.0,) * L


@pytest.mark.parametrize(("rank", "found"), [(0, (1, 1, 1)), (3, (0, 1, 1)), (10, (0, 0, 1))])
def test_a_drafter_right_at_a_rank_is_found_at_that_rank(
    rank: int, found: tuple[float, ...]
) -> None:
    drafter = right_at_rank(lambda p: rank, script(), VOCAB_SIZE)
    evaluation = summarise([measure(drafter)], ["test"])
    for accuracy in (evaluation.along, evaluation.in_rounds):
        assert (accuracy.top_1, accuracy.top_5, accuracy.top_16) == tuple((s,) * L for s in found)


@pytest.mark.parametrize("k", [1, 3, L - 1])
def test_rounds_flatter_a_drafter_that_recovers_where_they_start(k: int) -> None:
    length = 1 + 4 * (k + 1)
    drafter = right_for(k, script(length), VOCAB_SIZE, len(prompt_ids()))
    result = measure(drafter, max_new_tokens=length)
    chain = result.arms[0]
    assert chain.accepted == (k,) * 4
    evaluation = summarise([result], ["test"])
    assert evaluation.taus[0] == k + 1
    assert evaluation.in_rounds.top_1[: k + 1] == (1.0,) * k + (0.0,)
    # Along the response one root in k + 1 stands before the wrong position, at every depth.
    num_roots = 4 * (k + 1)
    assert result.along.num_hits[0][0] == num_roots - 4
    assert evaluation.along.top_1[0] == pytest.approx(k / (k + 1))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=str)
def test_tau_is_that_of_the_decoder_and_all_arms_agree(options: dict[str, float]) -> None:
    drafter = dflash_drafter(target())
    options = {"max_new_tokens": 10, **options}
    result = measure(drafter, **options)
    assert summarise([result], ["test"]).agree
    for arm, method in zip(result.arms, ("dflash", "ddtree"), strict=True):
        alone = Pair(target(), drafter).generate(PROMPT.prompt, method=method, budget=8, **options)
        assert alone.token_ids == result.token_ids
        assert arm.num_rounds == alone.num_rounds
        assert arm.num_tokens / arm.num_rounds == alone.acceptance_length


def test_what_is_proposed_along_the_text_is_what_the_rounds_proposed() -> None:
    drafter = dflash_drafter(target())
    heard = OverheardDrafter(drafter)
    said = Pair(target(), heard).generate(
        PROMPT.prompt, budget=16, method="dflash", max_new_tokens=12
    )
    text = [*prompt_ids(), *said.token_ids]
    features = torch.cat(heard.features)
    with torch.inference_mode():
        cache = target().new_cache(len(text))
        once = target().prefill(torch.tensor(text[:-1]), cache, capture=drafter.layer_ids)
    torch.testing.assert_close(features, once.features, atol=1e-4, rtol=1e-3)
    along = {
        p.root: p.marginals
        for p in propose_along(drafter, features, text, len(prompt_ids()), num_ranks=16)
    }
    assert list(along) == list(range(len(prompt_ids()), len(text) - 1))
    assert len(heard.proposals) > 3
    for proposal in heard.proposals:
        ours, theirs = along[proposal.root], proposal.marginals
        depths = min(len(ours.log_probs), len(theirs.log_probs))
        np.testing.assert_allclose(ours.log_probs[:depths], theirs.log_probs[:depths], atol=1e-4)
        np.testing.assert_array_equal(ours.token_ids[:depths, 0], theirs.token_ids[:depths, 0])


# Calibration.


def proposal(root: int, probabilities: Sequence[float], token_ids: Sequence[int]) -> Proposal:
    log_probs = np.log(np.array([probabilities], np.float32))
    return Proposal(root, HostMarginals(log_probs, np.array([token_ids], np.int64)))


def test_marginals_that_are_the_truth_lie_on_the_diagonal() -> None:
    text = [0, 7, 7, 8, 9]
    drafted = [proposal(root, (0.5, 0.25, 0.25), (7, 8, 9)) for root in range(4)]
    curve = count_bins(drafted, text, 1, num_ranks=16).calibration().pooled
    full = [i for i, count in enumerate(curve.num_tokens) if count]
    assert [curve.predicted[i] for i in full] == pytest.approx([0.25, 0.5])
    assert [curve.observed[i] for i in full] == [0.25, 0.5]
    assert [curve.num_tokens[i] for i in full] == [8, 4]
    assert curve.error == pytest.approx(0, abs=1e-7)
    empty = [i for i, count in enumerate(curve.num_tokens) if not count]
    assert all(math.isnan(curve.predicted[i]) and math.isnan(curve.observed[i]) for i in empty)


def test_the_calibration_error_is_the_gap_weighted_by_tokens() -> None:
    # Said once in four, believed at 0.5; the other token never, believed at 0.25.
    text = [0, 7, 1, 1, 1]
    drafted = [proposal(root, (0.5, 0.25), (7, 8)) for root in range(4)]
    both = count_bins(drafted, text, 1, num_ranks=2).calibration().pooled
    assert both.error == pytest.approx((0.25 + 0.25) / 2)
    best = count_bins(drafted, text, 1, num_ranks=1).calibration()
    assert best.pooled.error == best.by_depth[0].error == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("probability", "place"), [(0.0, 0), (1e-4, 0), (0.4999, 9), (0.5001, 10), (1.0, -1)]
)
def test_every_probability_has_a_bin(probability: float, place: int) -> None:
    with np.errstate(divide="ignore"):
        drafted = [proposal(0, (probability,), (7,))]
    counts = count_bins(drafted, [0, 7], 1, num_ranks=1)
    assert counts.num_said[0][place] == counts.num_tokens[0][place] == 1
    assert sum(counts.num_tokens[0]) == 1


def test_what_lies_beyond_the_text_does_not_count() -> None:
    marginals = HostMarginals(np.zeros((3, 1), np.float32), np.array([[7], [8], [9]]))
    drafted = [Proposal(0, marginals), Proposal(1, marginals), Proposal(2, marginals)]
    counts = count_hits(drafted, [0, 7, 8], 3)
    assert counts.num_positions == (2, 1, 0)
    assert counts.num_hits[0] == (1, 1, 0)
    assert math.isnan(counts.accuracy().top_1[2])
    assert sum(map(sum, count_bins(drafted, [0, 7, 8], 3, num_ranks=1).num_tokens)) == 3


# Suites.

SUITES = {"fox": ["the quick brown fox", "why not"], "dog": ["lazy dog"]}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.jsonl" for name in SUITES]
    for path, prompts in zip(paths, SUITES.values(), strict=True):
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return paths


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chart takes longer than all else here: only the test that is about it draws one."""
    monkeypatch.setattr("ddtree.train.plots.plot_evaluation", lambda *args: b"")


def job(files: list[Path], out: Path, *, seed: int = 0, **options: object) -> EvaluateJob:
    config = EvaluateConfig(**{"budgets": (4,), "max_new_tokens": 6, **options})
    pair = Pair(target(), dflash_drafter(target(), seed))
    return EvaluateJob(pair=pair, files=files, out=out, config=config)


def run(wanted: EvaluateJob) -> Evaluation:
    return run_evaluate(wanted, Console(quiet=True))


@pytest.mark.usefixtures("undrawn")
def test_the_headline_is_the_mean_over_suites_of_tokens_by_rounds(
    files: list[Path], tmp_path: Path
) -> None:
    wanted = job(files, tmp_path / "out")
    results = list(evaluate(wanted.pair, read_suites(files, None), wanted.config))
    in_turns = [("fox", 0), ("dog", 0), ("fox", 1)]
    assert [(r.suite, r.index) for r in results] == in_turns
    evaluation = summarise(results[::-1], list(SUITES))
    assert [(s.name, s.num_prompts) for s in evaluation.suites] == [("fox", 2), ("dog", 1)]
    for arm in range(2):
        taus = []
        for suite in evaluation.suites:
            arms = [r.arms[arm] for r in results if r.suite == suite.name]
            taus.append(sum(a.num_tokens for a in arms) / sum(a.num_rounds for a in arms))
            each = [a.num_tokens / a.num_rounds for a in arms]
            assert suite.prompt_taus[arm] == pytest.approx(sum(each) / len(each))
            assert suite.taus[arm] == taus[-1]
        assert evaluation.taus[arm] == pytest.approx(sum(taus) / 2)
    assert repr(run(wanted)) == repr(evaluation)  # repr: NaN is not equal to NaN


def test_the_limit_is_per_file(files: list[Path]) -> None:
    found = [(p.suite, p.index) for p in read_suites(files, 1)]
    assert found == [("fox", 0), ("dog", 0)]
    assert len(read_suites(files, None)) == 3


def test_results_are_written_as_json_tables_and_a_chart(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    console = Console(record=True, width=80)
    evaluation = run_evaluate(job(files, out, budgets=(4, 8)), console)
    found = json.loads((out / "evaluation.json").read_text(), parse_constant=pytest.fail)
    assert found["agree"] is True
    assert found["taus"] == list(evaluation.taus)
    assert found["card"]["target"] == "tiny"
    assert len(found["card"]["drafter_sha256"]) == 64
    page = (out / "evaluation.md").read_text()
    shown = console.export_text()
    assert "…" not in shown, "cut off"
    tau = f"{evaluation.taus[2]:.2f}"
    for text, part in ((page, f"{tau} |"), (shown, tau)):
        assert "All arms said the same tokens on 3 of 3 prompts: those of plain decoding." in text
        assert part in text
        assert all(name in text for name in ("fox", "dog", "chain", "B=4", "B=8", "top 16"))
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def break_verify(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """A verify of so many rows or more scores each token as the one before it."""
    verify = Target.verify

    def broken(self: Target, token_ids: Tensor, *rest: object, **options: object) -> TargetOutput:
        output = verify(self, token_ids, *rest, **options)
        if len(token_ids) < num_rows:
            return output
        return replace(output, logits=output.logits.roll(1, dims=-1))

    monkeypatch.setattr(Target, "verify", broken)


@pytest.mark.usefixtures("undrawn")
def test_a_tree_that_says_something_else_is_a_failure_in_the_result(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_verify(monkeypatch, num_rows=20)
    whole = script(8)
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": PROMPT.prompt}) + "\n")
    pair = Pair(target(), right_at_rank(lambda p: p % 3, whole, VOCAB_SIZE))
    config = EvaluateConfig(budgets=(8, 30), max_new_tokens=8)
    console = Console(record=True, width=80)
    files = [tmp_path / "one.jsonl"]
    evaluation = run_evaluate(
        EvaluateJob(pair=pair, files=files, out=tmp_path / "out", config=config), console
    )
    assert not evaluation.agree
    (found,) = evaluation.disagreements
    assert (found.suite, found.index, found.arm, found.first_difference) == ("one", 0, "30", 1)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["agree"] is False
    message = "FAILED: on prompt 0 of one the tree of budget 30 differs from plain decoding at"
    assert message in (tmp_path / "out" / "evaluation.md").read_text()
    assert message in " ".join(console.export_text().split())


def test_chain_and_tree_that_are_wrong_alike_are_found_by_plain_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = script()
    break_verify(monkeypatch, num_rows=2)
    result = measure(sure(truth))
    chain, tree = result.arms
    assert chain.accepted == tree.accepted
    assert chain.first_difference == tree.first_difference == 1
    found = summarise([result], ["test"]).disagreements
    assert [(d.arm, d.reference) for d in found] == [("chain", "ar"), ("8", "ar")]


@pytest.mark.usefixtures("undrawn")
def test_results_without_plain_decoding_still_count_and_are_told_apart(
    files: list[Path], tmp_path: Path
) -> None:
    whole = run(job(files, tmp_path / "out", limit=1))
    measured = tmp_path / "out" / "measured.jsonl"
    lines = [json.loads(line) for line in measured.read_text().splitlines()]
    assert [line.pop("reference") for line in lines] == ["ar", "ar"]
    measured.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = run(job(files, tmp_path / "out", limit=1))
    assert (older.taus, older.agree, older.num_plain) == (whole.taus, True, 0)
    assert run(job(files, tmp_path / "out", limit=2)).num_plain == 1
    page = (tmp_path / "out" / "evaluation.md").read_text()
    assert "3 of 3 prompts: those of plain decoding on 1; older versions did not run it." in page


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["measured.jsonl", "evaluation.md.partial"])
def test_a_full_disk_is_named(
    name: str, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, name)
    with pytest.raises(CacheWriteError, match=r"No space left .* Free some space"):
        run(job(files, tmp_path / "out", limit=1))


def test_a_text_that_the_prefill_ends_has_no_tau(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": PROMPT.prompt}) + "\n")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = script()[len(prompt_ids())]
    try:
        evaluation = run(job([tmp_path / "one.jsonl"], tmp_path / "out"))
    finally:
        model.generation_config.eos_token_id = None
    assert all(map(math.isnan, evaluation.taus))
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert found["taus"] == [None] * 2
    assert "| mean over suites |  | - | - |" in (tmp_path / "out" / "evaluation.md").read_text()


# Going on.


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_goes_on_and_finds_the_same(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(job(files, tmp_path / "whole"))

    def killed(*args: object, **kwargs: object) -> object:
        for number, result in enumerate(evaluate(*args, **kwargs)):
            if number == 2:
                raise KilledError
            yield result

    monkeypatch.setattr("ddtree.train.run_evaluate.evaluate", killed)
    with pytest.raises(KilledError):
        run(job(files, tmp_path / "cut"))
    measured = tmp_path / "cut" / "measured.jsonl"
    with measured.open("a") as opened:
        opened.write('{"suite": "fo')  # a kill in the middle of a line
    monkeypatch.undo()
    asked: list[int] = []

    def counted(*args: object, done: frozenset[tuple[str, int]]) -> object:
        asked.append(len(done))
        return evaluate(*args, done=done)

    monkeypatch.setattr("ddtree.train.run_evaluate.evaluate", counted)
    assert repr(run(job(files, tmp_path / "cut"))) == repr(whole)
    assert asked == [2]
    assert len(measured.read_text().splitlines()) == 3
    for name in ("evaluation.json", "evaluation.md"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"budgets": (8,)}, "budgets"),
        ({"temperature": 0.5, "seed": 0}, "temperature"),
        ({"max_new_tokens": 3}, "max_new_tokens"),
    ],
)
def test_a_folder_of_another_run_is_refused_by_what_changed(
    changes: dict[str, object], named: str, files: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(job(files, out, limit=2))
    before = (out / "measured.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=f"other values of {named}"):
        run(job(files, out, **{"limit": 2, **changes}))
    assert (out / "measured.jsonl").read_bytes() == before


@pytest.mark.usefixtures("undrawn")
def test_more_prompts_may_be_measured_later_and_fewer_summarised(
    files: list[Path], tmp_path: Path
) -> None:
    first = run(job(files, tmp_path / "out", limit=1))
    more = run(job(files, tmp_path / "out", limit=2))
    assert repr(more) == repr(run(job(files, tmp_path / "whole", limit=2)))
    assert repr(run(job(files, tmp_path / "out", limit=1))) == repr(first)


@pytest.mark.usefixtures("undrawn")
def test_other_prompts_are_another_run(files: list[Path], tmp_path: Path) -> None:
    run(job(files, tmp_path / "out", limit=1))
    files[0].write_text(files[0].read_text() + '{"prompt": "new"}\n')
    with pytest.raises(CheckpointError, match="other values of prompts_sha256"):
        run(job(files, tmp_path / "out", limit=1))


@pytest.mark.usefixtures("undrawn")
def test_a_drafter_with_other_weights_is_another_run(files: list[Path], tmp_path: Path) -> None:
    run(job(files, tmp_path / "out", limit=1))
    with pytest.raises(CheckpointError, match="other values of drafter_sha256"):
        run(job(files, tmp_path / "out", limit=1, seed=1))


# Mistakes.


@pytest.mark.parametrize(
    "options",
    [
        {"budgets": ()},
        {"budgets": (0,)},
        {"budgets": (16, 8)},
        {"budgets": (8, 8)},
        {"budgets": (5000,)},
        {"budgets": (8.0,)},
        {"budgets": [8]},
        {"max_new_tokens": 1},
        {"temperature": -1.0},
        {"seed": -1},
        {"limit": 0},
    ],
    ids=str,
)
def test_options_out_of_range_are_named(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        EvaluateConfig(**options)


@pytest.mark.parametrize("text", ["", "8,", "8;16", "many", "8.5"])
def test_budgets_that_are_no_numbers_are_named(text: str) -> None:
    with pytest.raises(OptionError, match="budgets: expected whole numbers"):
        parse_budgets(text)


def test_two_suites_of_one_name_are_refused(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "fox.jsonl"
    twin.write_text('{"prompt": "hello"}\n')
    with pytest.raises(OptionError, match="fox, dog, fox"):
        read_suites([*files, twin], None)


def test_nothing_is_written_before_a_mistake_is_found(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    good = job(files, out)
    bare = EvaluateJob(pair=Pair(target(), None), files=files, out=out, config=good.config)
    with pytest.raises(OptionError, match="drafter: expected a drafter to evaluate"):
        run(bare)
    with pytest.raises(PromptError, match="expected a readable file"):
        run(job([tmp_path / "none.jsonl"], out))
    with pytest.raises(ContextLengthError, match="context of 256"):
        run(job(files, out, max_new_tokens=250))
    monkeypatch.setattr("ddtree.train.plots.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"ddtree\[train\]"):
        run(good)
    assert not out.exists()
