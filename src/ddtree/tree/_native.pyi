# The binding in native/_native.c; ddtree.tree.native is its only user.

from numpy import ndarray

def build_tree(
    log_probs: ndarray,
    token_ids: ndarray,
    root_id: int,
    budget: int,
    transitions: ndarray = ...,
    followers: ndarray = ...,
) -> bytearray | None: ...
def ancestor_mask(parents: ndarray, mask: ndarray) -> None: ...
def count(
    counts: ndarray,
    bins: ndarray,
    log_probs: ndarray,
    token_ids: ndarray,
    chosen: tuple[int, ...],
    fade: float,
) -> None: ...
def worth(
    counts: ndarray,
    bins: ndarray,
    log_probs: ndarray,
    out: ndarray,
    prior_weight: float,
    prior_tokens: float,
) -> None: ...
def gumbel(seed: int, position: int, noise: ndarray) -> None: ...
