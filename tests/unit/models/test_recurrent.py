"""Recurrent layers over tree rows: each row equals the end of its own path, run as a sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from ddtree.cache.hf import cache_argument
from ddtree.cache.recurrent import RecurrentState, RecurrentStore
from ddtree.errors import UnsupportedModelError
from ddtree.models.delta_rule import DeltaRows, TreePaths, tree_delta_rule
from ddtree.models.recurrent import most_rows, recurrent_layers, rows_of_a_tree
from tests.support.architectures import HYBRIDS, loaded, tiny

# Any tree, by the parents of its nodes 1, 2, ...
trees = st.integers(0, 14).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n))))


def mask_of(parents: tuple[int, ...]) -> Tensor:
    """[N, N] bool: each row sees its ancestors and itself."""
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        mask[node] |= mask[parent]
    return mask


def path_of(mask: Tensor, row: int) -> list[int]:
    return torch.nonzero(mask[row])[:, 0].tolist()


def problem(num_rows: int, seed: int, *, heads: int = 4, shared: int = 2) -> dict[str, Tensor]:
    """Inputs of the rule: what real layers make, unit keys and all kinds of decays."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "queries": draw(shared, num_rows, 6),
        "keys": torch.nn.functional.normalize(draw(shared, num_rows, 6), dim=-1),
        "values": draw(heads, num_rows, 5),
        "log_decays": -draw(heads, num_rows).exp() * torch.tensor([0.0, 0.01, 1.0, 30.0])[:, None],
        "strengths": draw(heads, num_rows).sigmoid(),
        "state": draw(heads, 6, 5),
    }


def naive(inputs: dict[str, Tensor], path: list[int]) -> tuple[Tensor, Tensor]:
    """The last row's output and state: the rule, token by token and head by head."""
    heads = inputs["state"].shape[0]
    share = heads // inputs["keys"].shape[0]
    outputs, states = [], []
    for head in range(heads):
        state = inputs["state"][head].double()
        for row in path:
            key = inputs["keys"][head // share, row].double()
            state = state * inputs["log_decays"][head, row].double().exp()
            missing = inputs["values"][head, row].double() - key @ state
            state = state + torch.outer(key, inputs["strengths"][head, row].double() * missing)
        outputs.append(inputs["queries"][head // share, path[-1]].double() @ state)
        states.append(state)
    return torch.stack(outputs).float(), torch.stack(states).float()


@settings(max_examples=25)
@given(trees, st.integers(0, 3))
def test_every_row_of_any_tree_equals_its_path_token_by_token(
    parents: tuple[int, ...], seed: int
) -> None:
    mask = mask_of(parents)
    inputs = problem(len(mask), seed)
    outputs, rows = tree_delta_rule(**inputs, paths=TreePaths(mask, 0))
    for row in range(len(mask)):
        path = path_of(mask, row)
        output, state = naive(inputs, path)
        torch.testing.assert_close(outputs[:, row], output, atol=1e-5, rtol=1e-5)
        after = rows.state_after(inputs["state"], torch.tensor(path))
        torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-5)


def test_a_long_chain_is_the_rule_token_by_token() -> None:
    parents = tuple(range(99))
    inputs = problem(100, 7)
    outputs, rows = tree_delta_rule(**inputs, paths=TreePaths(mask_of(parents), 0))
    output, state = naive(inputs, list(range(100)))
    torch.testing.assert_close(outputs[:, -1], output, atol=1e-5, rtol=1e-5)
    after = rows.state_after(inputs["state"], torch.arange(100))
    torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-5)


def test_a_state_that_is_forgotten_at_once_makes_no_nan() -> None:
    inputs = problem(4, 0)
    inputs["log_decays"] = torch.full_like(inputs["log_decays"], -1e4)
    outputs, rows = tree_delta_rule(**inputs, paths=TreePaths(mask_of((0, 0, 2)), 0))
    state = rows.state_after(inputs["state"], torch.tensor([0, 2, 3]))
    assert outputs.isfinite().all()
    torch.testing.assert_close(state, naive(inputs, [0, 2, 3])[1])


@settings(max_examples=40)
@given(trees, st.integers(0, 5))
def test_a_window_holds_the_last_inputs_of_the_rows_own_path(
    parents: tuple[int, ...], width: int
) -> None:
    mask = mask_of(parents)
    windows = TreePaths(mask, width).windows
    for row in range(len(mask)):
        seen = [*range(width), *(width + r for r in path_of(mask, row))]
        assert windows[row].tolist() == seen[-width - 1 :]


PROMPT = torch.tensor([(7 * i + 3) % 61 for i in range(9)])
# Two branches of three levels below a root with three children.
PARENTS = (0, 0, 0, 1, 1, 2, 4, 6)
TOKENS = torch.tensor([5, 17, 42, 8, 23, 11, 2, 33, 60])


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_tree_forward_gives_every_row_the_logits_of_its_path_as_a_prompt(
    architecture: str,
) -> None:
    target, mask = loaded(architecture), mask_of(PARENTS)
    cache = target.new_cache(32)
    with torch.inference_mode():
        target.prefill(PROMPT, cache)
        verified = target.verify(TOKENS, mask.sum(1) - 1, mask, cache, capture=(0, 1))
        for row in range(len(mask)):
            path = torch.cat([PROMPT, TOKENS[path_of(mask, row)]])
            alone = target.prefill(path, target.new_cache(32), capture=(0, 1))
            torch.testing.assert_close(verified.logits[row], alone.logits[0], atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(
                verified.features[row], alone.features[-1], atol=2e-4, rtol=2e-4
            )


def states(target_cache: object) -> list[Tensor]:
    """All states of a cache, ours or the library's, the convolution's last inputs first."""
    if isinstance(target_cache, DynamicCache):
        layers = [layer for layer in target_cache.layers if hasattr(layer, "conv_states")]
        pairs = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in layers]
    else:
        stores = target_cache.recurrent_stores.values()  # type: ignore[attr-defined]
        pairs = [(store.state.conv, store.state.matrix) for store in stores]
    return [part for pair in pairs for part in pair if part is not None]


def assert_equal_to_rounding(ours: Tensor, theirs: Tensor) -> None:
    """Within a few units in the last place of the largest numbers that were summed."""
    scale = max(1.0, float(theirs.abs().max()))
    torch.testing.assert_close(ours, theirs, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("rows", [(), (0,), (0, 1), (0, 2, 6), (0, 1, 4, 7)])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_after_keep_the_states_are_those_of_the_librarys_own_cache(
    architecture: str, rows: tuple[int, ...]
) -> None:
    target, mask = loaded(architecture), mask_of(PARENTS)
    cache = target.new_cache(32)
    with torch.inference_mode():
        target.prefill(PROMPT[:4], cache)
        target.prefill(PROMPT[4:5], cache)
        target.prefill(PROMPT[5:], cache)
        target.verify(TOKENS, mask.sum(1) - 1, mask, cache)
        cache.keep(len(PROMPT), rows)
        kept = torch.cat([PROMPT, TOKENS[list(rows)]])
        library = DynamicCache(config=target.config)
        target.model(kept[None], use_cache=True, **{cache_argument(target.model): library})
    assert cache.length == len(kept)
    assert states(cache)
    for ours, theirs in zip(states(cache), states(library), strict=True):
        theirs = theirs[..., -ours.shape[-1] :]  # the library keeps one input more than is seen
        assert_equal_to_rounding(ours, theirs)


@pytest.mark.parametrize("rows", [(), (0,)])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_single_row_can_be_kept_or_dropped(architecture: str, rows: tuple[int, ...]) -> None:
    target, one = loaded(architecture), torch.zeros(1, dtype=torch.int64)
    cache, plain = target.new_cache(32), target.new_cache(32)
    with torch.inference_mode():
        target.prefill(PROMPT, cache)
        target.verify(TOKENS[:1], one, torch.ones(1, 1, dtype=torch.bool), cache)
        cache.keep(len(PROMPT), rows)
        target.prefill(torch.cat([PROMPT, TOKENS[list(rows)]]), plain)
    for ours, theirs in zip(states(cache), states(plain), strict=True):
        assert_equal_to_rounding(ours, theirs)


def test_the_model_is_as_before_after_a_forward_and_after_an_error() -> None:
    target, mask = loaded("qwen3_5"), mask_of(PARENTS)
    module = target.model.model.layers[0].linear_attn
    cache = target.new_cache(32)
    with torch.inference_mode():
        target.prefill(PROMPT, cache)
        target.verify(TOKENS, mask.sum(1) - 1, mask, cache)
    assert "forward" not in module.__dict__

    wrapped = module.forward
    module.forward = wrapped  # as accelerate's hooks do
    layers = recurrent_layers(target.config, target.model.model, "test")

    def interrupted() -> None:
        with rows_of_a_tree(layers, cache.recurrent_stores, mask):
            assert module.__dict__["forward"] is not wrapped
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert module.__dict__.pop("forward") is wrapped


def test_pending_rows_cost_what_the_formula_says() -> None:
    for architecture in HYBRIDS:
        target, mask = loaded(architecture), mask_of(PARENTS)
        layers = recurrent_layers(target.config, target.model.model, "test")
        cache = target.new_cache(32)
        with torch.inference_mode():
            target.prefill(PROMPT, cache)
            stores = cache.recurrent_stores.values()
            before = sum(store.num_bytes for store in stores)
            target.verify(TOKENS, mask.sum(1) - 1, mask, cache)
            pending = sum(store.num_bytes for store in stores) - before
            cache.keep(len(PROMPT), (0, 2, 6))
        assert pending == len(mask) * sum(layer.bytes_per_row for layer in layers.values())
        # What was pending is gone with the round.
        assert sum(store.num_bytes for store in stores) == before


@pytest.mark.parametrize(("memory", "expected"), [(0, 1), (999, 1), (10_000, 8), (2**20, 215)])
def test_the_most_rows_fit_into_the_memory_and_one_more_does_not(
    memory: int, expected: int
) -> None:
    model = tiny("qwen3_5")
    layer = recurrent_layers(model.config, model.model, "test")[0]
    layer.bytes_per_row, layer.bytes_per_pair = 500, 18
    rows = most_rows({0: layer, 1: layer}, memory)
    assert rows == expected

    def needed(num_rows: int) -> int:
        return num_rows * 1000 + num_rows**2 * 18

    assert needed(rows) <= memory or rows == 1
    assert needed(rows + 1) > memory


def test_a_model_without_attention_is_refused_by_its_layers() -> None:
    model = tiny("lfm2")
    config = type(model.config)(**{**model.config.to_dict(), "layer_types": ["conv"] * 2})
    with pytest.raises(UnsupportedModelError, match="2 layers of conv"):
        recurrent_layers(config, model.model, "test")


def test_rows_that_wait_for_a_decision_may_not_be_overlooked() -> None:
    store = RecurrentStore(RecurrentState(conv=torch.zeros(1, 2, 3), matrix=None))
    store.write_conv(torch.ones(1, 2, 3))
    with pytest.raises(AssertionError, match="neither kept nor dropped"):
        store.write_conv(torch.ones(1, 2, 3))
    store.keep(torch.tensor([], dtype=torch.int64))
    assert store.state.conv.sum() == 0
    with pytest.raises(AssertionError, match="no rows are pending"):
        store.keep(torch.tensor([0]))


def test_a_negative_control_a_row_that_forgets_its_path_is_noticed() -> None:
    """If rows started from the committed state, not their parent's, the tests above would fail."""
    inputs, mask = problem(3, 1), mask_of((0, 1))
    alone = TreePaths(torch.eye(3, dtype=torch.bool), 0)
    outputs, rows = tree_delta_rule(**inputs, paths=alone)
    assert isinstance(rows, DeltaRows)
    assert not torch.allclose(outputs[:, 2], naive(inputs, path_of(mask, 2))[0], atol=1e-2)
