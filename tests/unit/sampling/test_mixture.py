"""A guess in the draft: the mixture is its formula, and its weights learn who is right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.host_marginals import HostMarginals
from ddtree.sampling.mixture import MixtureWeights, mix
from ddtree.tree.reference import build_tree
from ddtree.types import Marginals, Transitions


def random_draft(rng: np.random.Generator, depths: int, ranks: int, vocab: int, pairs: bool):
    """Candidates with the distributions that they keep, with transitions or without."""
    ids = np.stack([rng.permutation(vocab)[:ranks] for _ in range(depths)])
    alone = np.sort(rng.dirichlet(np.ones(ranks), depths) * 0.9, axis=1)[:, ::-1].copy()
    transitions = None
    if pairs:
        dense = rng.dirichlet(np.ones(ranks), (depths - 1, ranks)) * 0.9
        order = np.argsort(-dense, axis=2, kind="stable")
        transitions = Transitions(
            torch.from_numpy(np.log(np.take_along_axis(dense, order, 2))).float(),
            torch.from_numpy(order),
        )
    return Marginals(
        torch.from_numpy(np.log(alone)).float(), torch.from_numpy(ids).long(), transitions
    )


def said_of(draft: Marginals, path: tuple[int, ...]) -> float:
    """The drafter's probability of the last token of a path behind the token before it; a token
    that was not drafted has none, and nothing is known of what follows one but the depth itself."""
    depth = len(path) - 1
    ids = draft.token_ids[depth].tolist()
    if path[-1] not in ids:
        return 0.0
    column = ids.index(path[-1])
    parents = draft.token_ids[depth - 1].tolist() if depth else []
    if draft.transitions is None or not depth or path[-2] not in parents:
        return float(draft.log_probs[depth, column].exp())
    parent = parents.index(path[-2])
    place = draft.transitions.ranks[depth - 1, parent].tolist().index(column)
    return float(draft.transitions.log_probs[depth - 1, parent, place].exp())


@given(
    seed=st.integers(0, 10_000),
    pairs=st.booleans(),
    length=st.integers(1, 3),
    known=st.booleans(),
)
def test_every_path_has_the_probability_of_the_mixture(
    seed: int, pairs: bool, length: int, known: bool
) -> None:
    rng = np.random.default_rng(seed)
    depths, ranks, vocab = 3, 4, 7
    draft = random_draft(rng, depths, ranks, vocab, pairs)
    guess = rng.integers(0, vocab, length).tolist()
    if known:  # the last ranks leave where a guess was not drafted, which is tested by name below
        guess = [int(rng.choice(draft.token_ids[i].numpy())) for i in range(length)]
    weights = rng.uniform(0.05, 0.95, length)
    mixed = mix(draft, guess, weights, ranks)
    HostMarginals.of(mixed.marginals)
    tree = build_tree(mixed.marginals, 0, 10_000)
    got = {}
    for node in range(1, tree.num_rows):
        path, at = [], node
        while at:
            path.append(int(tree.token_ids[at]))
            at = int(tree.parents[at])
        got[tuple(reversed(path))] = float(np.exp(tree.log_probs[node]))
    candidates = [
        sorted({*row.tolist()[: ranks - (d < length and guess[d] not in row)], *guess[d : d + 1]})
        for d, row in enumerate(draft.token_ids)
    ]
    for depth in range(1, depths + 1):
        for path in itertools.product(*candidates[:depth]):
            expected = 1.0
            for i in range(depth):
                step = said_of(draft, path[: i + 1])
                # A first-order draft cannot tell how it came to a guessed token.
                if i < length and (i == 0 or path[i - 1] == guess[i - 1]):
                    step = weights[i] * (path[i] == guess[i]) + (1 - weights[i]) * step
                expected *= step
            assert got.get(path, 0.0) == pytest.approx(expected, abs=1e-5), path
    for depth, said in enumerate(mixed.said):
        assert said == pytest.approx(said_of(draft, tuple(guess[: depth + 1])), abs=1e-6)


def test_a_guess_that_was_not_drafted_takes_the_last_place() -> None:
    draft = Marginals(torch.tensor([[0.6, 0.3, 0.1]] * 2).log(), torch.tensor([[1, 2, 3]] * 2))
    found = mix(draft, [9, 8], np.array([0.5, 0.5]), 3)
    assert found.marginals.token_ids.tolist() == [[9, 1, 2], [1, 2, 8]]
    assert found.marginals.log_probs[0].exp().tolist() == pytest.approx([0.5, 0.3, 0.15])
    assert found.said.tolist() == [0.0, 0.0]


def test_what_was_given_is_left_as_it_was() -> None:
    draft = random_draft(np.random.default_rng(1), 3, 4, 7, pairs=True)
    before = draft.log_probs.clone(), draft.token_ids.clone()
    mix(draft, [6, 6, 6], np.array([0.9, 0.9, 0.9]), 4)
    assert torch.equal(draft.log_probs, before[0])
    assert torch.equal(draft.token_ids, before[1])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_weight_becomes_the_share_of_choices_that_came_from_the_guess(share: float) -> None:
    rng = np.random.default_rng(0)
    weights = MixtureWeights(2, 3)
    for _ in range(2000):
        # The drafter gives the guessed token 0.2: it is chosen that often by the drafter too.
        hit = rng.random() < share or rng.random() < 0.2
        weights.learn(1, 7, 0.2, bool(hit))
    assert weights.of(1, 5)[-1] == pytest.approx(share, abs=0.12)
    assert weights.of(1, 5)[0] == weights.of(0, 1)[0]  # other depths and kinds learnt nothing


def test_a_guess_that_the_drafter_knew_teaches_little() -> None:
    known, unknown = MixtureWeights(1, 1), MixtureWeights(1, 1)
    for _ in range(30):
        known.learn(0, 0, 0.99, True)
        unknown.learn(0, 0, 0.01, True)
    assert unknown.of(0, 1)[0] > known.of(0, 1)[0] + 0.2
