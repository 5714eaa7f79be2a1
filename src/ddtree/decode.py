"""The loop: draft, build, verify, walk, commit; a generator of rounds.

`ar`, `dflash` and `ddtree` are this one loop with no drafter, the chain builder and the tree
builder. Timing, streaming and statistics attach from outside (`Stages`, `timing`, `pair`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ddtree.budget import Budget, Builder
from ddtree.commit import commit
from ddtree.draft import Drafter, DraftSession, draft
from ddtree.models.target import Target, TargetOutput
from ddtree.prefill import Context, Prefilled, prefill
from ddtree.sampling.rule import DecodingRule
from ddtree.stopping import Stopping
from ddtree.tree.chain import build_chain
from ddtree.tree.host import build_tree
from ddtree.types import DraftTree, Marginals, Method, Round, Walk
from ddtree.verify import verify
from ddtree.walk import walk

BUILDERS: dict[Method, Builder] = {"dflash": build_chain, "ddtree": build_tree}


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages that the loop calls; wrap them to observe or time them."""

    prefill: Callable[[Target, Drafter | None, Sequence[int], int], Prefilled] = prefill
    draft: Callable[[DraftSession, int, int, int], Marginals] = draft
    build: Builder = build_tree
    verify: Callable[[Target, Context, DraftTree], TargetOutput] = verify
    walk: Callable[[DraftTree, Tensor, DecodingRule, Stopping, list[int]], Walk] = walk
    commit: Callable[[Context, int, tuple[int, ...], Tensor], None] = commit


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    *,
    stages: Stages,
    rule: DecodingRule,
    stopping: Stopping,
    budget: Budget,
) -> Iterator[Round]:
    """Generate until `stopping` says so.

    Args:
        target: the model whose output is reproduced.
        drafter: proposes; None, or a largest budget of 0, is plain decoding.
        prompt_ids: at least one token id.
        stages: see `Stages`; `stages.build` is the method's builder.
        rule: how the target decides tokens.
        stopping: when the text ends; mutated.
        budget: how many nodes each round gets besides the root.

    Yields:
        The prefill, which delivers the first token and has no tree, then one `Round` per verify
        forward. The last one has a finish reason.
    """
    drafter = drafter if budget.max_nodes > 0 else None
    capacity = len(prompt_ids) + min(stopping.room, 1024) + budget.max_nodes + 1
    prefilled = stages.prefill(target, drafter, prompt_ids, capacity)
    context = prefilled.context
    root = DraftTree.root_only(context.root_id)
    walked = stages.walk(root, prefilled.logits, rule, stopping, context.token_ids)
    del prefilled  # its logits would live as long as the generator
    yield _round(None, walked)
    while walked.finish_reason is None:
        tree = _propose(drafter, context, stages, stopping.room, budget)
        walked = _advance(target, context, tree, stages, rule, stopping)
        budget.observe(walked)
        yield _round(tree, walked)


def _propose(
    drafter: Drafter | None, context: Context, stages: Stages, room: int, budget: Budget
) -> DraftTree:
    """The tree of this round; a node as deep as the room left could never be followed."""
    num_depths = min(drafter.num_depths, room - 1) if drafter else 0
    wanted = budget.wants_draft(context.cache.length)
    if context.session is None or num_depths == 0 or not wanted:
        return DraftTree.root_only(context.root_id)
    marginals = stages.draft(context.session, context.root_id, num_depths, budget.max_nodes)
    return budget.build(marginals, context.root_id, stages.build)


def _advance(
    target: Target,
    context: Context,
    tree: DraftTree,
    stages: Stages,
    rule: DecodingRule,
    stopping: Stopping,
) -> Walk:
    """Verify, walk, commit; logits and features of this round end with this call."""
    start = context.cache.length
    verified = stages.verify(target, context, tree)
    walked = stages.walk(tree, verified.logits, rule, stopping, context.token_ids)
    stages.commit(context, start, walked.path, verified.features)
    return walked


def _round(tree: DraftTree | None, walked: Walk) -> Round:
    return Round(
        tree=tree,
        path=walked.path,
        token_ids=walked.token_ids,
        finish_reason=walked.finish_reason,
    )
