"""Variables of a script that a step changes and nobody was told of: found, said once, and named after a failure."""

import array
import contextlib
import functools
import itertools
import random
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from swift.runtime import bulk
from swift.runtime.beside import Beside
from swift.runtime.reach import Reach
from swift.runtime.script import Script

Step = Callable[[int], object]


class Job:
    """One process's."""

    def __init__(
        self,
        *told: Any,
        transient: tuple[str, ...] = (),
        untellable: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.said: list[tuple[int, str]] = []
        self.script = Script(
            lambda: told,
            set(transient),
            lambda step, words: self.said.append((step, words)),
            warns=True,
            untellable=untellable,
            held=lambda _reads: {},
        )

    def run(self, step: Step, first: int, last: int) -> None:
        self.steps(step, first, last)
        self.script.look()

    def steps(self, step: Step, first: int, last: int, checkpoint_every: int = 5) -> None:
        for number in range(first, last):
            self.script.begin(number, step, tuple)
            step(number)
            self.script.end(number, checkpoint=(number + 1) % checkpoint_every == 0)

    def cut_short(self, step: Step, number: int) -> None:
        self.script.begin(number, step, tuple)
        step(number)
        self.script.drop(number)


def changes(
    step: Step, *told: Any, capsys: pytest.CaptureFixture[str], transient: tuple[str, ...] = ()
) -> str:
    """What is said of the step in an undisturbed run."""
    Job(*told, transient=transient).run(step, 0, 4)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1
    return lines[0].partition("changes ")[2].partition(", which")[0] if lines else ""


# --- as people write them ---

counter = 0
history: list[int] = []


def counts(step: int) -> None:
    global counter
    counter += 1


def appends(step: int) -> None:
    history.append(step)


def closure_number() -> Step:
    count = 0

    def train_step(step: int) -> None:
        nonlocal count
        count += 1

    return train_step


def closure_tensor() -> Step:
    hidden = torch.zeros(4)

    def train_step(step: int) -> None:
        hidden.add_(1)

    return train_step


def closure_large_tensor() -> Step:
    hidden = torch.zeros(1 << 20)

    def train_step(step: int) -> None:
        hidden[:8] += 1

    return train_step


def closure_array() -> Step:
    table = np.zeros((300, 300))

    def train_step(step: int) -> None:
        table.__iadd__(1)

    return train_step


def closure_generator() -> Step:
    rng = torch.Generator()

    def train_step(step: int) -> None:
        torch.rand(1, generator=rng)

    return train_step


def closure_numpy_generator() -> Step:
    rng = np.random.default_rng(0)

    def train_step(step: int) -> None:
        rng.random()

    return train_step


def closure_python_generator() -> Step:
    rng = random.Random(0)

    def train_step(step: int) -> None:
        rng.random()

    return train_step


def list_iterator() -> Step:
    batches = iter([1, 2, 3, 4, 5])

    def train_step(step: int) -> None:
        next(batches)

    return train_step


def zipped() -> Step:
    batches = enumerate(zip(itertools.count(), itertools.cycle([1, 2]), strict=False))

    def train_step(step: int) -> None:
        next(batches)

    return train_step


def generator_function() -> Step:
    def batches() -> Any:
        position = 0
        while True:
            yield position
            position += 1

    source = batches()

    def train_step(step: int) -> None:
        next(source)

    return train_step


def large_dict() -> Step:
    """The last loss of each sample, by which the next ones are drawn."""
    losses = dict.fromkeys(range(1000), 0.0)

    def train_step(step: int) -> None:
        losses[500] = losses[501] + step

    return train_step


def large_list() -> Step:
    ring: list[Any] = [[0]] * 1000

    def train_step(step: int) -> None:
        ring[500] = [len(ring[499]), step]

    return train_step


class Agent:
    def __init__(self) -> None:
        self.memory: deque[int] = deque(maxlen=3)
        self.noted = 0.0

    def remember(self, step: int) -> None:
        self.memory.append(step)
        self.noted = time.monotonic()  # nobody looks at it


class Trainer:
    """Most scripts that are longer than a page."""

    def __init__(self) -> None:
        self.agents = [Agent(), Agent()]
        self.best = float("inf")

    def train_step(self, step: int) -> None:
        self.agents[1].remember(step)
        self.best = min(self.best, -step)


@dataclass(slots=True)
class Slots:
    position: int = 0

    def next(self) -> int:
        self.position += 1
        return self.position


def with_slots() -> Step:
    loader = Slots()

    def train_step(step: int) -> None:
        loader.next()

    return train_step


class Total:
    value = 0

    @classmethod
    def add(cls) -> None:
        cls.value += 1


def class_attribute(step: int) -> None:
    Total.add()


def default_argument(step: int, cache: dict[int, int] = {}) -> None:  # noqa: B006
    cache[step] = step


def function_attribute(step: int) -> None:
    function_attribute.calls = getattr(function_attribute, "calls", 0) + 1  # type: ignore[attr-defined]


function_attribute.calls = 0  # type: ignore[attr-defined]


def behind_a_partial() -> Step:
    state = {"calls": 0}

    def inner(state: dict[str, int], step: int) -> None:
        state["calls"] += 1

    return functools.partial(inner, state)


def behind_a_decorator() -> Step:
    count = 0

    @torch.no_grad()
    def inner() -> None:
        nonlocal count
        count += 1

    def train_step(step: int) -> None:
        inner()

    return train_step


def behind_a_package() -> Step:
    """Whose wrapper does not say what it wraps: the session's own, say."""
    step = closure_number()
    namespace: dict[str, Any] = {}
    code = "def wrap(step):\n    def wrapped(number):\n        step(number)\n    return wrapped\n"
    exec(compile(code, torch.__file__, "exec"), namespace)
    found: Step = namespace["wrap"](step)
    return found


class Calls:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int) -> None:
        self.count += 1


def made_by_a_step() -> Step:
    def train_step(step: int) -> None:
        globals()["made_late"] = globals().get("made_late", 0) + 1

    return train_step


def attribute_made_by_a_step() -> Step:
    def train_step(step: int) -> None:
        train_step.calls = getattr(train_step, "calls", 0) + 1  # type: ignore[attr-defined]

    return train_step


class Made:
    def up(self) -> None:
        kind: Any = type(self)
        kind.ups = getattr(kind, "ups", 0) + 1


def class_attribute_made_by_a_step() -> Step:
    made = Made()
    return lambda step: made.up()


class Window(list[int]):
    """`list` may look at what a trainer's own code does not (`data` of a UserDict)."""

    def __init__(self) -> None:
        super().__init__([1])
        self.position = 0


def attribute_that_a_base_class_may_read() -> Step:
    window = Window()

    def train_step(step: int) -> None:
        window.position += 1

    return train_step


def average_of_weights() -> Step:
    average = nn.Linear(2, 2)

    def train_step(step: int) -> None:
        with torch.no_grad():
            average.weight.add_(1)

    return train_step


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (counts, "counter"),
        (appends, "history"),
        (closure_number(), "count"),
        (closure_tensor(), "hidden"),
        (closure_large_tensor(), "hidden"),
        (closure_array(), "table"),
        (closure_generator(), "rng"),
        (closure_numpy_generator(), "rng"),
        (closure_python_generator(), "rng"),
        (list_iterator(), "batches"),
        (zipped(), "batches"),
        (generator_function(), "source"),
        (large_dict(), "losses"),
        (large_list(), "ring"),
        (Trainer().train_step, "self.agents, self.best"),
        (with_slots(), "loader.position"),
        (class_attribute, "Total.value"),
        (default_argument, "cache"),
        (function_attribute, "function_attribute.calls"),
        (behind_a_partial(), "state"),
        (behind_a_decorator(), "count"),
        (behind_a_package(), "count"),
        (average_of_weights(), "average"),
        (Calls(), "Calls.count"),
        (made_by_a_step(), "made_late"),
        (attribute_made_by_a_step(), "train_step.calls"),
        (class_attribute_made_by_a_step(), "Made.ups"),
        (attribute_that_a_base_class_may_read(), "window"),
    ],
)
def test_what_a_step_changes_is_said_by_its_name(
    step: Step, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = changes(step, capsys=capsys)
    assert name in said


def test_what_torch_keeps_for_a_trainer_is_seen_too(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)

    def train_step(step: int) -> None:
        optimizer.step()
        scheduler.step()

    assert changes(train_step, optimizer, capsys=capsys).startswith(
        "scheduler._last_lr, scheduler._step_count"
    )


def optimizer_made_by_a_step(weight: nn.Parameter) -> Step:
    late: torch.optim.Optimizer | None = None

    def train_step(step: int) -> None:
        nonlocal late
        late = late or torch.optim.AdamW([weight])
        weight.grad = torch.ones_like(weight)
        if step:  # it has a state from then on
            late.step()

    return train_step


class Untold:
    def __init__(self) -> None:
        self.head = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, step: int) -> None:
        self.head(torch.ones(2)).sum().backward()
        self.optimizer.step()


def test_what_has_a_place_of_its_own_in_the_session_is_sent_there(capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer that a step made was named by each of its attributes, in two lines."""
    module = nn.Linear(1, 1)
    Job(module).run(optimizer_made_by_a_step(module.weight), 0, 4)
    assert capsys.readouterr().err.splitlines() == [
        "swift: train_step changes late, an optimizer which the session does not know: give it to "
        "session.optimizer(...) before session.run"
    ]
    Job().run(Untold().train_step, 0, 4)
    lines = [line.partition(" which")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "swift: train_step changes self.head, a module",
        "swift: train_step changes self.optimizer, an optimizer",
    ]


def test_what_no_step_depends_on_is_not_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = 0
    config = {"lr": 0.1, "nan": float("nan")}
    data = torch.arange(10.0)
    vocabulary = {str(i): i for i in range(1000)}
    criterion = nn.MSELoss()
    paths = tmp_path / "log"
    with (tmp_path / "file").open("w") as file, contextlib.ExitStack():

        def train_step(step: int) -> None:
            nonlocal last
            last = step  # assigned, and never read
            criterion(data, data * config["lr"] + len(vocabulary))
            file.write(str(paths))
            hash(paths)

        assert changes(train_step, capsys=capsys) == ""
    assert last == 3


def test_what_the_session_was_told_of_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    module, items = nn.Linear(2, 2), [1]
    module.count = 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def train_step(step: int) -> None:
        module.count += 1
        module(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        items.append(step)

    assert changes(train_step, module, optimizer, items, capsys=capsys) == ""


def test_what_need_not_last_is_named_by_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert changes(closure_number(), capsys=capsys, transient=("count",)) == ""
    assert changes(Trainer().train_step, capsys=capsys, transient=("self.best", "memory")) == ""


def test_a_change_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    Job().run(closure_number(), 0, 20)
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- failures ---


def test_nothing_is_inexact_without_a_failure() -> None:
    job = Job()
    job.run(closure_number(), 0, 12)
    assert job.said == []


def test_a_new_process_begins_anew() -> None:
    job = Job()
    job.run(closure_number(), 5, 8)
    assert [step for step, _ in job.said] == [5]
    assert job.said[0][1].startswith("count of the script began anew with the process: ")


def test_a_new_process_whose_script_changes_nothing_is_exact() -> None:
    job = Job()
    job.run(lambda step: None, 5, 8)
    assert job.said == []


def test_a_change_long_after_the_failure_is_found_at_the_next_checkpoint() -> None:
    epoch = 0

    def train_step(step: int) -> None:
        nonlocal epoch
        if step == 17:
            epoch += 1

    job = Job()
    job.run(train_step, 5, 20)
    assert [step for step, _ in job.said] == [5]


def test_a_step_that_is_cut_short_leaves_its_traces() -> None:
    job, step = Job(), closure_number()
    job.run(step, 0, 8)
    job.cut_short(step, 8)
    assert job.said == []  # not while the failure is handled
    job.run(step, 8, 9)
    assert [step for step, _ in job.said] == [8]
    assert "was changed by a step that was cut short" in job.said[0][1]


def test_a_step_that_is_cut_short_before_it_changes_anything_leaves_none() -> None:
    count = 0

    def train_step(step: int) -> None:
        nonlocal count
        count += step != 8

    job = Job()
    job.run(train_step, 0, 8)
    job.cut_short(train_step, 8)
    job.run(train_step, 8, 10)
    assert job.said == []


def test_a_change_that_was_not_known_of_before_is_found_in_a_step_that_is_cut_short() -> None:
    """It begins behind the first steps, and no checkpoint has looked at it yet: its traces were said by nobody."""
    count = 0

    def train_step(step: int) -> None:
        nonlocal count
        count += step >= 6

    job = Job()
    job.steps(train_step, 0, 8, checkpoint_every=100)
    job.cut_short(train_step, 8)
    job.steps(train_step, 8, 9)
    assert [step for step, _ in job.said] == [8]
    assert job.said[0][1].startswith("count of the script was changed by a step that was cut short")


def test_what_two_variables_share_is_not_taken_for_changed_by_a_step_that_is_cut_short() -> None:
    shared = Agent()

    def train_step(step: int) -> None:
        assert shared
        agent.count += step != 8

    agent = types.SimpleNamespace(count=0, shared=shared)
    job = Job()
    job.run(train_step, 0, 8)
    job.cut_short(train_step, 8)
    job.run(train_step, 8, 10)
    assert job.said == []


def test_a_long_list_that_is_known_to_change_may_have_been_changed_by_a_step_that_is_cut_short() -> None:
    history = [0.0] * 10_000

    def train_step(step: int) -> None:
        if step != 8:
            history[5000] += 1

    job = Job()
    job.run(train_step, 0, 8)
    job.cut_short(train_step, 8)
    job.run(train_step, 8, 9)
    assert [step for step, _ in job.said] == [8]


@pytest.mark.parametrize("transient", [(), ("history",)])
def test_a_long_list_that_is_known_to_change_costs_a_step_nothing(
    transient: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cost each one 12 ms for a million numbers, 60 ms for 5,000 objects."""
    history = [0.0] * 10_000

    def train_step(step: int) -> None:
        history.append(float(step))

    job = Job(transient=transient)
    job.run(train_step, 0, 5)
    digested: list[Any] = []
    monkeypatch.setattr(bulk, "digest", lambda container, _: digested.append(container))
    job.steps(train_step, 5, 9, checkpoint_every=100)
    assert digested == []
    job.script.look()
    assert len(digested) == (0 if transient else 1)


def test_looks_that_take_long_are_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of ten million numbers took 0.15 s at every checkpoint."""
    clock, looks, took_s = [0.0], [0], [0.0]
    look = Script._look

    def slow(script: Script, *args: Any, **options: Any) -> Any:
        looks[0] += 1
        clock[0] += took_s[0]
        return look(script, *args, **options)

    def train_step(step: int) -> None:
        clock[0] += 1.0

    monkeypatch.setattr(Script, "_look", slow)
    monkeypatch.setattr("swift.runtime.script.time.monotonic", lambda: clock[0])
    took_s[0] = 0.2
    job = Job()
    job.steps(train_step, 0, 3, checkpoint_every=100)
    assert looks[0] == 2  # at the beginning, and behind the first step
    job.steps(train_step, 3, 5)
    for took_s[0], first, seen in ((0.0, 100, 50), (0.2, 200, 5)):
        job.steps(train_step, first, first + 10, checkpoint_every=1)
        looks[0] = 0
        job.steps(train_step, first + 10, first + 60, checkpoint_every=1)
        assert looks[0] - 50 == pytest.approx(seen, abs=1)  # (each step's begin is one)
    looks[0] = 0
    job.script.look()
    assert looks[0] == 1


def test_a_failure_between_two_steps_cuts_none_short() -> None:
    job, step = Job(), closure_number()
    job.run(step, 0, 8)
    job.script.drop(8)
    job.run(step, 8, 10)
    assert job.said == []


class Slotted:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0

    def tick(self) -> int:
        self.seen += 1
        return self.seen


@pytest.mark.parametrize(
    ("make", "move"),
    [
        (itertools.count, next),
        (lambda: itertools.cycle([1, 2, 3]), next),
        (lambda: (number for number in range(99)), next),
        (Slotted, Slotted.tick),
        (lambda: array.array("i", [0]), lambda numbers: numbers.append(1)),
        (lambda: np.array([0, None]), lambda values: values.put(0, values[0] + 1)),
        (
            lambda: weakref.WeakKeyDictionary({Job: 0}),
            lambda counts: counts.update({Slotted: counts.get(Slotted, 0) + 1}),
        ),
    ],
)
def test_what_a_module_keeps_and_nobody_can_tell_is_seen_to_change(
    make: Callable[[], Any], move: Callable[[Any], Any]
) -> None:
    """The state of a module holds what it can: of an iterator nothing, though it is the same one all the time."""
    module = nn.Linear(2, 2)
    module.source = make()

    def train_step(step: int) -> None:
        module(torch.ones(1, 2))
        move(module.source)

    beside = Beside()
    beside.remember({"0": module})
    job = Job(module, untellable=beside.untellable)
    job.run(train_step, 3, 5)
    assert [step for step, _ in job.said] == [3]
    assert "module.source" in job.said[0][1]
    other = Job(module, untellable=beside.untellable)
    other.run(lambda step: module(torch.ones(1, 2)), 3, 5)
    assert other.said == []


def test_they_do_not_go_back_with_a_checkpoint() -> None:
    job, step = Job(), closure_number()
    job.run(step, 0, 8)
    job.run(step, 5, 8)
    assert [step for step, _ in job.said] == [5]
    assert "count of the script is of step 8" in job.said[0][1]


def test_nothing_lives_longer_for_having_been_looked_at() -> None:
    """Iterators of data loaders are told apart by whether they are still there (`swift.runtime.loaders`)."""

    def source() -> Any:
        while True:
            batch = Agent()
            yield weakref.ref(batch)
            del batch
            yield None

    batches, held = source(), [Agent()]
    references = [weakref.ref(held[0]), next(batches)]

    def train_step(step: int) -> None:
        if step == 2:
            held.clear()
            next(batches)

    job = Job()
    job.run(train_step, 0, 2)
    assert all(reference() is not None for reference in references)
    job.script.begin(2, train_step, tuple)
    train_step(2)  # looked at before it, and not yet after it
    assert all(reference() is None for reference in references)


def test_a_name_that_is_only_assigned_is_no_variable_of_the_step() -> None:
    def train_step(step: int) -> None:
        global counter
        counter = step

    assert "counter" not in Reach([train_step]).variables


def test_what_is_amiss_is_told_to_whoever_compares_replicas() -> None:
    job = Job()
    job.run(closure_number(), 0, 8)
    assert job.script.amiss == ""
    taken_over = Job()
    taken_over.run(closure_number(), 5, 8)
    assert taken_over.script.amiss == "count"


@pytest.mark.parametrize("again", [False, True])
def test_a_process_that_begins_again_at_step_0_has_what_its_first_steps_have_left(again: bool) -> None:
    """A module that stays imported (strategy "reinit", a spare that was warmed up): a new process has 0 there."""
    step = closure_number()
    Job().run(step, 0, 3)
    job = Job()
    if again:
        job.script.begin_again()
    job.run(step, 0, 3)
    assert bool(job.said) == again
    if again:
        assert job.said[0][0] == 0
