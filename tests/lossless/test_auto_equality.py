"""Budget "auto" decides how many nodes a round gets, and nothing about the text."""

import pytest
import torch

import ddtree
from ddtree.budget import Experience
from ddtree.costs import CostProfile
from tests.support import drafters
from tests.support.models import (
    VOCAB_SIZE,
    dflash_drafter,
    greedy_reference,
    tiny_model,
    tiny_target,
)

PROMPT = [5, 9, 2, 41, 7, 7, 30]
NUM_NEW = 60
FLAT = CostProfile(contexts=(64,), rows=(1, 33), verify=((0.05, 0.06),), draft=0.001)
SLANTED = CostProfile(contexts=(64,), rows=(1, 33), verify=((0.05, 0.15),), draft=0.005)


def pair_with(drafter: object, profile: CostProfile, architecture: str = "llama") -> ddtree.Pair:
    pair = ddtree.Pair(tiny_target(architecture), drafter)
    pair.__dict__["experience"] = Experience(profile, drafter.num_depths)
    return pair


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "qwen2-mixed", "qwen3-tied"])
def test_a_measured_pair_says_what_the_model_says(architecture: str, method: str) -> None:
    target = tiny_target(architecture)
    pair = ddtree.Pair(target, dflash_drafter(target))
    expected = greedy_reference(tiny_model(architecture), PROMPT, NUM_NEW)
    for _ in range(2):  # the second time with what the first has taught
        generation = pair.generate(PROMPT, method=method, max_new_tokens=NUM_NEW)
        assert list(generation.token_ids) == expected


@pytest.mark.parametrize("profile", [FLAT, SLANTED], ids=["flat", "slanted"])
@pytest.mark.parametrize("kind", ["perfect", "hostile"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "T1"])
def test_good_and_bad_drafters_on_any_machine_give_the_same_text(
    options: dict[str, float], kind: str, profile: CostProfile
) -> None:
    target = tiny_target("llama")
    plain = ddtree.Pair(target, None).generate(
        PROMPT, method="ar", max_new_tokens=NUM_NEW, **options
    )
    script = PROMPT + list(plain.token_ids)
    drafter = getattr(drafters, kind)(script, VOCAB_SIZE)
    pair = pair_with(drafter, profile)
    drafted = pair.generate(PROMPT, max_new_tokens=NUM_NEW, **options)
    assert drafted.token_ids == plain.token_ids
    assert any(r.tree.num_nodes > 0 for r in drafted.rounds if r.tree is not None)


def test_rounds_without_a_draft_leave_the_drafters_context_whole() -> None:
    """A pause must not make a hole in what the drafter has seen."""
    target = tiny_target("llama")
    drafter = dflash_drafter(target)
    sessions = []

    class Watched:
        layer_ids, num_depths = drafter.layer_ids, drafter.num_depths

        def start(self, capacity: int) -> object:
            sessions.append(drafter.start(capacity))
            return sessions[-1]

    paused = pair_with(Watched(), FLAT)
    paused.experience.rounds_to_wait = 5
    generation = paused.generate(PROMPT, max_new_tokens=30)
    sizes = [r.tree.num_nodes for r in generation.rounds if r.tree is not None]
    assert sizes[:5] == [0] * 5
    assert any(sizes[5:])
    ddtree.Pair(target, Watched()).generate(PROMPT, budget=4, max_new_tokens=30)
    with torch.inference_mode():
        for session in sessions:
            session.propose(1, num_depths=1, num_ranks=1)  # takes in what waits
    length = min(session.length for session in sessions)
    for ours, theirs in zip(*(session._stores for session in sessions), strict=True):
        gap = (ours.keys[:, :, :length] - theirs.keys[:, :, :length]).abs().max()
        assert float(gap) < 1e-4


def test_what_is_learnt_at_one_temperature_is_not_believed_at_another() -> None:
    """A drafter that is right when greedy may be worthless when sampled, and the reverse."""
    drafter = dflash_drafter(tiny_target("llama"))
    pair = pair_with(drafter, FLAT)
    greedy = pair.experience
    pair.generate(PROMPT, temperature=1.0, max_new_tokens=NUM_NEW)
    assert greedy.calibration._counts.sum() == 0
    pair.generate(PROMPT, max_new_tokens=NUM_NEW)
    assert greedy.calibration._counts.sum() > 0
    assert pair.experience is greedy
    known = greedy.calibration._counts.copy()
    pair.generate(PROMPT, temperature=1.0, max_new_tokens=NUM_NEW)
    assert (greedy.calibration._counts == known).all()
