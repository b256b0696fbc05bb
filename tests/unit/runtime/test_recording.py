"""What a rank records of its steps, and in which of them."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.record import Record, RecordKey
from swift_ft.train.config import SessionConfig
from swift_ft.train.recording import (
    STEPS,
    TIMES_AT_START,
    Recording,
    Tape,
    ThoroughWatch,
    decoded,
    encoded,
    results,
    told_digests,
    transcripts,
)
from swift_ft.train.step_digests import Witness
from swift_ft.train.transcript import ENTERS, GIVEN, GRADIENT, LEAVES, STATE, Seen
from tests.log_client import owned_bytes
from tests.unit.runtime.wired import ignored, site_of, step_of


def witness_of() -> Witness:
    return Witness(ignored, lambda: False, ignored)


def record_of(tensor: torch.Tensor) -> Record:
    """As it comes out of the log."""
    dtype, shape, body = owned_bytes(tensor)
    return Record(RecordKey(0, 0, 0), dtype, shape, body, b"", 1, 0)


numbers = st.integers(0, 2**31)
seen = st.builds(Seen, st.sampled_from([STATE, ENTERS, GIVEN]), numbers, numbers, numbers, st.text())
place = st.tuples(st.text(), numbers)


@given(
    st.dictionaries(seen, st.binary(max_size=16)),
    st.dictionaries(place, st.lists(st.binary(max_size=9), max_size=3)),
    st.booleans(),
)
def test_what_is_encoded_comes_back_in_its_order(
    transcript: dict[Seen, bytes], gotten: dict[tuple[str, int], list[bytes]], held: bool
) -> None:
    tensors = {at: [torch.tensor(list(each), dtype=torch.uint8) for each in of] for at, of in gotten.items()}
    again, there, held_again = decoded(record_of(encoded(transcript, tensors, held=held)))
    assert list(again.items()) == list(transcript.items())
    assert there == [(group, number, len(of)) for (group, number), of in gotten.items()]
    assert held_again is held


def test_every_part_of_a_state_has_its_name() -> None:
    state = {
        "optimizer 0": {"state": {3: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
        "register(x=...)": OrderedDict(epoch=1, order=[1, 2]),
        "register(n=...)": 5,
    }
    first = dict(told_digests(state))
    assert "optimizer 0.state.3.step" in first
    assert {"register(x=...).epoch", "register(x=...).order", "register(n=...)"} < set(first)

    def differing() -> set[str]:
        other = dict(told_digests(state))
        return {name for name in first | other if first.get(name) != other.get(name)}

    assert differing() == set()
    state["register(x=...)"]["epoch"] = 2  # type: ignore[index]
    assert differing() == {"register(x=...).epoch"}
    state["optimizer 0"]["state"][3]["step"] += 1  # type: ignore[index]
    assert differing() == {"register(x=...).epoch", "optimizer 0.state.3.step"}
    state["register(x=...)"]["new"] = 1  # type: ignore[index]
    assert "the keys of register(x=...)" in differing()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.twice(self.first(x)))


BEGUN: list[ThoroughWatch] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """A watch that goes on is a mode of torch's in all tests behind it."""
    yield
    while BEGUN:
        BEGUN.pop().end()


class Watched:
    """A model of one stage, that is watched as in a recorded step."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = module or Model()
        self.stage = SimpleNamespace(submod=self.module, inferring=False)
        self.witness = witness_of()
        named = {parameter: f"0.{name}" for name, parameter in self.module.named_parameters()}
        self.watch = ThoroughWatch(self.witness, [self.stage], lambda: named)

    def begin(self, step: int = 0) -> None:
        self.witness.begin(step)
        self.watch.begin()
        BEGUN.append(self.watch)

    def seen(self) -> list[tuple[str, str, int]]:
        return [(each.kind, each.name, each.microbatch) for each in self.witness.transcript()]


def hooks_of(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


def test_what_goes_into_each_module_and_comes_out_is_seen_in_order() -> None:
    watched = Watched()
    watched.begin()
    watched.module(torch.ones(1, 2))
    assert watched.seen() == [
        (ENTERS, "(the whole)", 0),
        (ENTERS, "first", 0),
        (LEAVES, "first", 0),
        (ENTERS, "twice", 0),
        (LEAVES, "twice", 0),
        (ENTERS, "twice", 1),
        (LEAVES, "twice", 1),
        (LEAVES, "(the whole)", 0),
    ]


def test_hooks_are_there_for_their_step_alone() -> None:
    watched = Watched()
    assert hooks_of(watched.module) == 0
    watched.begin()
    assert hooks_of(watched.module) == 6
    watched.watch.end()
    assert hooks_of(watched.module) == 0
    before = watched.seen()
    watched.module(torch.ones(1, 2))
    assert watched.seen() == before


def test_a_copy_that_is_made_meanwhile_is_not_watched() -> None:
    """An average of the weights, say, which a trainer makes in its step."""
    watched = Watched()
    watched.begin()
    for twin in (copy.deepcopy(watched.module), pickle.loads(pickle.dumps(watched.module))):  # noqa: S301
        twin(torch.ones(1, 2))
    assert watched.seen() == []


def test_what_is_done_to_learn_shapes_is_not_seen() -> None:
    watched = Watched()
    watched.begin()
    watched.stage.inferring = True
    watched.module(torch.ones(1, 2))
    assert watched.seen() == []


class OptimizedModule(nn.Module):
    """As torch.compile makes it, which takes seconds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_what_is_compiled_is_one_thing() -> None:
    model = Model()
    inner, model.first = model.first, OptimizedModule(model.first)  # type: ignore[assignment]
    Watched(model).begin()
    assert [hooks_of(part) for part in (inner, model.first)] == [0, 0]
    assert hooks_of(model.twice) == 2
    whole = Model()
    whole._compiled_call_impl = whole._call_impl  # as whole.compile() leaves it
    Watched(whole).begin()
    assert hooks_of(whole) == 0


def test_gradients_are_seen_by_their_names_in_thorough_steps_alone() -> None:
    watched = Watched()
    parameters = list(watched.module.parameters())
    watched.begin()
    watched.module(torch.ones(1, 2)).sum().backward()
    before = len(watched.seen())
    watched.watch.gradients([*parameters, nn.Parameter(torch.ones(1))])
    watched.watch.gradients(parameters[:1])
    assert watched.seen()[before:] == [
        (GRADIENT, "0.first.weight", 0),
        (GRADIENT, "0.first.bias", 0),
        (GRADIENT, "0.twice.weight", 0),
        (GRADIENT, "0.twice.bias", 0),
        (GRADIENT, "0.first.weight", 1),
    ]
    watched.watch.end()
    watched.begin(1)
    watched.watch.end()
    watched.watch.gradients(parameters)
    assert watched.seen() == []


class Recorder:
    """A rank that records."""

    def __init__(self, rehearse: str = "start", **settings: Any) -> None:
        self.witness = witness_of()
        self.tape = Tape(self.witness)
        self.watch = ThoroughWatch(self.witness, [], dict)
        self.log: list[tuple[str, RecordKey, torch.Tensor]] = []
        config = SessionConfig(rehearse=rehearse, checkpoint_every=10, **settings)
        self.step = 0
        state = SimpleNamespace(
            updates=SimpleNamespace(held=True), begun_with=lambda: {"attribute": {"count": self.step}}
        )
        channel = SimpleNamespace(note=lambda *record: self.log.append(record))
        site = site_of(1, config, channel=channel, state=state, witness=self.witness)
        self.recording = Recording(site, self.watch, self.tape)

    def do(self, step: int, *, dropped: bool = False) -> None:
        self.witness.begin(step)
        self.step = step
        self.recording.begin_step(step_of(step))
        self.recording.step_begun(step_of(step))
        if self.recording.under_way:
            place = self.tape.gives("data", [torch.ones(1)])
            self.tape.gets(place, [torch.full((1,), 2.0)])
        if dropped:
            self.recording.drop_step()
        else:
            self.recording.end_step(step_of(step))

    def recorded(self) -> list[int]:
        return [key.step for stream, key, _ in self.log if stream == transcripts(1)]


def view_of(done: int = 0, **fields: Any) -> pb.View:
    return pb.View(world_size=4, rehearsals=[pb.Rehearsal(rank=1, done=done)], **fields)


def test_the_steps_behind_a_checkpoint_are_recorded_and_the_state_of_the_next_one() -> None:
    recorder = Recorder()
    assert recorder.recording.begins_at(10, view_of(), 7)
    for step in range(10, 20):
        recorder.do(step)
    assert recorder.recorded() == list(range(10, 10 + STEPS + 1))
    assert {key.microbatch for _, key, _ in recorder.log} == {7}, "the generation"
    transcript, there, held = decoded(record_of(recorder.log[0][2]))
    assert [each.kind for each in transcript] == [STATE, STATE, GIVEN]
    assert there == [("data", 0, 1)]
    assert held
    _, key, gotten = next(record for record in recorder.log if record[0] == results(1))
    assert (key, gotten.tolist()) == (RecordKey(10, 7, 0), torch.full((1,), 2.0).view(torch.uint8).tolist())
    transcript, there, held = decoded(record_of(recorder.log[-1][2]))
    assert [each.kind for each in transcript] == [STATE, STATE]
    assert there == []


def test_a_step_that_is_dropped_is_recorded_when_it_is_done_again() -> None:
    recorder = Recorder()
    recorder.recording.begins_at(10, view_of(), 7)
    recorder.do(10, dropped=True)
    assert recorder.log == []
    assert not recorder.recording.under_way
    recorder.do(10)
    assert recorder.recorded() == [10]


def test_nothing_is_recorded_behind_a_recovery() -> None:
    recorder = Recorder()
    recorder.recording.begins_at(10, view_of(), 7)
    recorder.recording.abandon()
    recorder.do(10)
    assert recorder.log == []


@pytest.mark.parametrize(
    ("rehearse", "done", "version", "fields", "wanted"),
    [
        ("off", 0, 10, {}, False),
        ("start", 0, 0, {}, True),
        ("start", TIMES_AT_START - 1, 10, {}, True),
        ("start", TIMES_AT_START, 10, {}, False),
        ("always", TIMES_AT_START, 10, {}, True),
        ("always", TIMES_AT_START, 20, {}, False),  # rank 2's turn
        ("always", TIMES_AT_START, 50, {}, True),
        ("start", 0, 10, {"vacant": {2: 5}}, False),
    ],
)
def test_each_rank_is_recorded_at_the_start_and_then_in_its_turn(
    rehearse: str, done: int, version: int, fields: dict[str, Any], wanted: bool
) -> None:
    recorder = Recorder(rehearse)
    assert recorder.recording.begins_at(version, view_of(done, **fields), 7) is wanted
    assert not recorder.recording.begins_at(version, None, 7)


def test_steps_that_go_on_without_their_vote_are_not_recorded() -> None:
    recorder = Recorder(strategy="adaptive", staggered=True, replicas=2)
    assert not recorder.recording.begins_at(10, view_of(), 7)
