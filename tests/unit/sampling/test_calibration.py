"""Calibration: untouched it changes nothing, and what it learns is what the target did."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.host_marginals import HostMarginals
from ddtree.sampling.calibration import Calibration
from ddtree.types import Marginals, Transitions, Walk

IDS = [7, 8, 9]


def marginals(*rows: list[float]) -> Marginals:
    log_probs = torch.tensor(rows, dtype=torch.float32).log()
    return Marginals(log_probs, torch.tensor([IDS[: len(rows[0])]] * len(rows)))


def walk(*token_ids: int) -> Walk:
    path = tuple(range(1, len(token_ids)))
    return Walk(path=path, token_ids=token_ids, finish_reason=None)


def worth(calibration: Calibration, said: Marginals) -> np.ndarray:
    return calibration.apply(said).log_probs.exp().numpy()


def test_untouched_it_changes_nothing() -> None:
    said = marginals([0.9, 0.05, 0.01], [0.6, 0.3, 1e-6])
    got = Calibration(2).apply(said)
    assert got.token_ids.equal(said.token_ids)
    torch.testing.assert_close(got.log_probs.exp(), said.log_probs.exp(), rtol=1e-4, atol=1e-6)


def test_banned_tokens_stay_banned_and_a_certain_one_is_nearly_so() -> None:
    got = Calibration(1).apply(marginals([1.0, 0.0, 0.0])).log_probs
    assert got[0, 1:].tolist() == [-torch.inf, -torch.inf]
    assert -1e-3 < float(got[0, 0]) <= 0


def test_a_drafter_that_is_never_right_is_soon_not_believed() -> None:
    calibration, said = Calibration(2), marginals([0.9, 0.05, 0.01], [0.9, 0.05, 0.01])
    for _ in range(5):
        calibration.observe(said, walk(99))
    first, second = worth(calibration, said)[:, 0]
    assert first < 0.2
    # Of the second depth nothing has been seen: no walk came there.
    assert second == pytest.approx(0.9, abs=1e-3)


def test_depths_learn_apart_and_from_the_rows_that_the_walk_stood_on() -> None:
    calibration, said = Calibration(2), marginals([0.5, 0.3, 0.1], [0.5, 0.3, 0.1])
    for _ in range(60):
        calibration.observe(said, walk(7, 99))
    first, second = worth(calibration, said)
    assert first[0] > 0.9
    assert second[0] < 0.1


def test_a_choice_outside_the_tree_is_learnt_from_too() -> None:
    calibration, said = Calibration(1), marginals([0.5, 0.3, 0.1])
    for _ in range(60):
        calibration.observe(said, walk(9))
    assert worth(calibration, said)[0, 2] > 0.2  # up from 0.1, as far as rising bins allow


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_it_finds_what_probabilities_are_worth(temperature: float) -> None:
    """The target draws from softmax(log q / temperature): predictions must match its rates."""
    rng = np.random.default_rng(0)
    calibration = Calibration(1)
    promised, hit = [], []
    for step in range(1500):
        q = np.sort(rng.dirichlet([0.7] * 3))[::-1].clip(1e-6)
        p = q ** (1 / temperature)
        token = int(rng.choice(3, p=p / p.sum()))
        said = marginals((q / q.sum()).tolist())
        if step > 500:
            promised.append(worth(calibration, said)[0])
            hit.append(np.arange(3) == token)
        calibration.observe(said, walk(IDS[token]))
    promised, hit = np.array(promised), np.array(hit)
    assert abs(promised[:, 0].mean() - hit[:, 0].mean()) < 0.03
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.0)):
        inside = (promised >= low) & (promised < high)
        if inside.sum() > 200:
            assert abs(promised[inside].mean() - hit[inside].mean()) < 0.06


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.sampled_from([*IDS, 99])),
        max_size=20,
    )
)
def test_what_comes_out_is_always_fit_for_a_builder(
    rounds: list[tuple[list[float], int]],
) -> None:
    calibration = Calibration(2)
    for values, token in rounds:
        row = sorted((v / 3 for v in values), reverse=True)
        said = marginals(row, row)
        calibration.observe(said, walk(token, 99))
        got = calibration.apply(said)
        HostMarginals.of(got)
        assert torch.equal(got.log_probs == -torch.inf, said.log_probs == -torch.inf)


def test_a_drafter_that_is_certain_and_never_right_is_soon_not_believed() -> None:
    calibration, said = Calibration(1), marginals([1.0, 0.0, 0.0])
    for _ in range(10):
        calibration.observe(said, walk(99))
    assert worth(calibration, said)[0, 0] < 0.1


def test_more_said_is_never_worth_less() -> None:
    rng = np.random.default_rng(0)
    calibration, values = Calibration(1), np.geomspace(1.0, 1e-9, 400)
    whole = Marginals(torch.from_numpy(np.log(values[None])).float(), torch.arange(400)[None])
    for _ in range(50):
        said = marginals(np.sort(rng.dirichlet([0.5] * 3))[::-1].tolist())
        calibration.observe(said, walk(int(rng.choice([*IDS, 99]))))
        HostMarginals.of(calibration.apply(whole))  # sorted, none above 0
    assert np.ptp(worth(calibration, whole)) > 0.3


# First-order drafts: candidates 7, 8, 9 at every depth.


def first_order(first: list[float], behind: list[list[float]], ranks: list[list[int]]) -> Marginals:
    """Two depths; the row of the second alone is one that must not be looked at."""
    alone = marginals(first, [1.0, 1.0, 1.0])
    rows = torch.tensor([behind], dtype=torch.float32).log()
    return Marginals(alone.log_probs, alone.token_ids, Transitions(rows, torch.tensor([ranks])))


SAID = first_order(
    [0.5, 0.3, 0.1],
    [[0.9, 0.05, 0.01], [0.6, 0.3, 0.05], [0.4, 0.3, 0.2]],
    [[0, 1, 2], [2, 1, 0], [1, 2, 0]],
)


def test_a_first_order_draft_is_untouched_at_first() -> None:
    got = Calibration(2).apply(SAID)
    assert got.transitions.ranks.equal(SAID.transitions.ranks)
    torch.testing.assert_close(
        got.transitions.log_probs.exp(), SAID.transitions.log_probs.exp(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ((7, 7), [0.9, 0.05, 0.01]),
        ((8, 9), [0.6, 0.3, 0.05]),
        ((9, 8), [0.4, 0.3, 0.2]),
    ],
)
def test_what_is_learnt_is_of_the_row_behind_the_token_that_the_walk_took(
    path: tuple[int, int], row: list[float]
) -> None:
    """As if the walk's own rows had been all that was said, in the order of their own tokens."""
    told, by_hand = Calibration(2), Calibration(2)
    rank = IDS.index(path[0])
    ids = [IDS[column] for column in SAID.transitions.ranks[0, rank].tolist()]
    assert ids[0] == path[1]
    said = marginals([0.5, 0.3, 0.1], row)
    said = Marginals(said.log_probs, torch.tensor([IDS, ids]))
    for _ in range(20):
        told.observe(SAID, walk(*path, 99))
        by_hand.observe(said, walk(*path, 99))
    assert worth(told, said) == pytest.approx(worth(by_hand, said))
    assert worth(told, said)[1, 0] > row[0] + 0.02


@pytest.mark.parametrize("path", [(99,), (99, 7), (7,)])
def test_behind_a_token_that_was_no_candidate_nothing_is_learnt(path: tuple[int, ...]) -> None:
    calibration = Calibration(2)
    for _ in range(20):
        calibration.observe(SAID, walk(*path))
    probe = marginals([0.5, 0.3, 0.1], [0.7, 0.2, 0.1])
    first, second = worth(calibration, probe)
    assert second == pytest.approx([0.7, 0.2, 0.1], rel=1e-3)
    assert first != pytest.approx([0.5, 0.3, 0.1], rel=1e-1)


def test_every_row_of_a_depth_goes_through_that_depths_map() -> None:
    calibration = Calibration(2)
    for _ in range(20):
        calibration.observe(SAID, walk(7, 99))
    got = calibration.apply(SAID)
    HostMarginals.of(got)
    for rank, row in enumerate(SAID.transitions.log_probs[0]):
        alone = Marginals(torch.stack([row, row]), SAID.token_ids)
        assert got.transitions.log_probs[0, rank].equal(calibration.apply(alone).log_probs[1])
    assert float(got.transitions.log_probs[0, 0, 0].exp()) < 0.3


def test_a_first_order_draft_of_one_depth_is_calibrated_too() -> None:
    alone = marginals([0.5, 0.3, 0.1])
    nothing = Transitions(torch.zeros(0, 3, 3), torch.zeros((0, 3, 3), dtype=torch.int64))
    said = Marginals(alone.log_probs, alone.token_ids, nothing)
    calibration = Calibration(1)
    calibration.observe(said, walk(7, 8))
    assert calibration.apply(said).log_probs.equal(calibration.apply(alone).log_probs)
    assert calibration.apply(said).transitions.log_probs.shape == (0, 3, 3)
