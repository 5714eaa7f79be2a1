"""A reduced draft vocabulary: the whole head's marginals, restricted; the text is the target's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddtree.errors import CheckpointError, PairMismatchError
from ddtree.models.drafter import DFlashDrafter
from ddtree.models.loading import load_drafter, read_drafter_config
from ddtree.models.target import Target
from ddtree.pair import Pair
from ddtree.types import Marginals
from tests.support.checkpoints import edit_json, write_drafter
from tests.support.drafters import feed
from tests.support.models import HIDDEN_SIZE, VOCAB_SIZE, greedy_reference, tiny_model, tiny_target

PROMPT = [5, 17, 42, 8, 23, 11, 2]
# A third of the target's tokens; the mask token (3) is not among them and need not be.
THIRD = list(range(1, VOCAB_SIZE, 3))
FILE = "draft_vocabulary.json"
MASK_AND_TAPS = {"mask_token_id": 3, "target_layer_ids": [0, 2]}

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@torch.inference_mode()
def proposed(drafter: DFlashDrafter, num_ranks: int = VOCAB_SIZE) -> Marginals:
    session = drafter.start(8)
    generator = torch.Generator().manual_seed(1)
    feed(session, torch.randn(5, 2 * HIDDEN_SIZE, generator=generator))
    return session.propose(7, num_depths=drafter.num_depths, num_ranks=num_ranks)


def by_token(marginals: Marginals) -> torch.Tensor:
    """[L, V], -inf for what is not proposed."""
    everything = torch.full((marginals.num_depths, VOCAB_SIZE), -torch.inf)
    return everything.scatter(1, marginals.token_ids, marginals.log_probs)


@pytest.mark.parametrize(
    "changes",
    [{}, {"output_multiplier": 0.3, "final_logit_softcapping": 2.0}],
    ids=["plain", "scaled and capped"],
)
@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
@pytest.mark.parametrize("token_ids", [[7], [0, VOCAB_SIZE - 1], THIRD, list(range(VOCAB_SIZE))])
def test_marginals_are_those_of_the_whole_head_restricted_and_normalised(
    token_ids: list[int], architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    target = tiny_target(architecture)
    whole = load_drafter(write_drafter(tmp_path / "whole", **changes), target)
    written = write_drafter(tmp_path / "some", draft_token_ids=token_ids, **changes)
    some = load_drafter(written, target)
    assert whole.draft_token_ids is None
    assert some.draft_token_ids.tolist() == token_ids
    expected = torch.full((some.num_depths, VOCAB_SIZE), -torch.inf)
    expected[:, token_ids] = by_token(proposed(whole))[:, token_ids].log_softmax(dim=1)
    marginals = proposed(some)
    torch.testing.assert_close(by_token(marginals), expected, rtol=0, atol=1e-5)
    assert marginals.num_ranks == len(token_ids)
    assert (marginals.log_probs[:, 1:] <= marginals.log_probs[:, :-1]).all()


def test_fewer_ranks_are_the_first_of_all(tmp_path: Path, target: Target) -> None:
    drafter = load_drafter(write_drafter(tmp_path, draft_token_ids=THIRD), target)
    some, everything = proposed(drafter, 4), proposed(drafter)
    assert some.num_ranks == 4
    assert some.token_ids.equal(everything.token_ids[:, :4])
    assert some.log_probs.equal(everything.log_probs[:, :4])


def test_a_bias_of_the_head_is_gathered_with_its_rows(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)
    torch.nn.init.normal_(head.bias, generator=torch.Generator().manual_seed(0))
    model.set_output_embeddings(head)
    target = Target(model, None, name="biased")
    part = target.head_of(torch.tensor(THIRD))
    assert part.weight.equal(head.weight[THIRD])
    assert part.bias.equal(head.bias[THIRD])
    assert not part.weight.requires_grad
    whole = load_drafter(write_drafter(tmp_path / "whole"), target)
    some = load_drafter(write_drafter(tmp_path / "some", draft_token_ids=THIRD), target)
    expected = by_token(proposed(whole))[:, THIRD].log_softmax(dim=1)
    torch.testing.assert_close(by_token(proposed(some))[:, THIRD], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 7])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3-tied"])
def test_the_text_is_the_targets_though_two_thirds_of_its_tokens_are_never_proposed(
    architecture: str, options: dict[str, float], budget: int, tmp_path: Path
) -> None:
    target = tiny_target(architecture)
    pair = Pair(target, load_drafter(write_drafter(tmp_path, draft_token_ids=THIRD), target))
    plain = pair.generate(PROMPT, method="ar", max_new_tokens=40, **options)
    drafted = pair.generate(PROMPT, budget=budget, max_new_tokens=40, lookup=False, **options)
    assert drafted.token_ids == plain.token_ids
    if not options:
        assert list(plain.token_ids) == greedy_reference(tiny_model(architecture), PROMPT, 40)
    proposals = [set(r.tree.token_ids[1:].tolist()) for r in drafted.rounds if r.tree]
    assert set().union(*proposals) <= set(THIRD)
    assert not set(plain.token_ids) <= set(THIRD)


def test_a_budget_beyond_the_draft_vocabulary_is_fine(tmp_path: Path, target: Target) -> None:
    folder = write_drafter(tmp_path, draft_token_ids=[4, 9], block_size=3)
    pair = Pair(target, load_drafter(folder, target))
    generation = pair.generate(PROMPT, budget=16, max_new_tokens=12, lookup=False)
    assert list(generation.token_ids) == greedy_reference(tiny_model("llama"), PROMPT, 12)
    # Two depths of two tokens each: 2 + 4 nodes are all there are.
    assert max(r.tree.num_nodes for r in generation.rounds if r.tree) == 6


def test_the_configuration_tells_the_size_without_the_file(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, draft_token_ids=THIRD)
    (folder / FILE).unlink()
    assert read_drafter_config(str(folder)).draft_vocab_size == len(THIRD)


def remove(folder: Path) -> None:
    (folder / FILE).unlink()


def undeclare(folder: Path) -> None:
    edit_json(folder / "config.json", dflash_config=MASK_AND_TAPS)


def with_ids(*token_ids: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / FILE, token_ids=list(token_ids))


def with_file(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / FILE).write_text(text)

    return write


# Each folder declares three ids.
BROKEN = [
    (remove, "expected a file with 3 token ids", "got no file"),
    (undeclare, "expected draft_vocab_size in the dflash_config of config.json", "got none"),
    (with_ids(1, 2), "expected 3 token ids, as config.json declares", "got 2"),
    (with_ids(1, 2, 3, 4), "expected 3 token ids, as config.json declares", "got 4"),
    (with_ids(5, 2, 9), "ascending, distinct", "got 5, 2 at index 0"),
    (with_ids(1, 9, 9), "ascending, distinct", "got 9, 9 at index 1"),
    (with_ids(-1, 2, 3), "whole numbers >= 0 and < 61", "got -1 at index 0"),
    (with_ids(1, 2, VOCAB_SIZE), "whole numbers >= 0 and < 61", "got 61 at index 2"),
    (with_ids(1, 2.0, 3), "whole numbers", "got 2.0 at index 1"),
    (with_ids(True, 2, 3), "whole numbers", "got True at index 0"),
    (with_ids(1, "2", 3), "whole numbers", "got '2' at index 1"),
    (with_ids(1, None, 3), "whole numbers", "got None at index 1"),
    (with_ids(), "a list of token ids", "got []"),
    (with_file('{"token_ids": 3}'), "a list of token ids", "got 3"),
    (with_file('{"ids": [1, 2, 3]}'), "token_ids, a list of token ids", "got None"),
    (with_file("[1, 2, 3]"), "expected a JSON object", "got list"),
    (with_file("{"), "expected JSON", ""),
]


@pytest.mark.parametrize(("damage", "expected", "got"), BROKEN)
def test_a_broken_vocabulary_is_named_with_what_was_expected_and_what_came(
    damage: Callable[[Path], None], expected: str, got: str, tmp_path: Path, target: Target
) -> None:
    folder = write_drafter(tmp_path, draft_token_ids=[1, 2, 3])
    assert load_drafter(folder, target).draft_token_ids.tolist() == [1, 2, 3]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(folder, target)
    message = str(caught.value)
    assert str(folder / FILE) in message
    assert expected in message
    assert got in message
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize("size", [0, -1, "3", True, 2.0])
def test_a_declared_size_that_is_no_count_is_named(
    size: object, tmp_path: Path, target: Target
) -> None:
    folder = write_drafter(tmp_path, dflash_config={**MASK_AND_TAPS, "draft_vocab_size": size})
    with pytest.raises(CheckpointError, match="draft_vocab_size: expected a whole number >= 1"):
        load_drafter(folder, target)


def test_more_draft_tokens_than_the_target_has_are_of_another_target(
    tmp_path: Path, target: Target
) -> None:
    folder = write_drafter(tmp_path, draft_token_ids=list(range(VOCAB_SIZE + 1)))
    with pytest.raises(PairMismatchError) as caught:
        load_drafter(folder, target)
    assert "draft_vocab_size: expected at most 61" in str(caught.value)
