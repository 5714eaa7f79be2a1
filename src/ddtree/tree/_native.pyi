# The binding in native/_native.c; ddtree.tree.native is its only user.

from numpy import ndarray

def build_tree(
    log_probs: ndarray, token_ids: ndarray, root_id: int, budget: int
) -> bytearray | None: ...
def ancestor_mask(parents: ndarray, mask: ndarray) -> None: ...
