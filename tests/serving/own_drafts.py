"""What our drafter says behind a text, without an engine: the engine's must say it too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.models.loading import load_drafter, load_target
from ddtree.prefill import prefill
from tests.serving.tiny import NUM_DEPTHS


class OwnDrafts:
    """The tiny pair, loaded by ddtree."""

    def __init__(self, models: Path) -> None:
        self._target = load_target(models / "target", device="cpu")
        self._drafter = load_drafter(models / "drafter", self._target)
        self._said = cache(self._ask)

    def off(self, drafts_seen: Sequence[dict[str, Any]]) -> list[float]:
        """For each draft that an engine's drafter made: how far its log-probs are from ours."""
        found = []
        for seen in drafts_seen:
            difference = self._said(tuple(seen["token_ids"])) - torch.tensor(seen["log_probs"])
            found.append(float(difference.abs().max()))
        return found

    def _ask(self, token_ids: tuple[int, ...]) -> Tensor:
        """[L, 4] of a text whose last token is the root."""
        context = prefill(self._target, self._drafter, token_ids[:-1], len(token_ids) + 1).context
        assert context.session is not None
        said = context.session.propose(token_ids[-1], num_depths=NUM_DEPTHS, num_ranks=4)
        return said.log_probs
