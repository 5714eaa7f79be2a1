"""The gated delta rule over the rows of a tree, in one pass.

A head's state S [dk, dv] moves with every token (Gated Delta Networks, arXiv 2412.06464):
S' = a S + k u^T, where a = exp(log decay) and u = b (v - (a S)^T k) corrects what the state already
answers to key k by the strength b; the token reads S'^T q. In a tree each row continues its
parent's state. Unrolled along a row's path, with A the product of decays from the root on,

    u_i = b_i (v_i - A_i S^T k_i - sum over ancestors j of (A_i / A_j) (k_i . k_j) u_j)

where S is the state that all paths start from. Ancestors come before their descendants, so this is
one triangular system for all rows, and no row's state is ever built. On a chain it is the paper's
chunkwise form. Knows no model and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


class TreePaths:
    """The way to the root from every row of a tree, for recurrences.

    Args:
        ancestors: [N, N] bool, a row's ancestors and itself; ancestors come first.
        width: W >= 0, inputs before a row that its causal convolution sees.
    """

    def __init__(self, ancestors: Bool[Tensor, "N N"], width: int) -> None:
        self.ancestors = ancestors
        # As numbers: a sum along the path of every row is a product with it.
        self.sums = ancestors.to(torch.float32)
        self.windows = _windows(ancestors, width)


def _windows(ancestors: Bool[Tensor, "N N"], width: int) -> Int64[Tensor, "N seen"]:
    """The W + 1 inputs that each row's convolution sees, oldest first and its own last.

    Numbers below `width` are the inputs before the root, width + i is row i.
    """
    num_rows = ancestors.shape[0]
    rows = torch.arange(num_rows, device=ancestors.device)
    parents = torch.where(ancestors.tril(-1), rows, -1).amax(dim=1)
    before = torch.arange(-1, width - 1, device=ancestors.device)
    previous = torch.cat([before, parents + width])
    columns = [rows + width]
    for _ in range(width):
        columns.append(previous[columns[-1]])
    return torch.stack(columns[::-1], dim=1)


@dataclass(frozen=True, kw_only=True)
class DeltaRows:
    """What the rows of a tree would write into the state that they start from.

    Args:
        keys: [Hk, N, dk] float32; each serves H / Hk neighbouring heads.
        writes: [H, N, dv], u of every row.
        log_decays: [H, N], log of the product of decays from the root to the row, both included.
    """

    keys: Float[Tensor, "Hk N dk"]
    writes: Float[Tensor, "H N dv"]
    log_decays: Float[Tensor, "H N"]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (self.keys, self.writes, self.log_decays)
        return sum(t.numel() * t.element_size() for t in tensors)

    def state_after(
        self, state: Float[Tensor, "H dk dv"], path: Int64[Tensor, " A"]
    ) -> Float[Tensor, "H dk dv"]:
        """The state behind the last row of a path.

        Args:
            state: that all rows started from.
            path: [A] rows from the root on, each the parent of the next; A >= 1.
        """
        logs = self.log_decays.index_select(1, path)
        last = logs[:, -1:]
        keys = _per_head(self.keys.index_select(1, path), state.shape[0])
        faded = keys * (last - logs).exp()[..., None]
        writes = self.writes.index_select(1, path)
        return last.exp()[..., None] * state + faded.transpose(1, 2) @ writes


def tree_delta_rule(
    *,
    queries: Float[Tensor, "Hk N dk"],
    keys: Float[Tensor, "Hk N dk"],
    values: Float[Tensor, "H N dv"],
    log_decays: Float[Tensor, "H N"],
    strengths: Float[Tensor, "H N"],
    state: Float[Tensor, "H dk dv"],
    paths: TreePaths,
) -> tuple[Float[Tensor, "H N dv"], DeltaRows]:
    """What every row reads from its own state, and what it would write. All float32.

    Args:
        queries: scaled as they are to be used.
        keys: each serves H / Hk neighbouring heads, as queries do.
        values: what the state should answer to a key.
        log_decays: <= 0, of each row alone.
        strengths: b, of each row.
        state: behind the committed context.
        paths: of the N rows.
    """
    heads = state.shape[0]
    along = log_decays @ paths.sums.T
    # Masked before exp: of rows on different paths the difference may be anything.
    fading = along[:, :, None] - along[:, None, :]
    fading = fading.masked_fill(~paths.ancestors, -torch.inf).exp()
    total = along.exp()[..., None]

    answered = total * (_per_head(keys, heads) @ state)
    meets = _per_head(keys @ keys.transpose(1, 2), heads) * fading
    writes = torch.linalg.solve_triangular(
        meets * strengths[..., None],
        strengths[..., None] * (values - answered),
        upper=False,
        unitriangular=True,
    )
    reads = _per_head(queries @ keys.transpose(1, 2), heads) * fading
    outputs = total * (_per_head(queries, heads) @ state) + reads @ writes
    return outputs, DeltaRows(keys=keys, writes=writes, log_decays=along)


def _per_head(shared: Tensor, heads: int) -> Tensor:
    """[Hk, ...] repeated to [H, ...]: neighbouring heads share one."""
    return shared.repeat_interleave(heads // shared.shape[0], dim=0)
