"""Log-probabilities of what is delivered: listens to the walk from outside, so nobody else pays.

They are the target's own: taken from its logits at the row where a token was chosen, before the
decoding rule changes them. Knows no rule.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.decode import Stages
from ddtree.sampling.rule import DecodingRule
from ddtree.stopping import Stopping
from ddtree.types import DraftTree, TokenLogprob, Walk


class LogprobRecorder:
    """Keeps the log-probabilities of one generation's tokens, in their order.

    Args:
        num_alternatives: so many of the most probable tokens go with each.
    """

    def __init__(self, num_alternatives: int) -> None:
        self._num_alternatives = num_alternatives
        self._found: list[TokenLogprob] = []

    @property
    def found(self) -> tuple[TokenLogprob, ...]:
        """One for each token delivered so far."""
        return tuple(self._found)

    def listening(self, stages: Stages) -> Stages:
        """The same stages; what their walks deliver is recorded, at the walk's expense."""

        def walk(
            tree: DraftTree,
            logits: Float[Tensor, "N V"],
            rule: DecodingRule,
            stopping: Stopping,
            token_ids: list[int],
        ) -> Walk:
            walked = stages.walk(tree, logits, rule, stopping, token_ids)
            self._found += token_logprobs(logits, walked, self._num_alternatives)
            return walked

        return replace(stages, walk=walk)


@torch.inference_mode()
def token_logprobs(
    logits: Float[Tensor, "N V"], walked: Walk, num_alternatives: int
) -> list[TokenLogprob]:
    """Log-probabilities of a walk's tokens.

    Args:
        logits: the target's, at every row of the tree.
        walked: the tokens, and the rows below the root where they were chosen.
        num_alternatives: so many of the most probable tokens go with each; V at most.

    >>> walked = Walk(path=(), token_ids=(1,), finish_reason=None)
    >>> token_logprobs(torch.tensor([[0.0, 0.0]]), walked, 0)
    [TokenLogprob(token_id=1, logprob=-0.6931471824645996, top=())]
    """
    # A token is chosen at its parent: the first at the root, the last at the end of the path.
    rows = torch.tensor([0, *walked.path], device=logits.device)
    ids = torch.tensor(walked.token_ids, device=logits.device)
    log_probs = logits[rows].float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, ids[:, None])[:, 0].tolist()
    top = log_probs.topk(min(num_alternatives, logits.shape[1]), dim=-1)
    return [
        TokenLogprob(
            token_id=token_id, logprob=logprob, top=tuple(zip(top_ids, top_logprobs, strict=True))
        )
        for token_id, logprob, top_ids, top_logprobs in zip(
            walked.token_ids, chosen, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
