"""What a trace says of a generation, and its form as JSON lines (docs/trace-format.md).

A generation is one line, then a line per round, then a line per position of its text. Knows no
file, no model and no builder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy import ndarray

from ddtree.host_marginals import HostMarginals
from ddtree.sampling.mixture import MixtureWeights
from ddtree.types import (
    DraftTree,
    FinishReason,
    Marginals,
    Round,
    StageSeconds,
    Transitions,
)

FORMAT = "ddtree-trace"
VERSION = 2
# Version 1 is one whose marginals never have transitions: readers of it would pass over them.
READABLE_VERSIONS = (1, 2)

# Of `MixtureWeights`.
Counts = tuple[list[list[float]], list[list[float]]]

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


@dataclass(frozen=True, kw_only=True)
class TraceCard:
    """Where a trace comes from: the first line of a file.

    Args:
        target, drafter: names; None is no drafter.
        dtype: of the target, such as "torch.float32".
        vocab_size: V of the target.
        num_depths: L of the drafter; 0 without one.
        origin: command, commit, versions, machine and date, see `provenance.origin`.
    """

    target: str
    drafter: str | None
    dtype: str
    vocab_size: int
    num_depths: int
    origin: Mapping[str, object]

    @property
    def models(self) -> tuple[object, ...]:
        """What must be the same for generations to stand in one file."""
        return (self.target, self.drafter, self.dtype, self.vocab_size, self.num_depths)

    def line(self) -> str:
        """As the first line of a file."""
        return _line({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> TraceCard:
        """From the first line, which says that it is ours."""
        return cls(
            target=_text(value["target"]),
            drafter=None if value["drafter"] is None else _text(value["drafter"]),
            dtype=_text(value["dtype"]),
            vocab_size=_int(value["vocab_size"]),
            num_depths=_int(value["num_depths"]),
            origin=dict(value["origin"]),
        )


@dataclass(frozen=True, kw_only=True)
class TracedRound:
    """One round of decoding; the prefill is none.

    Args:
        start: T, tokens in the cache when it began: the root's position.
        marginals: as the drafter proposed them; None where it was not asked.
        round: the tree that was verified, the path, and the tokens delivered.
        seconds: per stage.
    """

    start: int
    marginals: HostMarginals | None
    round: Round
    seconds: StageSeconds

    @property
    def tree(self) -> DraftTree:
        """The tree that was verified."""
        assert self.round.tree is not None, "the prefill is not traced as a round"
        return self.round.tree

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> TracedRound:
        """From its line.

        Raises:
            ValueError, KeyError, TypeError: something is missing, or not what it should be.
        """
        reason = value["finish_reason"]
        tree = _tree(value["tree"], _int(value["root_id"]))
        path = tuple(_ints(value["path"]).tolist())
        if not all(0 < node < tree.num_rows for node in path):
            raise ValueError("a path that leaves the tree")
        done = Round(
            tree=tree,
            path=path,
            token_ids=tuple(_ints(value["token_ids"]).tolist()),
            finish_reason=None if reason is None else _finish_reason(reason),
        )
        return cls(
            start=_int(value["start"]),
            marginals=None if value["marginals"] is None else parse_marginals(value["marginals"]),
            round=done,
            seconds=_seconds(value["seconds"]),
        )


@dataclass(frozen=True, kw_only=True)
class TracedGeneration:
    """One generation, with everything that another builder or budget must be told.

    Args:
        id: unique in its file.
        options: of the generation, as `asdict(DecodeConfig)`.
        prompt_ids: the prompt.
        token_ids: the new tokens.
        text: the new text, or None without a tokenizer.
        finish_reason: why it ended.
        elapsed_s: wall time, prefill included.
        prefill_seconds: per stage, of the prefill, which delivers the first token.
        num_ranks: K that the drafter was asked for along the text; 0 where it was not asked.
        lookup: what the text's own repetitions were thought to be worth when it began, see
            `sampling.mixture.MixtureWeights.counts`; None where they were not drafted.
        rounds: every verify forward, in order.
        along: by root position, what the drafter proposes behind each token of the text.
    """

    id: str
    options: Mapping[str, object]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    elapsed_s: float
    prefill_seconds: StageSeconds
    num_ranks: int
    rounds: tuple[TracedRound, ...]
    along: Mapping[int, HostMarginals]
    lookup: Counts | None = None

    @property
    def max_new_tokens(self) -> int:
        """The length limit that it ran under."""
        return _int(self.options["max_new_tokens"])

    def lines(self) -> Iterator[str]:
        """As lines of a file."""
        head = {name: getattr(self, name) for name in _HEAD}
        head |= {"prefill_seconds": asdict(self.prefill_seconds), "options": _finite(self.options)}
        counts = {"num_rounds": len(self.rounds), "num_along": len(self.along)}
        yield _line({"kind": "generation", **head, **counts})
        for done in self.rounds:
            yield _line(
                {
                    "kind": "round",
                    "start": done.start,
                    "root_id": int(done.tree.token_ids[0]),
                    "path": done.round.path,
                    "token_ids": done.round.token_ids,
                    "finish_reason": done.round.finish_reason,
                    "seconds": asdict(done.seconds),
                    "tree": _tree_json(done.tree),
                    "marginals": done.marginals and _marginals_json(done.marginals),
                }
            )
        for start, proposed in self.along.items():
            yield _line({"kind": "along", "start": start, "marginals": _marginals_json(proposed)})

    @classmethod
    def parse_head(cls, value: Mapping[str, Any]) -> TracedGeneration:
        """From its first line, without rounds and marginals.

        Raises:
            ValueError, KeyError, TypeError: something is missing, or not what it should be.
        """
        parsed = cls(
            id=_text(value["id"]),
            options=dict(value["options"]),
            prompt_ids=tuple(_ints(value["prompt_ids"]).tolist()),
            token_ids=tuple(_ints(value["token_ids"]).tolist()),
            text=None if value["text"] is None else _text(value["text"]),
            finish_reason=_finish_reason(value["finish_reason"]),
            elapsed_s=float(value["elapsed_s"]),
            prefill_seconds=_seconds(value["prefill_seconds"]),
            num_ranks=_int(value["num_ranks"]),
            rounds=(),
            along={},
            lookup=None if value.get("lookup") is None else _counts(value["lookup"]),
        )
        room = _int(parsed.options["max_new_tokens"]) - len(parsed.token_ids)
        if not parsed.prompt_ids or not parsed.token_ids or room < 0:
            raise ValueError("a prompt and 1 to max_new_tokens new tokens are needed")
        _text(parsed.options["method"])
        return parsed

    def check(self) -> None:
        """Rounds must follow each other along the text, and marginals must belong to it.

        Raises:
            ValueError: they do not.
        """
        text = (*self.prompt_ids, *self.token_ids)
        start, first = len(self.prompt_ids), len(self.prompt_ids)
        for index, done in enumerate(self.rounds):
            delivered, path = done.round.token_ids, list(done.round.path)
            follows = done.start == start and int(done.tree.token_ids[0]) == text[start]
            proposed = tuple(done.tree.token_ids[path].tolist())
            start += len(delivered)
            said = text[done.start + 1 : start + 1] == delivered
            if not (follows and said and delivered and proposed == delivered[: len(path)]):
                raise ValueError(f"round {index} does not go on where the one before it ended")
        if self.rounds and start != len(text) - 1:
            raise ValueError("the rounds end before the text does")
        strange = [position for position in self.along if not first <= position < len(text) - 1]
        if strange:
            raise ValueError(f"marginals at position {strange[0]}, where no round can begin")


_HEAD = (
    "id",
    "options",
    "prompt_ids",
    "token_ids",
    "text",
    "finish_reason",
    "elapsed_s",
    "prefill_seconds",
    "num_ranks",
    "lookup",
)


def _counts(value: Any) -> Counts:
    right, seen = value
    MixtureWeights.of_counts(right, seen)  # checked once, here
    return right, seen


def parse_marginals(value: Mapping[str, Any]) -> HostMarginals:
    """From JSON, checked.

    Raises:
        ValueError, KeyError, TypeError: something is missing, or not what it should be.
    """
    log_probs = np.array([_floats(row) for row in value["log_probs"]])
    token_ids = np.array([_ints(row) for row in value["token_ids"]])
    if log_probs.ndim != 2 or log_probs.size == 0:
        raise ValueError("marginals without a depth or a rank")
    behind = value.get("transitions")
    return HostMarginals.of(
        Marginals(
            torch.from_numpy(log_probs),
            torch.from_numpy(token_ids),
            None if behind is None else _transitions(behind, log_probs.shape[1]),
        )
    )


def _transitions(value: Mapping[str, Any], num_ranks: int) -> Transitions:
    log_probs = [[_floats(row) for row in depth] for depth in value["log_probs"]]
    ranks = [[_ints(row) for row in depth] for depth in value["ranks"]]
    if not log_probs and not ranks:  # of a single depth
        return Transitions(
            torch.zeros(0, num_ranks, num_ranks),
            torch.zeros((0, num_ranks, num_ranks), dtype=torch.int64),
        )
    arrays = np.array(log_probs), np.array(ranks)
    if any(array.ndim != 3 for array in arrays):
        raise ValueError("transitions that are not [L - 1][K][K]")
    return Transitions(*map(torch.from_numpy, arrays))


def _line(value: Mapping[str, object]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


def _finite(value: object) -> object:
    """The same without infinities, which JSON does not know: a banned token's bias is -inf."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _tree_json(tree: DraftTree) -> dict[str, object]:
    ints = {f.name: getattr(tree, f.name).tolist() for f in fields(tree)}
    return {**ints, "log_probs": _floats_json(tree.log_probs)}


def _marginals_json(marginals: HostMarginals) -> dict[str, object]:
    written: dict[str, object] = {
        "log_probs": [_floats_json(row) for row in marginals.log_probs],
        "token_ids": marginals.token_ids.tolist(),
    }
    behind = marginals.transitions
    if behind is not None:
        log_probs = [[_floats_json(row) for row in depth] for depth in behind.log_probs]
        written["transitions"] = {"log_probs": log_probs, "ranks": behind.ranks.tolist()}
    return written


def _floats_json(values: Float32[ndarray, " M"]) -> list[float | None]:
    # Nine significant digits tell any two float32 apart; JSON has no -inf.
    return [None if v == -np.inf else float(f"{v:.9g}") for v in values.tolist()]


def _tree(value: Mapping[str, Any], root_id: int) -> DraftTree:
    token_ids = _ints(value["token_ids"])
    parents, depths, ranks = (
        _ints(value[name]).astype(np.int32) for name in ("parents", "depths", "ranks")
    )
    tree = DraftTree(token_ids, parents, depths, ranks, _floats(value["log_probs"]))
    num_rows = len(token_ids)
    if any(len(getattr(tree, f.name)) != num_rows for f in fields(tree)):
        raise ValueError("a tree whose lists differ in length")
    rows = np.arange(1, num_rows)
    above = parents[1:]
    if num_rows == 0 or parents[0] != -1 or (above < 0).any() or (above >= rows).any():
        raise ValueError("a tree whose nodes do not come after their parents")
    if token_ids[0] != root_id:
        raise ValueError("a tree of another root")
    return tree


def _ints(values: object) -> Int64[ndarray, " M"]:
    """A list of whole numbers; numpy alone would cut fractions off without a word."""
    if not isinstance(values, list):
        raise TypeError("a list of whole numbers is needed")
    found = np.array(values)
    if len(values) > 0 and (found.dtype.kind != "i" or found.ndim != 1):
        raise TypeError("a list of whole numbers is needed")
    return found.astype(np.int64)


def _floats(values: object) -> Float32[ndarray, " M"]:
    if not isinstance(values, list):
        raise TypeError("a list of numbers is needed")
    with np.errstate(over="ignore"):  # what is no float32 was not written by us, and is -inf
        return np.array([-np.inf if v is None else v for v in values], np.float32)


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _seconds(value: Mapping[str, Any]) -> StageSeconds:
    return StageSeconds(**{f.name: float(value[f.name]) for f in fields(StageSeconds)})


def _finish_reason(value: object) -> FinishReason:
    for reason in _FINISH_REASONS:
        if value == reason:
            return reason
    raise ValueError(f"{value!r} is no reason to end")
