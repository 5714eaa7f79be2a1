"""The key-value store against a plain list of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddtree.cache.store import KVStore

NUM_HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 4


def rows_of(numbers: list[int], width: int, sign: int) -> Tensor:
    """Rows that can be told apart in every head and channel."""
    number = torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]
    head = torch.arange(NUM_HEADS)[None, :, None, None]
    return sign * (1000 * number + 100 * head + torch.arange(width))


def append(store: KVStore, numbers: list[int]) -> None:
    store.append(rows_of(numbers, KEY_WIDTH, 1), rows_of(numbers, VALUE_WIDTH, -1))


def assert_holds(store: KVStore, numbers: list[int]) -> None:
    assert store.length == len(numbers) <= store.capacity
    assert torch.equal(store.keys, rows_of(numbers, KEY_WIDTH, 1))
    assert torch.equal(store.values, rows_of(numbers, VALUE_WIDTH, -1))


@given(st.integers(1, 12), st.data())
def test_any_sequence_of_operations_equals_a_list(capacity: int, data: st.DataObject) -> None:
    store, model, fresh = KVStore(capacity), list[int](), 0
    append(store, [])
    for _ in range(data.draw(st.integers(1, 12))):
        operation = data.draw(st.sampled_from(["append", "append", "keep", "crop"]))
        if operation == "append":
            new = list(range(fresh, fresh + data.draw(st.integers(0, 9))))
            fresh += len(new)
            append(store, new)
            model += new
        elif operation == "keep":
            start = data.draw(st.integers(0, len(model)))
            tail = list(range(len(model) - start))
            rows = data.draw(st.lists(st.sampled_from(tail), unique=True)) if tail else []
            store.keep(start, torch.tensor(rows, dtype=torch.int64))
            model = model[:start] + [model[start + row] for row in rows]
        else:
            length = data.draw(st.integers(0, len(model)))
            store.crop(length)
            model = model[:length]
        assert_holds(store, model)


@pytest.mark.parametrize("capacity", [1, 2, 3, 10])
def test_growth_keeps_what_was_there(capacity: int) -> None:
    store = KVStore(capacity)
    for number in range(40):
        append(store, [number])
        assert_holds(store, list(range(number + 1)))


def test_growth_is_by_half_so_appending_is_cheap_on_the_whole() -> None:
    store, capacities = KVStore(8), set()
    for number in range(200):
        append(store, [number])
        capacities.add(store.capacity)
    assert sorted(capacities) == [8, 12, 18, 27, 40, 60, 90, 135, 202]


def test_one_append_larger_than_the_growth_fits() -> None:
    store = KVStore(2)
    append(store, [0])
    append(store, list(range(1, 30)))
    assert_holds(store, list(range(30)))


def test_within_the_capacity_nothing_is_copied() -> None:
    store = KVStore(10)
    append(store, [0, 1])
    before = store.keys.data_ptr()
    append(store, [2, 3, 4])
    store.keep(2, torch.tensor([2]))
    assert store.keys.data_ptr() == before


def test_keep_is_safe_where_source_and_destination_overlap() -> None:
    store = KVStore(10)
    append(store, list(range(8)))
    store.keep(2, torch.tensor([1, 2, 3, 5]))
    assert_holds(store, [0, 1, 3, 4, 5, 7])
    store.keep(1, torch.tensor([4, 0, 3]))
    assert_holds(store, [0, 7, 1, 5])


def test_keep_of_no_rows_drops_all_from_start() -> None:
    store = KVStore(10)
    append(store, list(range(8)))
    store.keep(3, torch.tensor([], dtype=torch.int64))
    assert_holds(store, [0, 1, 2])


def test_the_next_append_overwrites_what_was_dropped() -> None:
    store = KVStore(10)
    append(store, list(range(6)))
    store.crop(2)
    append(store, [50, 51])
    assert_holds(store, [0, 1, 50, 51])


def test_keep_before_anything_was_appended_does_nothing() -> None:
    store = KVStore(4)
    store.keep(0, torch.tensor([], dtype=torch.int64))
    assert store.length == 0


def test_crop_beyond_the_length_is_a_bug() -> None:
    store = KVStore(4)
    append(store, [0])
    with pytest.raises(AssertionError):
        store.crop(2)


def test_memory_held_is_that_of_the_whole_buffer() -> None:
    store = KVStore(10)
    assert store.num_bytes == 0
    append(store, [0, 1])
    assert store.num_bytes == 4 * 10 * NUM_HEADS * (KEY_WIDTH + VALUE_WIDTH)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_entries_keep_the_dtype_they_came_in(dtype: torch.dtype) -> None:
    store = KVStore(1)
    for _ in range(4):
        store.append(torch.ones(1, 2, 1, 3, dtype=dtype), torch.ones(1, 2, 1, 3, dtype=dtype))
    assert store.keys.dtype == store.values.dtype == dtype
