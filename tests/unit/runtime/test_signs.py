"""Where people keep what a step changes: each is seen, and none is called changed that is as it was."""

import array
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import multiprocessing
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift.runtime import bulk
from swift.runtime.signs import Look, Signs

Change = Callable[[], object]


class Thing:
    count = 0

    def up(self) -> None:
        self.count += 1


class Ring(list[int]):
    position = 0


class Prefetcher(threading.Thread):
    batch = 0


class Odd(torch.Tensor):
    pass


def signs(value: Any) -> Signs:
    look = Look(set(), lambda _kind, _name: True)
    look.variable("it", value)
    return look.signs


def add(container: Any, key: Any, by: Any = 1) -> Change:
    return lambda: container.__setitem__(key, container[key] + by)


def with_attribute(value: Any, name: str) -> tuple[Any, Change]:
    setattr(value, name, 0)
    return value, lambda: setattr(value, name, getattr(value, name) + 1)


def the_middle_of_a_list_of_objects() -> tuple[Any, Change]:
    things = [Thing() for _ in range(1000)]
    return things, things[500].up


def the_middle_of_a_dict_of_objects() -> tuple[Any, Change]:
    things = {i: Thing() for i in range(1000)}
    return things, things[500].up


def the_middle_of_a_list_of_lists() -> tuple[Any, Change]:
    lists = [[0.0, [i]] for i in range(1000)]
    return lists, add(lists[500], 0)


def the_middle_of_a_list_of_tensors() -> tuple[Any, Change]:
    tensors = [torch.zeros(3) for _ in range(1000)]
    return tensors, lambda: tensors[500].add_(1)


def the_middle_of_a_list_of_arrays() -> tuple[Any, Change]:
    arrays = [np.zeros(3) for _ in range(1000)]
    return arrays, add(arrays[500], 1)


def the_middle_of_a_long_list_of_numbers() -> tuple[Any, Change]:
    tree = [1.0] * 200_000
    return tree, add(tree, 100_000)


def the_order_of_a_long_list() -> tuple[Any, Change]:
    order = list(range(150_000))
    return order, order.reverse


def the_order_of_a_dict() -> tuple[Any, Change]:
    found = dict.fromkeys("abc", 0)
    return found, lambda: found.__setitem__("a", found.pop("a"))


def the_items_of_a_large_set() -> tuple[Any, Change]:
    found = set(range(1000))
    return found, lambda: (found.discard(500), found.add(2000))


def the_middle_of_a_large_array() -> tuple[Any, Change]:
    table = np.zeros((1000, 1000))
    return table, add(table, (500, 501))


def a_field_of_an_array() -> tuple[Any, Change]:
    table = np.zeros(10_000, dtype=[("state", "f4", 4), ("action", "i8")])
    return table, lambda: table["action"].__setitem__(5000, 1)


def an_array_of_objects() -> tuple[Any, Change]:
    table = np.zeros(10, dtype=object)
    return table, add(table, 3)


def an_array_of_dates() -> tuple[Any, Change]:
    table = np.zeros(10, dtype="datetime64[s]")
    return table, add(table, 3)


def a_tensor_through_its_array() -> tuple[Any, Change]:
    tensor = torch.zeros(100, 100)
    return tensor, add(tensor.numpy(), (50, 50))


def a_tensor_of_a_class_of_ones_own() -> tuple[Any, Change]:
    tensor = torch.zeros(3).as_subclass(Odd)
    return tensor, lambda: tensor.add_(1)


def a_sparse_tensor() -> tuple[Any, Change]:
    box = [torch.eye(3).to_sparse()]
    return box, add(box, 0, torch.eye(3).to_sparse())


def a_buffer_of_bytes() -> tuple[Any, Change]:
    data = bytearray(8)
    return data, add(data, 3)


def an_array_of_the_standard_library() -> tuple[Any, Change]:
    data = array.array("d", [0.0] * 8)
    return data, add(data, 3)


def a_number_of_ctypes() -> tuple[Any, Change]:
    number = ctypes.c_long(0)
    return number, lambda: setattr(number, "value", number.value + 1)


def an_array_of_ctypes() -> tuple[Any, Change]:
    numbers = (ctypes.c_float * 8)()
    return numbers, add(numbers, 3)


def a_number_that_workers_see() -> tuple[Any, Change]:
    number = multiprocessing.Value("i", 0)
    return number, lambda: setattr(number, "value", number.value + 1)


def what_a_weak_reference_is_to() -> tuple[Any, Change]:
    thing = Thing()
    return (weakref.ref(thing), thing.up), thing.up  # (the method keeps it; it is not looked into)


def what_hangs_on_weak_keys() -> tuple[Any, Change]:
    key = Thing()
    found: Any = weakref.WeakKeyDictionary({key: 0})
    return found, add(found, key)


def weak_values() -> tuple[Any, Change]:
    thing = Thing()
    return weakref.WeakValueDictionary({"it": thing}), thing.up


def of_this_thread() -> tuple[Any, Change]:
    return with_attribute(threading.local(), "count")


def of_this_context() -> tuple[Any, Change]:
    variable = contextvars.ContextVar("variable", default=0)
    return variable, lambda: variable.set(variable.get() + 1)


def a_queue() -> tuple[Any, Change]:
    waiting: queue.Queue[int] = queue.Queue()
    waiting.put(1)
    return waiting, lambda: waiting.put(waiting.get() + 1)


def a_coroutine() -> tuple[Any, Change]:
    def average() -> Any:
        total = 0
        while True:
            total += yield total

    made = average()
    next(made)
    return made, lambda: made.send(2)


def a_user_dict() -> tuple[Any, Change]:
    class Registry(collections.UserDict[str, int]):
        pass

    found = Registry(count=0)
    return found, add(found, "count")


def deep_below() -> tuple[Any, Change]:
    lowest = Thing()
    top: Any = lowest
    for _ in range(20):
        top = types.SimpleNamespace(below=top)
    return top, lowest.up


@pytest.fixture
def text(tmp_path: Path) -> Iterator[io.TextIOWrapper]:
    path = tmp_path / "text"
    path.write_text("a line\n" * 10)
    with path.open() as file:
        yield file


CASES = [
    value
    for name, value in list(globals().items())
    if isinstance(value, types.FunctionType)
    and value.__module__ == __name__
    and name not in ("signs", "add", "with_attribute", "text")
] + [
    functools.partial(with_attribute, Ring([1, 2]), "position"),
    functools.partial(with_attribute, Prefetcher(), "batch"),
    functools.partial(with_attribute, nn.Parameter(torch.zeros(2)), "seen"),
    functools.partial(with_attribute, types.SimpleNamespace(), "count"),
]


@pytest.mark.parametrize("make", CASES, ids=lambda make: getattr(make, "__name__", None))
def test_it_is_seen(make: Callable[[], tuple[Any, Change]]) -> None:
    value, change = make()
    before = signs(value)
    assert signs(value) == before
    change()
    assert signs(value) != before


def test_a_file_that_is_read_is_somewhere(text: io.TextIOWrapper) -> None:
    before = signs(text)
    assert signs(text) == before
    text.readline()
    assert signs(text) != before
    next(text)  # from here on it does not tell where it is
    assert signs(text) != signs(text)


def test_a_large_variable_hides_none_that_stands_behind_it() -> None:
    large = {str(i): {str(j): j for j in range(200)} for i in range(200)}
    look = Look(set(), lambda _kind, _name: True)
    look.variable("large", large)
    look.variable("small", 1)
    assert look.signs["small\0"] == 1


def test_a_data_set_that_is_mapped_is_not_read(tmp_path: Path) -> None:
    np.zeros(1000, dtype=np.uint16).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", dtype=np.uint16, mode="r")
    assert signs(tokens) == {"it\0": ("uint16", (1000,))}


def test_a_library_is_no_other_for_having_been_called() -> None:
    library = ctypes.CDLL(None)
    before = signs([library])
    library.abs(1)
    assert signs([library]) == before


def test_a_file_that_is_written_decides_nothing() -> None:
    file = io.StringIO()
    before = signs([file])
    file.write("a line")
    assert signs([file]) == before


def test_strings_that_are_equal_are_the_same_to_it() -> None:
    def words() -> list[str]:
        return ["".join(("a", str(i % 7))) for i in range(1000)]

    assert bulk.digest(words(), str) == bulk.digest(words(), str)


@pytest.mark.parametrize(
    ("values", "new"),
    [(["x" * 40_000] * 300, "y"), ([Thing() for _ in range(bulk._OBJECTS_MAX + 10)], Thing())],
)
def test_a_dict_that_is_too_long_is_the_same_until_one_of_its_things_is_another(
    values: list[Any], new: Any
) -> None:
    """A vocabulary of 500,000 words was called changed, now and then, by a step that only read it."""
    found = {f"key{i}": value for i, value in enumerate(values)}
    before = signs(found)
    elsewhere = [
        [*values] for _ in range(100)
    ]  # so that nothing made while looking comes to lie where it lay
    assert signs(found) == before
    elsewhere.clear()
    found[f"key{len(values) - 20}"] = new
    assert signs(found) != before


def test_a_list_that_holds_itself_and_one_that_is_too_long_have_a_digest() -> None:
    def endless() -> Iterator[Any]:
        return itertools.repeat(None)

    circle: list[Any] = [1]
    circle.append(circle)
    objects = [Thing() for _ in range(bulk._OBJECTS_MAX + 10)]
    for long in (circle, objects, ["x" * 1_000_000] * 40):
        assert bulk.digest(long, lambda thing: getattr(thing, "count", 0)) == bulk.digest(
            long, lambda thing: getattr(thing, "count", 0)
        )
    before = bulk.digest(objects, lambda thing: thing.count)
    objects[-1] = Thing()
    assert bulk.digest(objects, lambda thing: thing.count) != before
    assert bulk.digest([endless()], lambda _thing: None)
