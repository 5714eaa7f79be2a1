"""Stage 4: follow the target's own decoding rule down the tree until it leaves it.

What is accepted is what the rule said, so the output cannot depend on the tree.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree.sampling.rule import DecodingRule
from ddtree.stopping import Stopping
from ddtree.tree.geometry import child_lookup
from ddtree.types import DraftTree, Walk


@torch.inference_mode()
def walk(
    tree: DraftTree,
    logits: Float[Tensor, "N V"],
    rule: DecodingRule,
    stopping: Stopping,
    token_ids: list[int],
) -> Walk:
    """Choose a token at the root, go to the child that proposed it, and so on.

    Args:
        tree: what was verified.
        logits: the target's logits at every row.
        rule: how the target decides.
        stopping: told of every token; ends the walk at a stop token, a stop string or the limit,
            even inside the accepted path. Mutated.
        token_ids: all tokens so far, the root last; grows by the tokens delivered. Mutated.
    """
    choose = rule.chooser(logits)
    children = child_lookup(tree)
    row = 0
    path: list[int] = []
    delivered: list[int] = []
    while True:
        token = choose(row, token_ids)
        token_ids.append(token)
        delivered.append(token)
        reason = stopping.push(token)
        child = children.get((row, token))
        if reason is not None or child is None:
            return Walk(path=tuple(path), token_ids=tuple(delivered), finish_reason=reason)
        path.append(child)
        row = child
