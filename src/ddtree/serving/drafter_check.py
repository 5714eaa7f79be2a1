"""Whether vLLM reads a drafter as we do, or would run another network than was trained.

What vLLM passes over is nowhere reported: the drafts are only worse, or another position's. So
what a drafter declares is compared with what vLLM 0.32's V1 runner makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree.errors import UnsupportedModelError
from ddtree.models.drafter_checkpoint import SPECULATORS, DrafterDeclaration, read_declaration
from ddtree.models.folder import read_config


def read_served_drafter(folder: Path, name: str) -> DrafterDeclaration:
    """What a drafter declares, if vLLM runs it as it was trained.

    Args:
        folder: of the checkpoint.
        name: of the drafter, for messages.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: see `loading.load_drafter`.
        UnsupportedModelError: names what vLLM would read in another way.
    """
    declared = read_declaration(folder, name)
    for what, found in _misread(declared, read_config(folder, "drafter")).items():
        if found:
            raise UnsupportedModelError(
                f"drafter {name}",
                expected="a DFlash drafter that vLLM reads as it was trained",
                got=what,
                remedy="Use another drafter here; `ddtree generate` can run this one.",
            )
    return declared


def _misread(declared: DrafterDeclaration, raw: Mapping[str, Any]) -> dict[str, bool]:
    config = declared.config
    nested = raw.get("dflash_config") or {}
    # vLLM makes all layers of a drafter in this format causal, or none.
    causal = not raw.get("sliding_window_non_causal", True)
    is_speculators = declared.format == SPECULATORS
    return {
        "DFlash2's convolutions and selector": config.is_dflash2,
        "sample_from_anchor": config.sample_from_anchor,
        "an output_multiplier": config.output_multiplier != 1,
        "final_logit_softcapping": config.final_logit_softcapping is not None,
        "an input_embedding_scale": config.input_embedding_scale != 1,
        "both sliding and full layers": len(set(config.windows)) > 1,
        "no target_layer_ids in dflash_config": not is_speculators
        and not nested.get("target_layer_ids"),
        "sliding_window_non_causal: false, which vLLM applies to layers without a window too": (
            is_speculators and any(each != causal for each in config.causal)
        ),
    }
