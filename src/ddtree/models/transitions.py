"""What a drafter knows of how its positions hang together: scores of a token behind another.

One pass gives a distribution for each position, and none of them knows what the others will be. A
low-rank head corrects them afterwards, at no further pass:

    score(next | previous) = logit(next) + <A[previous] * (W h), S[next]>

with h the hidden state of the next token's slot (CHECKPOINTS C; DFlash2's candidate selector). Only
the best candidates of each position are scored. Knows no tree and no target.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ddtree.types import Marginals

# What has no row in the codebooks conditions nothing.
NO_ROW = -1


class TransitionHead(nn.Module):
    """The two codebooks and the projection; parameter names are those of z-lab's checkpoints.

    Args:
        num_tokens: Vd, tokens that can be proposed.
        rank: r.
        hidden_size: D.
    """

    def __init__(self, num_tokens: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(num_tokens, rank))
        self.successor_codebook = nn.Parameter(torch.empty(num_tokens, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def queries(
        self, previous: Int64[Tensor, "*M"], hidden: Float[Tensor, "*M D"]
    ) -> Float[Tensor, "*M r"]:
        """A[previous] * (W h), zero where `previous` is NO_ROW: what successors are scored with.

        Args:
            previous: rows of the codebook, of the tokens in front.
            hidden: final-normed states of the slots of the tokens behind.
        """
        rows = self.predecessor_codebook[previous.clamp(min=0)]
        found: Tensor = rows * self.hidden_projection(hidden)
        return found * (previous != NO_ROW)[..., None]

    def changes(
        self, previous: Int64[Tensor, "*M"], hidden: Float[Tensor, "*M D"]
    ) -> Float[Tensor, "*M Vd"]:
        """What is added to the logits of all Vd tokens behind `previous`."""
        added: Tensor = self.queries(previous, hidden) @ self.successor_codebook.T
        return added

    def between(
        self,
        previous: Int64[Tensor, "L P"],
        following: Int64[Tensor, "L K"],
        hidden: Float[Tensor, "L D"],
    ) -> Float[Tensor, "L P K"]:
        """What is added to the logits of K candidates behind each of P tokens, at each depth.

        Args:
            previous: rows of the tokens at the depth before, or NO_ROW.
            following: rows of the candidates.
            hidden: of each depth's slot.
        """
        queries = self.queries(previous, hidden[:, None])
        added: Tensor = queries @ self.successor_codebook[following].transpose(1, 2)
        return added


def conditioned(
    alone: Marginals, scores: Float[Tensor, "L K"], added: Float[Tensor, "L K K"]
) -> Marginals:
    """A first-order draft, from what each depth says alone and what is added behind each token.

    Candidates keep together the probability that their depth alone gives them: what is left
    belongs to tokens that nobody scored.

    Args:
        alone: the candidates of each depth.
        scores: theirs, before they were normalised over all tokens.
        added: entry (d, p, j) changes the score of candidate j at depth d + 1 behind candidate p of
            the depth before; at depth 1, behind the root, all p are alike.

    >>> said = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log()
    >>> added = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [-9.0, 0.0]]])
    >>> first_order = conditioned(Marginals(said, torch.tensor([[5, 6], [7, 8]])), said, added)
    >>> first_order.transitions.ranks.tolist()
    [[[0, 1], [1, 0]]]
    """
    mass = torch.logsumexp(alone.log_probs, dim=-1)[:, None, None]
    log_probs = torch.log_softmax((scores[:, None] + added).float(), dim=-1) + mass
    # A depth whose every candidate is banned has no normaliser, and no nodes.
    behind = log_probs.clamp(max=0.0).masked_fill(log_probs.isnan(), -torch.inf)
    return Marginals.first_order(alone.log_probs, alone.token_ids, behind)
