"""Options of a server and of a request: what is taken, and what each refusal names."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ddtree.errors import OptionError
from ddtree.serving.options import (
    RequestOptions,
    ServingOptions,
    request_options,
    serving_options,
)


def test_nothing_said_is_the_default() -> None:
    for nothing in (None, {}, {"ddtree": {}}, {"ddtree": None}, {"another": {"budget": "x"}}):
        assert serving_options(nothing) == ServingOptions()


def test_max_nodes_is_what_the_engine_has_room_for() -> None:
    assert serving_options({}, num_speculative_tokens=40).max_nodes == 40
    said = {"ddtree": {"max_nodes": 40, "budget": 40}}
    assert serving_options(said, num_speculative_tokens=40).budget == 40
    with pytest.raises(OptionError, match=r"max_nodes: expected num_speculative_tokens .* 16"):
        serving_options({"ddtree": {"max_nodes": 40}}, num_speculative_tokens=16)


def test_options_come_back_through_the_command_line() -> None:
    options = ServingOptions(
        method="dflash",
        budget=3,
        max_nodes=9,
        max_batch_rows=64,
        lookup=False,
        transitions=False,
    )
    said = json.loads(json.dumps(options.as_additional_config()))
    assert serving_options(said, num_speculative_tokens=9) == options


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServingOptions().budget = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"budgt": 3}, "--additional-config ddtree.budgt: expected one of method, budget"),
        ([1], "--additional-config ddtree: expected an object of options, got [1]"),
        ({"method": "eagle"}, "method: expected one of ar, dflash, ddtree, got 'eagle'"),
        ({"method": ["ar"]}, "method: expected one of ar, dflash, ddtree, got ['ar']"),
        ({"budget": -1}, "budget: expected a whole number from 0 to 16, or auto, got -1"),
        ({"budget": 17}, "budget: expected a whole number from 0 to 16, or auto, got 17"),
        ({"budget": True}, "budget: expected a whole number from 0 to 16, or auto, got True"),
        ({"budget": "8"}, "budget: expected a whole number from 0 to 16, or auto, got '8'"),
        ({"max_nodes": 0}, "max_nodes: expected a whole number from 1 to 4096, got 0"),
        ({"max_nodes": 5000}, "max_nodes: expected a whole number from 1 to 4096, got 5000"),
        ({"max_batch_rows": 0}, "max_batch_rows: expected a whole number >= 1, or null, got 0"),
        ({"max_batch_rows": 2.0}, "max_batch_rows: expected a whole number >= 1, or null"),
        ({"lookup": 1}, "lookup: expected true or false, got 1"),
        ({"transitions": "no"}, "transitions: expected true or false, got 'no'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(given: object, named: str) -> None:
    with pytest.raises(OptionError) as refused:
        serving_options({"ddtree": given})
    assert str(refused.value).startswith(named)


def test_a_request_without_options_of_ours_leaves_all_to_the_server() -> None:
    for args in (None, {}, {"kv_transfer_params": {}, "ngram_size": 3}):
        assert request_options(args) == RequestOptions(method=None, budget=None)


def test_a_request_chooses_its_method_and_its_budget() -> None:
    args = {"ddtree_method": "dflash", "ddtree_budget": 4, "ngram_size": 3}
    assert request_options(args) == RequestOptions(method="dflash", budget=4)
    assert request_options({"ddtree_budget": 0}).budget == 0


def test_a_budget_beyond_the_servers_is_the_servers() -> None:
    assert request_options({"ddtree_budget": 64}, max_nodes=16).budget == 16


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"ddtree_budgt": 3}, "ddtree_budgt: expected one of ddtree_method, ddtree_budget"),
        ({"ddtree_method": "x"}, "ddtree_method: expected one of ar, dflash, ddtree, got 'x'"),
        ({"ddtree_method": 3}, "ddtree_method: expected one of ar, dflash, ddtree, got 3"),
        ({"ddtree_budget": -1}, "ddtree_budget: expected a whole number from 0 to 4096, got -1"),
        ({"ddtree_budget": "4"}, "ddtree_budget: expected a whole number from 0 to 4096"),
        ({"ddtree_budget": 4.0}, "ddtree_budget: expected a whole number from 0 to 4096"),
        ({"ddtree_budget": 9999}, "ddtree_budget: expected a whole number from 0 to 4096"),
    ],
    ids=str,
)
def test_a_wrong_option_of_a_request_is_named(args: dict[str, object], named: str) -> None:
    with pytest.raises(OptionError) as refused:
        request_options(args)
    assert str(refused.value).startswith(named)
