"""Stage 3: one target forward over the whole tree, every row seeing its own path only."""

from __future__ import annotations

import torch

from ddtree.models.target import Target, TargetOutput
from ddtree.prefill import Context
from ddtree.tree.geometry import ancestor_mask
from ddtree.types import DraftTree


@torch.inference_mode()
def verify(target: Target, context: Context, tree: DraftTree) -> TargetOutput:
    """Logits and features at every row of the tree.

    The cache grows by the tree's N rows in place, in row order; `commit` keeps the accepted ones.
    """
    device = target.device
    return target.verify(
        torch.from_numpy(tree.token_ids).to(device),
        torch.from_numpy(tree.depths).to(device, torch.int64),
        torch.from_numpy(ancestor_mask(tree)).to(device),
        context.cache,
        capture=context.layer_ids,
    )
