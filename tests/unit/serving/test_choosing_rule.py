"""What of a step's decisions needs no engine: paths of rows, seeds, top-k and top-p unsorted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddtree.sampling.noise import gumbel_noise
from ddtree.serving import kept
from ddtree.serving.kept import best_kept
from ddtree.serving.row_paths import StepRows, seed_of
from ddtree.serving.step import chain_of
from ddtree.types import DraftTree

VOCAB_SIZE = 40


def test_rows_of_trees_know_their_paths_and_children() -> None:
    branching = DraftTree(
        np.array([9, 1, 2, 3, 4]),
        np.array([-1, 0, 0, 2, 2], np.int32),
        np.array([0, 1, 1, 2, 2], np.int32),
        np.array([-1, 0, 1, 0, 1], np.int32),
        np.zeros(5, np.float32),
    )
    rows = StepRows.of([chain_of(7, [5]), branching, chain_of(8, [])])
    assert rows.request_of_row.tolist() == [0, 0, 1, 1, 1, 1, 1, 2]
    assert rows.root_rows.tolist() == [0, 2, 7]
    assert [rows.path(row) for row in range(rows.num_rows)] == [
        *([], [5]),
        *([], [1], [2], [2, 3], [2, 4]),
        [],
    ]
    assert rows.children == {(0, 5): 1, (2, 1): 3, (2, 2): 4, (4, 3): 5, (4, 4): 6}


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_a_users_seed_is_the_seed(seed: int) -> None:
    assert seed_of(seed, "any") == seed


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64, 2**70 + 3])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert 0 <= seed_of(seed, "any") < 2**64


def test_without_a_seed_the_request_id_is_one() -> None:
    # By hand: the first 8 bytes of sha256("a"), the lowest first.
    assert seed_of(None, "a") == int.from_bytes(bytes.fromhex("ca978112ca1bbdca"), "little")


def kept_by_sorting(logits_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """The formula of Hugging Face and vLLM."""
    ascending, order = logits_V.sort()
    ascending.masked_fill_(ascending < ascending[len(ascending) - top_k], -torch.inf)
    gone = ascending.softmax(dim=0).cumsum(dim=0) <= 1 - torch.tensor(top_p)
    gone[-1] = False
    ascending.masked_fill_(gone, -torch.inf)
    return torch.empty_like(logits_V).scatter_(0, order, ascending)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Tensor:
    """Flat, peaked, with exact ties, with bans."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(VOCAB_SIZE, generator=generator) * draw(st.sampled_from([0.0, 0.3, 3, 30]))
    if draw(st.booleans()):
        logits = logits.round()
    num_banned = draw(st.sampled_from([0, 0, 1, VOCAB_SIZE - 1]))
    logits[torch.randperm(VOCAB_SIZE, generator=generator)[:num_banned]] = -torch.inf
    return logits


@given(
    rows_of_logits(),
    st.integers(1, VOCAB_SIZE),
    st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    st.integers(0, 1000),
)
def test_the_best_kept_token_is_the_one_that_sorting_finds(
    logits: Tensor, top_k: int, top_p: float, seed: int
) -> None:
    scores = logits + gumbel_noise(seed, 0, VOCAB_SIZE)
    masked = kept_by_sorting(logits, top_k, top_p)
    expected = int(scores.masked_fill(masked == -torch.inf, -torch.inf).argmax())
    found = best_kept(
        logits,
        scores.clone(),
        top_k=top_k,
        top_p=top_p,
        keep_exactly=lambda row: kept_by_sorting(row, top_k, top_p),
    )
    assert found == expected


def test_logits_stay_as_they_are() -> None:
    logits = torch.linspace(-3, 3, VOCAB_SIZE)
    before = logits.clone()
    best_kept(
        logits,
        logits.flip(0).clone(),
        top_k=5,
        top_p=0.5,
        keep_exactly=lambda row: kept_by_sorting(row, 5, 0.5),
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("top_k", "top_p"), [(VOCAB_SIZE, 0.5), (3, 1.0), (3, 0.9)])
def test_sorting_is_for_close_calls_alone(top_k: int, top_p: float) -> None:
    logits = torch.linspace(0, -12, VOCAB_SIZE)

    def never(row: Tensor) -> Tensor:
        raise AssertionError("nothing is close here")

    found = best_kept(logits, logits.clone(), top_k=top_k, top_p=top_p, keep_exactly=never)
    assert found == 0


def test_a_hopeless_search_ends_with_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.linspace(0, -1, VOCAB_SIZE)
    calls: list[int] = []

    def exactly(row: Tensor) -> Tensor:
        calls.append(1)
        return kept_by_sorting(row, 1, 1.0)

    monkeypatch.setattr(kept, "_MOST_TRIES", 3)
    # The least probable token has the highest score, the next one the next, and so on.
    found = best_kept(logits, -logits.clone(), top_k=1, top_p=1.0, keep_exactly=exactly)
    assert (found, calls) == (0, [1])
