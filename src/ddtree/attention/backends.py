"""The attention backends by the name that transformers gives them."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ddtree.attention import grouped, split
from ddtree.errors import BackendError

# Ours; what transformers masks itself (a prompt) is masked as for its own "sdpa".
GROUPED = "ddtree"
SPLIT = "ddtree_split"
for _name, _attend in ((GROUPED, grouped.attend), (SPLIT, split.attend)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, sdpa_mask)

# All take additive masks; the first is what a target gets that we load.
BACKENDS = (GROUPED, SPLIT, "sdpa", "eager")


def check_backend(implementation: str | None) -> None:
    """Refuse an attention that has no tree mask.

    Raises:
        BackendError: names those that have.

    >>> check_backend("sdpa")
    """
    if implementation in BACKENDS:
        return
    raise BackendError(
        "attention",
        expected=f"one of {', '.join(BACKENDS)}",
        got=repr(implementation),
        remedy=f'Call model.set_attn_implementation("{GROUPED}") on the target first.',
    )
