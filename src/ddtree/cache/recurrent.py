"""States of recurrent layers: what stands in for keys and values where a layer keeps no entries.

A round's rows are not in the state until they are kept: they are pending, in whatever form gives
the state behind an accepted path. Rejected rows therefore leave nothing to undo. Knows no library
and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """Everything that one recurrent layer remembers of R requests.

    Args:
        conv: the last W inputs of its causal convolution; zeros stand before the first token.
        matrix: the recurrence's state of each head; None where the convolution is all there is.
    """

    conv: Float[Tensor, "R C W"]
    matrix: Float[Tensor, "R H dk dv"] | None

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        held = [t for t in (self.conv, self.matrix) if t is not None]
        return sum(t.numel() * t.element_size() for t in held)


@runtime_checkable
class PendingRows(Protocol):
    """Rows of a tree that are computed and neither kept nor dropped."""

    @property
    def num_bytes(self) -> int:
        """Memory held, the state that the rows start from not counted."""
        ...

    def state_after(self, state: RecurrentState, path: Int64[Tensor, " A"]) -> RecurrentState:
        """The state behind the last of these rows, each the parent of the next; A >= 1."""
        ...


class RecurrentStore:
    """The committed state of one layer, batch 1, and the rows of a round that is being verified.

    Args:
        state: before the first token.
    """

    def __init__(self, state: RecurrentState) -> None:
        self.state = state
        self._next: RecurrentState | None = None
        self._rows: PendingRows | None = None

    @property
    def num_bytes(self) -> int:
        """Memory held, pending rows included."""
        held = [self.state, self._next, self._rows]
        return sum(part.num_bytes for part in held if part is not None)

    def write_conv(self, conv: Float[Tensor, "1 C W"]) -> None:
        """The convolution's part of the state behind a sequence of tokens, pending."""
        self._must_be_settled()
        self._next = replace(self.state, conv=conv)

    def write_matrix(self, matrix: Float[Tensor, "1 H dk dv"]) -> None:
        """The recurrence's part of it; the convolution's was written before."""
        assert self._next is not None, "the convolution comes first"
        self._next = replace(self._next, matrix=matrix)

    def offer(self, rows: PendingRows) -> None:
        """The rows of a tree, pending."""
        self._must_be_settled()
        self._rows = rows

    def keep(self, path: Int64[Tensor, " A"]) -> None:
        """Take these pending rows into the state, and forget the others.

        Args:
            path: rows from the first on, each the parent of the next. Of a sequence that was
                written as a whole: all or none.
        """
        if path.shape[0] > 0:
            if self._rows is not None:
                self.state = self._rows.state_after(self.state, path)
            else:
                assert self._next is not None, "no rows are pending"
                self.state = self._next
        self._next = self._rows = None

    def _must_be_settled(self) -> None:
        assert self._next is None, "the rows before are neither kept nor dropped"
        assert self._rows is None, "the rows before are neither kept nor dropped"
