"""What modules keep besides parameters and persistent buffers: in a checkpoint, and in a step that is dropped."""

import copy
import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift_ft.errors import ServiceError
from swift_ft.state import module_state
from swift_ft.state.module_state import KeptModules, ModuleState, is_plain
from swift_ft.state.tree import join, split


class Meter:
    """An object of the trainer's own."""

    def __init__(self) -> None:
        self.seen = 0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_buffer("saved", torch.zeros(3))
        self.count = 0
        self.mean = torch.zeros(2)
        self.bank = np.zeros(2)
        self.past: deque[int] = deque([1], 3)
        self.stats: dict[str, Any] = {"best": [9.0], "seen": set[int]()}
        self.first = self.linear.weight[0]  # a view of a parameter
        self.meter = Meter()
        self.numbers = itertools.count()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.rate = 0.1


def change(part: Any) -> None:
    part.count += 1
    part.mean.add_(1)
    part.table += 2
    part.bank += 3
    part.past.append(2)
    part.stats["best"][0] = 8.0
    part.stats["seen"].add(5)


def told(part: Any) -> Any:
    values = part.count, part.mean.tolist(), part.table.tolist(), part.bank.tolist()
    return *values, list(part.past), copy.deepcopy(part.stats)


def process(module: nn.Module | None = None) -> tuple[ModuleState, Any]:
    """A new one: its module as the script makes it."""
    torch.manual_seed(0)
    state, module = ModuleState(), module or Model()
    state.remember({"m": module})
    return state, module


def saved(state: ModuleState) -> dict[str, Any]:
    """Through a checkpoint."""
    tensors, skeleton = split(state.state())
    loaded: dict[str, Any] = join(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})
    return loaded


CHANGED = {f"m.part.{name}" for name in ("count", "mean", "buffer.table", "bank", "past", "stats")}


class TestAcrossProcesses:
    def test_a_process_that_has_changed_nothing_tells_nothing(self) -> None:
        state, _ = process()
        found = state.state()
        assert (found["values"], found["gone"]) == ({}, [])

    def test_what_a_step_changes_is_there_in_another_process(self) -> None:
        (state, model), (other, twin) = process(), process()
        change(model.part)
        assert set(state.state()["values"]) == CHANGED, "not parameters, saved buffers, views and objects"
        other.load(saved(state))
        assert told(twin.part) == told(model.part)
        assert twin.part.past.maxlen == 3

    def test_it_goes_into_what_is_there_so_that_other_names_see_it(self) -> None:
        (state, model), (other, twin) = process(), process()
        part = twin.part
        mean, table, bank, past, best = part.mean, part.table, part.bank, part.past, part.stats["best"]
        row = part.table[1:]
        change(model.part)
        other.load(saved(state))
        assert part.mean is mean
        assert part.table is table
        assert part.bank is bank
        assert part.past is past
        assert part.stats["best"] is best
        assert best == [8.0]
        assert row.tolist() == [2.0, 2.0]

    def test_what_is_as_it_was_at_the_beginning_is_so_again(self) -> None:
        """The process has gone further than the checkpoint that it goes back to."""
        state, model = process()
        begin, first = saved(state), told(model.part)
        mean = model.part.mean
        change(model.part)
        state.load(begin)
        assert told(model.part) == first
        assert model.part.mean is mean

    def test_names_that_a_step_makes_or_deletes(self) -> None:
        (state, model), (other, twin) = process(), process()
        model.part.cache = torch.ones(2)
        model.part.register_buffer("made", torch.ones(1), persistent=False)
        del model.part.count
        twin.part.passing = 1
        other.load(saved(state))
        assert twin.part.cache.tolist() == [1.0, 1.0]
        assert twin.part.made.tolist() == [1.0]
        assert "made" not in twin.part.state_dict()
        assert not hasattr(twin.part, "count")
        assert not hasattr(twin.part, "passing")
        other.load(begin := saved(process()[0]))
        assert not hasattr(twin.part, "cache")
        assert twin.part.count == 0
        assert begin["gone"] == []

    def test_frozen_parameters_and_modules_that_evaluate(self) -> None:
        (state, model), (other, twin) = process(), process()
        model.part.linear.weight.requires_grad_(False)
        model.part.linear.eval()
        twin.part.linear.bias.requires_grad_(False)
        twin.eval()
        found = saved(state)
        assert found["frozen"] == {"m": ["part.linear.weight"]}
        assert found["evaluating"] == {"m": ["part.linear"]}
        other.load(found)
        assert [name for name, p in twin.named_parameters() if not p.requires_grad] == ["part.linear.weight"]
        assert [name for name, part in twin.named_modules() if not part.training] == ["part.linear"]

    def test_objects_are_the_trainers_to_register(self) -> None:
        (state, model), (other, twin) = process(), process()
        model.part.meter.seen = 5
        next(model.part.numbers)
        model.part.mixed = [1, Meter()]
        assert state.state()["values"] == {}
        twin.part.meter.seen = 7
        other.load(saved(state))
        assert twin.part.meter.seen == 7

    def test_a_view_of_a_parameter_stays_one(self) -> None:
        (state, model), (other, twin) = process(), process()
        with torch.no_grad():
            model.part.linear.weight += 1
        assert state.state()["values"] == {}
        other.load(saved(state))
        assert twin.part.first.data_ptr() == twin.part.linear.weight.data_ptr()

    def test_what_was_a_view_of_a_parameter_at_the_beginning_is_not_loaded_into_that(self) -> None:
        """The old `spectral_norm` begins so."""
        (state, model), (other, twin) = process(), process()
        model.part.first = model.part.linear.weight.detach()[0] * 2
        weight = twin.part.linear.weight.detach().clone()
        other.load(saved(state))
        assert torch.equal(twin.part.linear.weight, weight)
        assert torch.equal(twin.part.first, model.part.first)

    def test_what_is_too_large_to_keep_is_named_only_if_it_is_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module_state, "_KEPT_BYTES", 4)
        state, model = process()
        begin = saved(state)
        state.load(begin)
        model.part.mean.add_(1)
        later = saved(state)
        assert later["values"]["m.part.mean"].tolist() == [1.0, 1.0]
        state.load(later)
        with pytest.raises(ServiceError, match=r"m\.part\.mean of a module has changed, and is too large"):
            state.load(begin)

    def test_attributes_of_torchs_own_wrappers_are_torchs(self) -> None:
        inner = Part()
        state, _ = process(nn.DataParallel(inner))
        assert all(path.startswith("m.module.") for path in state._begin)
        assert state._begin

    def test_names_of_the_buffers_that_the_class_has_made(self) -> None:
        state, model = process()
        model.part.register_buffer("later", torch.ones(1))
        assert state.names_at_begin("m") == {"part.table", "part.saved"}
        assert state.names_at_begin("another") == set()


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, True),
        ([1, (2.0, {"a": {3}}), torch.ones(1), np.zeros(2)], True),
        (torch.float32, True),
        ([object()], False),
        ({"a": lambda: None}, False),
        (np.array([object()]), False),
        (nn.Parameter(torch.ones(1)), False),
        (torch.eye(2).to_sparse(), False),
        (torch.empty(1, device="meta"), False),
        (list(range(5000)), False),
        (itertools.count(), False),
        (iter([1]), False),
    ],
)
def test_plain_is_what_can_be_told(value: Any, wanted: bool) -> None:
    assert is_plain(value) is wanted


def begun(change: Any = lambda model: None) -> tuple[Any, KeptModules]:
    """A step has begun, with a model that was changed before."""
    change(model := Model())
    kept = KeptModules([model])
    kept.keep()
    return model, kept


class TestADroppedStep:
    def test_all_is_as_it_was_in_the_objects_that_were_there(self) -> None:
        model, kept = begun()
        part = model.part
        before, mean, best = told(part), part.mean, part.stats["best"]
        saved_buffer = part.saved
        assert not kept.changed
        change(part)
        part.mean = part.mean * 2  # another tensor
        part.saved = part.saved + 1
        part.stats["new"] = 1
        part.cache = torch.ones(1)
        model.rate = 0.5
        assert kept.changed
        kept.restore()
        assert told(part) == before
        assert part.mean is mean
        assert part.stats["best"] is best
        assert part.saved is saved_buffer
        assert not hasattr(part, "cache")
        assert model.rate == 0.1

    def test_a_step_that_is_done_is_not_taken_back(self) -> None:
        model, kept = begun()
        change(model.part)
        kept.forget()
        after = told(model.part)
        kept.restore()
        assert told(model.part) == after

    @pytest.mark.parametrize("place", ["count", "mean", "table", "bank", "past", "best"])
    def test_each_kind_of_change_is_seen(self, place: str) -> None:
        model, kept = begun()
        part = model.part
        match place:
            case "count":
                part.count = 1
            case "best":
                part.stats["best"].append(1)
            case "past":
                part.past.append(2)
            case _:
                getattr(part, place)[0] = 1
        assert kept.changed
        kept.restore()
        assert told(part) == told(Part())

    def test_not_a_number_is_no_change(self) -> None:
        _, kept = begun(lambda model: model.part.mean.fill_(float("nan")))
        assert not kept.changed

    def test_parameters_that_were_frozen_or_thawed_are_so_no_more(self) -> None:
        model, kept = begun(lambda model: model.part.linear.bias.requires_grad_(False))
        model.part.linear.bias.requires_grad_(True)
        model.part.linear.weight.requires_grad_(False)
        kept.restore()
        assert not model.part.linear.bias.requires_grad
        assert model.part.linear.weight.requires_grad

    def test_views_of_parameters_are_not_written_to(self) -> None:
        """An update has begun: the parameter is undone by other means, and the view with it."""
        model, kept = begun()
        with torch.no_grad():
            model.part.linear.weight += 1
        after = model.part.linear.weight.clone()
        assert not kept.changed
        kept.restore()
        assert torch.equal(model.part.linear.weight, after)

    def test_parameters_are_kept_where_that_is_asked_for(self) -> None:
        model, besides = Model(), torch.zeros(2)
        kept = KeptModules([model], parameters=True)
        before = model.part.linear.weight.clone()
        kept.keep([besides])
        with torch.no_grad():
            model.part.linear.weight += 1
        besides += 1
        assert kept.changed
        kept.restore()
        assert torch.equal(model.part.linear.weight, before)
        assert besides.tolist() == [0.0, 0.0]

    def test_large_tensors_that_stand_are_copied_once(self) -> None:
        model, kept = begun(lambda model: setattr(model.part, "mean", torch.zeros(1 << 15)))
        first = kept._copies[id(model.part.mean)]
        kept.keep()
        assert kept._copies[id(model.part.mean)] is first
        model.part.mean[0] = 1
        kept.keep()
        assert kept._copies[id(model.part.mean)] is not first
        model.part.mean[0] = 2
        kept.restore()
        assert model.part.mean[0] == 1

    def test_a_large_tensor_that_is_written_by_data_is_as_it_was_when_the_step_began(self) -> None:
        """Its version counter says nothing."""
        model = Model()
        model.part.register_buffer("codes", torch.zeros(1 << 15))
        kept = KeptModules([model])
        for step in range(9):
            kept.keep()
            model.part.codes.data.add_(1)
            if step % 2:
                assert not kept.lacks_values
                kept.restore()
                kept.keep()
                model.part.codes.data.add_(1)
        assert model.part.codes.unique().tolist() == [9.0]

    def test_a_large_tensor_that_is_written_by_data_only_later_has_no_value_to_go_back_to_once(self) -> None:
        model = Model()
        model.part.register_buffer("codes", torch.zeros(1 << 15))
        kept = KeptModules([model])
        for _ in range(6):
            kept.keep()
        assert not kept.lacks_values
        model.part.codes.data[7] = 1
        assert kept.lacks_values
        kept.restore()
        model.part.codes.data.fill_(2)  # a checkpoint
        for _ in range(2):
            kept.keep()
            model.part.codes.data.add_(1)
            assert not kept.lacks_values
        kept.restore()
        assert model.part.codes.unique().tolist() == [3.0]

    def test_a_tensor_that_was_resized_has_its_shape_again(self) -> None:
        model, kept = begun()
        mean = model.part.mean
        with torch.no_grad():
            model.part.mean.resize_(5).fill_(1)
        assert kept.changed
        kept.restore()
        assert model.part.mean is mean
        assert mean.tolist() == [0.0, 0.0]

    def test_containers_that_hold_one_another(self) -> None:
        ring: list[Any] = [1]
        model, kept = begun(lambda model: model.part.stats.update(one=ring, two=ring))
        ring.append(2)
        kept.restore()
        assert model.part.stats["one"] is model.part.stats["two"] is ring
        assert ring == [1]
