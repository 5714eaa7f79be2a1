"""What crosses a border between two parts: frozen, typed, with shapes.

Letters in shapes: L drafted depths, K ranks kept per depth, N rows of the verify forward (root
included), V vocabulary. Knows no model, no tokenizer and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32, Int32, Int64
from numpy import ndarray
from torch import Tensor

Method = Literal["ar", "dflash", "ddtree"]
FinishReason = Literal["stop", "length"]

METHODS: tuple[Method, ...] = ("ar", "dflash", "ddtree")


@dataclass(frozen=True)
class Transitions:
    """How probable each token is behind each token of the depth before it: a first-order draft.

    Args:
        log_probs: [L - 1, K, K] float32. Entry (d, p, j) is the j-th highest of depth d + 2 where
            the token at depth d + 1 is the one of rank p; sorted from high to low, -inf bans.
        ranks: [L - 1, K, K] int64, whose log-prob it is: a rank of depth d + 2 in `Marginals`.

    The batched builder takes those of R requests, [R, L - 1, K, K].
    """

    log_probs: Float32[Tensor, "*R M K K"]
    ranks: Int64[Tensor, "*R M K K"]


@dataclass(frozen=True)
class Marginals:
    """The drafter's distributions for the next L positions, best ranks first (paper, section 3).

    Args:
        log_probs: [L, K] float32, each row sorted from high to low; -inf bans a token.
        token_ids: [L, K] int64, the token of each rank.
        transitions: of a drafter that knows how its positions hang together; from depth 2 on they
            replace `log_probs`. None: what stands at a depth is independent of the depth before.
    """

    log_probs: Float32[Tensor, "L K"]
    token_ids: Int64[Tensor, "L K"]
    transitions: Transitions | None = None

    @classmethod
    def first_order(
        cls,
        log_probs: Float32[Tensor, "L K"],
        token_ids: Int64[Tensor, "L K"],
        behind: Float32[Tensor, "L K K"],
    ) -> Marginals:
        """A first-order draft of K columns per depth, put in order.

        Args:
            log_probs: of each column alone, from high to low; at depth 1 `behind` replaces it.
            token_ids: of each column.
            behind: entry (d, p, j) is the log-prob of column j at depth d + 1 behind column p of
                the depth before; at depth 1, behind the root, all p are alike.
        """
        found, ranks = torch.sort(behind, dim=-1, descending=True, stable=True)
        # Depth 1 has one row, which is the order of its columns from now on.
        order = ranks[0, 0]
        return cls(
            torch.cat([found[0, :1], log_probs[1:]]),
            torch.cat([token_ids[:1, order], token_ids[1:]]),
            Transitions(
                torch.cat([found[1:2, order], found[2:]]),
                torch.cat([ranks[1:2, order], ranks[2:]]),
            ),
        )

    @property
    def num_depths(self) -> int:
        """L, the number of drafted positions."""
        return int(self.log_probs.shape[0])

    @property
    def num_ranks(self) -> int:
        """K, the number of ranks kept per position."""
        return int(self.log_probs.shape[1])

    def cpu(self) -> Marginals:
        """The same on the host; nothing is checked."""
        behind = self.transitions
        if behind is not None:
            behind = Transitions(behind.log_probs.to("cpu", torch.float32), behind.ranks.cpu())
        return Marginals(self.log_probs.to("cpu", torch.float32), self.token_ids.cpu(), behind)


@dataclass(frozen=True)
class DraftTree:
    """A draft tree, the root included; nodes in score order, so every prefix is a smaller tree.

    Node 0 is the root: parent -1, depth 0, rank -1, log-prob 0.

    Args:
        token_ids: [N] int64.
        parents: [N] int32, index of the parent node; parents come before their children.
        depths: [N] int32, root 0; a node at depth i proposes the token at position start + i.
        ranks: [N] int32, 0 = the most probable token of its depth, behind its parent.
        log_probs: [N] float32, the score: sum of the log-probs along the path from the root.
    """

    token_ids: Int64[ndarray, " N"]
    parents: Int32[ndarray, " N"]
    depths: Int32[ndarray, " N"]
    ranks: Int32[ndarray, " N"]
    log_probs: Float32[ndarray, " N"]

    @property
    def num_rows(self) -> int:
        """N, rows of the verify forward: nodes and root."""
        return int(self.token_ids.shape[0])

    @property
    def num_nodes(self) -> int:
        """Nodes without the root, at most the budget B."""
        return self.num_rows - 1

    @property
    def expected_acceptance_length(self) -> float:
        """Expected tokens per round under the surrogate: 1 + sum of exp(score) (Proposition 1)."""
        return float(np.exp(self.log_probs.astype(np.float64)).sum())

    def first(self, num_nodes: int) -> DraftTree:
        """The tree of a smaller budget: the root and the first `num_nodes` nodes."""
        rows = slice(0, num_nodes + 1)
        return DraftTree(
            self.token_ids[rows],
            self.parents[rows],
            self.depths[rows],
            self.ranks[rows],
            self.log_probs[rows],
        )

    @classmethod
    def root_only(cls, root_id: int) -> DraftTree:
        """The tree of budget 0: nothing is speculated, as in plain decoding."""
        return cls(
            np.array([root_id], np.int64),
            np.array([-1], np.int32),
            np.array([0], np.int32),
            np.array([-1], np.int32),
            np.array([0.0], np.float32),
        )


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What the target's decoding rule chose along one tree.

    Args:
        path: node indices of the accepted nodes that are committed, root not included.
        token_ids: the tokens delivered: those of `path`, then one more, the next root.
        finish_reason: why generation ends here, or None.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None

    @property
    def next_root_id(self) -> int:
        """The last delivered token: decided, and not yet in the target's KV cache."""
        return self.token_ids[-1]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of decoding, or the prefill, which delivers the first token and has no tree.

    Args:
        tree: the tree that was verified; None for the prefill.
        path: node indices of the accepted nodes.
        token_ids: the tokens delivered.
        finish_reason: set on the last round only.
    """

    tree: DraftTree | None
    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None

    @property
    def num_tokens(self) -> int:
        """Tokens delivered by this round, the bonus token included."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Wall time per stage, in seconds, summed over a round or a generation."""

    prefill: float = 0.0
    draft: float = 0.0
    build: float = 0.0
    verify: float = 0.0
    walk: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """All stages together."""
        return self.prefill + self.draft + self.build + self.verify + self.walk + self.commit

    @classmethod
    def total_of(cls, spans: Iterable[StageSpan]) -> StageSeconds:
        """The sum over calls of stages."""
        totals: dict[str, float] = {}
        for span in spans:
            totals[span.stage] = totals.get(span.stage, 0.0) + span.seconds
        return cls(**totals)


@dataclass(frozen=True)
class StageSpan:
    """One call of a stage.

    Args:
        stage: a field of `StageSeconds`.
        begin_s: when it began, in seconds since the first one did.
        seconds: how long it took.
        round_index: of the round that it belongs to: 0 is the prefill.
    """

    stage: str
    begin_s: float
    seconds: float
    round_index: int


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How probable the target held a delivered token, whatever the decoding rule made of it.

    Args:
        token_id: the token.
        logprob: natural logarithm of its probability under the target's own logits, before
            temperature and everything else that changes them.
        top: pairs of token id and log-probability of the most probable tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The result of one generation; counts speak only of what was delivered.

    Args:
        text: the new text up to a stop string; None where there is no tokenizer.
        token_ids: the new tokens, the stop token included if one ended the text.
        finish_reason: "stop" (stop token or stop string) or "length".
        method: how it was drafted.
        rounds: the prefill and every round, in order.
        spans: every call of a stage, in order.
        elapsed_s: wall time from the prompt's token ids to the last token.
        logprobs: one for each of `token_ids`; None where they were not asked for.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    method: Method
    rounds: tuple[Round, ...]
    spans: tuple[StageSpan, ...]
    elapsed_s: float
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def seconds(self) -> StageSeconds:
        """Time per stage, summed over the rounds."""
        return StageSeconds.total_of(self.spans)

    @property
    def round_seconds(self) -> tuple[StageSeconds, ...]:
        """Time per stage of each of `rounds`."""
        parts: list[list[StageSpan]] = [[] for _ in self.rounds]
        for span in self.spans:
            parts[span.round_index].append(span)
        return tuple(map(StageSeconds.total_of, parts))

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return len(self.token_ids)

    @property
    def num_rounds(self) -> int:
        """Verify forwards; the prefill is not one."""
        return sum(r.tree is not None for r in self.rounds)

    @property
    def acceptance_length(self) -> float:
        """tau: tokens per round, bonus token included; plain decoding has 1. NaN without rounds."""
        if self.num_rounds == 0:
            return float("nan")
        return sum(r.num_tokens for r in self.rounds if r.tree is not None) / self.num_rounds

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Entry i counts the rounds that delivered i tokens; entry 0 is always 0."""
        counts = [r.num_tokens for r in self.rounds if r.tree is not None]
        return tuple(int(n) for n in np.bincount(counts)) if counts else ()

    @property
    def tokens_per_s(self) -> float:
        """New tokens by wall time, prefill included."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else float("nan")
