"""Rounds to look at, written by hand, and a tokenizer whose tokens are words of a list."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddtree.tree.reference import build_tree
from ddtree.types import DraftTree, Generation, Marginals, Round

A, B, C, D = range(4)
ROOT = 4
# The worked example of DESIGN 3: A .60, B .38, AB .30, AA .24, BB .19, ABC .165.
_PROBS = [
    [0.60, 0.38, 0.01, 0.01],
    [0.50, 0.40, 0.06, 0.04],
    [0.55, 0.20, 0.15, 0.10],
]
_TOKENS = [[A, B, C, D], [B, A, C, D], [C, D, A, B]]


class WordTokenizer:
    """Token i is the i-th word; more than the words are numbered."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        return "".join(map(self.convert_ids_to_tokens, ids))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.words[token_id] if token_id < len(self.words) else f" t{token_id}"


def worked_tree() -> DraftTree:
    """The tree of the worked example: b, A, B, AB, AA, BB, ABC."""
    marginals = Marginals(torch.tensor(_PROBS).log(), torch.tensor(_TOKENS))
    return build_tree(marginals, ROOT, budget=6)


def large_tree(budget: int, seed: int = 0) -> DraftTree:
    """A tree of random marginals over seven depths, with tokens from 100 on."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((7, budget), generator=generator) * 2
    log_probs, order = logits.log_softmax(1).sort(1, descending=True)
    return build_tree(Marginals(log_probs, order + 100), ROOT, budget=budget)


def prefill_round(token_id: int = ROOT) -> Round:
    return Round(tree=None, path=(), token_ids=(token_id,), finish_reason=None)


def worked_round() -> Round:
    """A and AB are accepted, and the bonus token is D."""
    return Round(tree=worked_tree(), path=(1, 3), token_ids=(A, B, D), finish_reason=None)


def plain_round(root_id: int, token_id: int) -> Round:
    """A round without a draft."""
    tree = DraftTree.root_only(root_id)
    return Round(tree=tree, path=(), token_ids=(token_id,), finish_reason=None)


def large_round(budget: int) -> Round:
    """A round of a large tree whose path goes down twice, by the second child and the first."""
    tree = large_tree(budget)
    first = next(i for i in range(2, tree.num_rows) if tree.parents[i] == 0)
    second = next(i for i in range(2, tree.num_rows) if tree.parents[i] == first)
    token_ids = (int(tree.token_ids[first]), int(tree.token_ids[second]), D)
    return Round(tree=tree, path=(first, second), token_ids=token_ids, finish_reason="length")


def generation_of(rounds: Sequence[Round]) -> Generation:
    return Generation(
        text=None,
        token_ids=tuple(token for done in rounds for token in done.token_ids),
        finish_reason="length",
        method="ddtree",
        rounds=tuple(rounds),
        spans=(),
        elapsed_s=1.0,
    )
