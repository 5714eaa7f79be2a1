"""Saving and resuming a training: one file, replaced in one move.

A kill loses no more than the steps since the last save.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from ddtree.errors import CacheWriteError, CheckpointError, first_line
from ddtree.journal import changed_names
from ddtree.train.fit import Fit

# Steps may be added while the learning rate is constant; processes change rounding at most.
_MAY_CHANGE = frozenset({"num_steps", "num_workers"})


def save_checkpoint(fit: Fit, path: Path, description: Mapping[str, object]) -> None:
    """Write weights, optimiser and step.

    Raises:
        CacheWriteError: no room; the last checkpoint stays.
    """
    partial = path.with_suffix(".partial")
    state = {
        "description": json.dumps(description),
        "step": fit.step,
        "network": fit.network.state_dict(),
        "optimizer": fit.optimizers.state_dict(),
    }
    try:
        torch.save(state, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as a RuntimeError.
        partial.unlink(missing_ok=True)
        raise CacheWriteError(
            str(path),
            expected="a writable folder with room for a checkpoint",
            got=first_line(error),
            remedy="Free some space and run the same command again: it resumes.",
        ) from error


def load_checkpoint(fit: Fit, path: Path, description: Mapping[str, object]) -> None:
    """Continue a training where it was saved; `fit` changes in place.

    Args:
        fit: made with the same samples and options.
        path: of `save_checkpoint`.
        description: what decides the result; must be the same, but for `num_steps`.

    Raises:
        CheckpointError: unreadable, or of a training with other options.
    """
    try:
        state = torch.load(path, map_location=fit.device, weights_only=True)
        before = json.loads(state["description"])
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.PickleError) as error:
        raise CheckpointError(
            str(path),
            expected="a checkpoint of this training",
            got=first_line(error),
            remedy="Delete it to start again from step 0.",
        ) from error
    changed = [name for name in changed_names(before, description) if name not in _MAY_CHANGE]
    if changed:
        raise CheckpointError(
            str(path),
            expected="a training with the same samples and options",
            got=f"other values of {', '.join(changed)}",
            remedy="Give another --out, or the options that it was begun with.",
        )
    fit.network.load_state_dict(state["network"])
    fit.optimizers.load_state_dict(state["optimizer"])
    fit.step = int(state["step"])
