"""What draft trees in vLLM can be told: a server's options, and what one request may change.

A server's options travel in vLLM's `--additional-config '{"ddtree": {...}}'`, a request's in
`SamplingParams.extra_args`, which is `vllm_xargs` over HTTP. Knows nothing of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from ddtree.config import AUTO, MAX_BUDGET, check_whole
from ddtree.errors import OptionError, listed
from ddtree.types import METHODS, Method

SECTION = "ddtree"
DEFAULT_MAX_NODES = 16
# The keys of a request begin with this; all other keys belong to other extensions.
_REQUEST_PREFIX = "ddtree_"
_REQUEST_KEYS = ("ddtree_method", "ddtree_budget")


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How a server drafts.

    Args:
        method: "ddtree" (trees), "dflash" (the drafter's chain through the same code) or "ar" (no
            drafts).
        budget: the most nodes of a request's tree besides the root, at most `max_nodes`; 0 means
            no speculation. "auto" gives every step as many as pay on this machine.
        max_nodes: B, for which vLLM's buffers are made: its `num_speculative_tokens`.
        max_batch_rows: the most rows, roots included, of the trees of a step over all requests;
            None means no such limit.
        lookup: let a tree also propose what followed the same tokens earlier in the text.
        transitions: use the drafter's transition head, where it has one.

    Raises:
        OptionError: an option outside its range or of the wrong type.

    >>> ServingOptions(budget=8).max_nodes
    16
    """

    method: Method = "ddtree"
    budget: int | Literal["auto"] = "auto"
    max_nodes: int = DEFAULT_MAX_NODES
    max_batch_rows: int | None = None
    lookup: bool = True
    transitions: bool = True

    def __post_init__(self) -> None:
        _check_method("method", self.method)
        check_whole(
            "max_nodes",
            self.max_nodes,
            low=1,
            high=MAX_BUDGET,
            remedy="16 is enough for a CPU, 64 for most GPUs.",
        )
        if self.budget != AUTO:
            check_whole(
                "budget",
                self.budget,
                low=0,
                high=self.max_nodes,
                or_else=AUTO,
                remedy="auto measures what pays, 0 does not speculate; raise max_nodes for more.",
            )
        if self.max_batch_rows is not None:
            check_whole(
                "max_batch_rows",
                self.max_batch_rows,
                low=1,
                or_else="null",
                remedy="Leave it out for no limit over all requests.",
            )
        _check_flag("lookup", self.lookup, "false drafts by the drafter alone.")
        _check_flag("transitions", self.transitions, "false leaves the transition head out.")

    def as_additional_config(self) -> dict[str, dict[str, object]]:
        """The value of vllm's `--additional-config` that says these options.

        >>> ServingOptions(method="ar").as_additional_config()["ddtree"]["method"]
        'ar'
        """
        return {SECTION: asdict(self)}


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What one request asks for; None stands for the server's own option.

    Args:
        method: "ddtree", "dflash" or "ar".
        budget: the most nodes of this request's trees; 0 means no speculation.
    """

    method: Method | None = None
    budget: int | None = None


def serving_options(
    additional_config: object, *, num_speculative_tokens: int | None = None
) -> ServingOptions:
    """A server's options from vLLM's `additional_config`.

    Args:
        additional_config: the parsed value of `--additional-config`, or None. Sections other than
            "ddtree" belong to other extensions and are not looked at.
        num_speculative_tokens: vLLM's, which is then `max_nodes`; None where there is no engine.

    Raises:
        OptionError: an unknown option, one of the wrong type or outside its range, or a `max_nodes`
            that is not `num_speculative_tokens`.

    >>> serving_options({"ddtree": {"budget": 4}}, num_speculative_tokens=7).max_nodes
    7
    """
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    given = {} if section is None else section
    if not isinstance(given, Mapping):
        raise OptionError(
            _name(),
            expected="an object of options",
            got=repr(given),
            remedy='For example --additional-config \'{"ddtree": {"budget": 8}}\'.',
        )
    known = [field.name for field in fields(ServingOptions)]
    for key in given:
        if key not in known:
            raise OptionError(
                _name(str(key)),
                expected=f"one of {', '.join(known)}",
                got=repr(key),
                remedy="Leave it out, or check how it is spelled.",
            )
    if num_speculative_tokens is None:
        return ServingOptions(**given)
    options = ServingOptions(**{"max_nodes": num_speculative_tokens, **given})
    if options.max_nodes != num_speculative_tokens:
        raise OptionError(
            _name("max_nodes"),
            expected=f"num_speculative_tokens of --speculative-config, {num_speculative_tokens}",
            got=options.max_nodes,
            remedy="Leave max_nodes out: it is num_speculative_tokens.",
        )
    return options


def request_options(
    extra_args: Mapping[str, object] | None, *, max_nodes: int = MAX_BUDGET
) -> RequestOptions:
    """What a request asks for in `SamplingParams.extra_args` (`vllm_xargs` over HTTP).

    Args:
        extra_args: its keys "ddtree_method" and "ddtree_budget" are read; keys that do not begin
            with "ddtree_" belong to others.
        max_nodes: the server's B; a "ddtree_budget" beyond it is B.

    Raises:
        OptionError: an unknown key that begins with "ddtree_", or a value out of range.

    >>> request_options({"ddtree_budget": 4})
    RequestOptions(method=None, budget=4)
    """
    given = {k: v for k, v in (extra_args or {}).items() if str(k).startswith(_REQUEST_PREFIX)}
    unknown = [key for key in given if key not in _REQUEST_KEYS]
    if unknown:
        raise OptionError(
            listed(unknown),
            expected=f"one of {', '.join(_REQUEST_KEYS)}",
            got=listed(map(repr, unknown)),
            remedy="Leave it out, or check how it is spelled.",
        )
    method, budget = (given.get(key) for key in _REQUEST_KEYS)
    if method is not None:
        _check_method("ddtree_method", method)
    if budget is not None:
        check_whole(
            "ddtree_budget",
            budget,
            low=0,
            high=MAX_BUDGET,
            remedy="0 does not speculate; without it the server's own budget is used.",
        )
        budget = min(budget, max_nodes)  # type: ignore[call-overload]
    return RequestOptions(method=method, budget=budget)  # type: ignore[arg-type]


def _name(key: str | None = None) -> str:
    return f"--additional-config {SECTION}" + ("" if key is None else f".{key}")


def _check_method(name: str, value: object) -> None:
    if value not in METHODS:
        raise OptionError(
            name,
            expected=f"one of {', '.join(METHODS)}",
            got=repr(value),
            remedy="Use ddtree for draft trees, dflash for the chain, ar for plain decoding.",
        )


def _check_flag(name: str, value: object, remedy: str) -> None:
    if not isinstance(value, bool):
        raise OptionError(name, expected="true or false", got=repr(value), remedy=remedy)
