"""What the overhead of a session is made of: the parts add up, and what is slow shows where it is."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.command import run
from swift_ft.lab.bench.cpu_attribution import BASE, ENDED, Meter, Threads
from swift_ft.lab.bench.overhead import METER, REST, SIDECARS, Size, accounts, evaluate, of_slice, text
from swift_ft.lab.bench.overhead_ranks import PARTS
from swift_ft.lab.drill.topology import MODELS

SIZE = Size(model=MODELS["tiny"], goal=1.35)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def seconds(meter: Meter) -> dict[str, float]:
    return {part: spent for part, (spent, _) in meter.taken().items()}


def test_a_moment_belongs_to_the_innermost_part() -> None:
    clock = Clock()
    meter = Meter(clock)
    inner = meter.wrapped(lambda: clock.pass_(3.0), "inner")

    def outside() -> None:
        clock.pass_(1.0)
        inner()
        inner()
        clock.pass_(0.5)

    outer = meter.wrapped(outside, "outer")
    outer()  # before `go`: not counted
    meter.go()
    clock.pass_(0.25)
    outer()
    taken = meter.taken()
    assert taken == {BASE: (0.25, 0), "outer": (1.5, 1), "inner": (6.0, 2)}
    assert sum(spent for spent, _ in taken.values()) == 7.75


def test_a_slice_may_begin_and_end_inside_of_parts() -> None:
    clock = Clock()
    meter = Meter(clock)
    found: list[dict[str, float]] = []

    def border() -> None:
        clock.pass_(1.0)
        found.append(seconds(meter))
        meter.go()
        clock.pass_(2.0)

    step = meter.wrapped(border, "step")
    step()
    clock.pass_(4.0)
    step()
    assert found == [{}, {"step": 3.0, BASE: 4.0}]


def test_a_part_that_raises_is_over() -> None:
    clock = Clock()
    meter = Meter(clock)

    def fails() -> None:
        clock.pass_(1.0)
        raise ValueError("on purpose")

    meter.go()
    with pytest.raises(ValueError, match="on purpose"):
        meter.wrapped(fails, "fails")()
    clock.pass_(2.0)
    assert seconds(meter) == {"fails": 1.0, BASE: 2.0}


def test_other_threads_are_not_of_its_parts() -> None:
    meter = Meter()
    burnt = meter.wrapped(lambda: burn(0.02), "burnt")
    meter.go()
    thread = threading.Thread(target=burnt)
    thread.start()
    thread.join()
    assert "burnt" not in meter.taken()


def burn(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def test_a_method_that_is_made_slower_shows_in_its_part_and_in_no_other() -> None:
    class Work:
        def quick(self) -> None:
            pass

        def slow(self) -> None:
            burn(0.02)

    meter = Meter()
    meter.wrap(Work, "quick", "quick")
    meter.wrap(Work, "slow", "slow")
    work = Work()
    meter.go()
    before = time.thread_time()
    work.quick()
    work.slow()
    took = time.thread_time() - before
    parts = seconds(meter)
    assert parts["slow"] >= 0.02
    assert parts["quick"] + parts[BASE] < 0.01
    assert sum(parts.values()) == pytest.approx(took, abs=0.005)


def test_threads_are_told_by_their_names_and_add_up_to_the_process() -> None:
    threads = Threads({"sender-": "senders"})
    done, stop = threading.Barrier(3), threading.Event()

    def work() -> None:
        burn(0.03)
        done.wait()
        stop.wait()

    lasting = [threading.Thread(target=work, name=f"sender-{n}") for n in range(2)]
    passing = threading.Thread(target=burn, args=(0.02,), name="passing")
    threads.taken()
    process, main = time.process_time(), time.thread_time()
    for thread in (*lasting, passing):
        thread.start()
    burn(0.01)
    passing.join()
    while Path(f"/proc/self/task/{passing.native_id}").exists():  # Python has ended it, the kernel not yet
        time.sleep(0.001)
    done.wait()
    found = threads.taken()
    process, main = time.process_time() - process, time.thread_time() - main
    stop.set()
    for thread in lasting:
        thread.join()
    assert found["senders"] >= 0.06
    assert found[ENDED] >= 0.02
    assert main + sum(found.values()) == pytest.approx(process, abs=0.005)
    assert output.cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.005)


def a_slice(**more: Any) -> dict[str, Any]:
    ranks = [
        {
            "seconds": 1.0,
            "drained_s": 0.01,
            "main_s": 0.8,
            "parts": {BASE: (0.1, 0), "optimizer": (0.3, 10), "vote": (0.4, 20)},
            "threads": {"runner": 0.2},
            **more,
        }
        for _ in range(2)
    ]
    return of_slice(ranks, [0.001, 0.001], {SIDECARS: 0.5}, steps=10)


PLAIN = of_slice(
    [
        {
            "seconds": 0.5,
            "drained_s": 0.0,
            "main_s": 0.3,
            "parts": {BASE: (0.1, 0), "optimizer": (0.2, 10)},
            "threads": {},
        }
    ]
    * 2,
    [0.001, 0.001],
    {},
    steps=10,
)


def test_the_parts_and_the_rest_add_up_to_the_overhead() -> None:
    metered = a_slice()
    parts = accounts(PLAIN, metered)
    assert metered["cpu_s"] == pytest.approx((2 * 0.8 + 2 * 0.2 + 0.5) / 10)
    assert sum(parts.values()) == pytest.approx(metered["cpu_s"] - PLAIN["cpu_s"])
    assert parts["vote"] == pytest.approx(2 * (0.4 - 0.02) / 10)  # without what reading the clock took
    assert parts["optimizer"] == pytest.approx(2 * 0.1 / 10)
    assert parts[METER] == pytest.approx(2 * 0.020 / 10)
    assert parts["runner"] == pytest.approx(2 * 0.2 / 10)
    assert parts[SIDECARS] == pytest.approx(0.5 / 10)
    assert parts[REST] == pytest.approx(0.0)


def test_what_no_part_claims_is_the_rest() -> None:
    longer = a_slice(main_s=0.9)  # and no part knows of it
    assert accounts(PLAIN, longer)[REST] == pytest.approx(2 * 0.1 / 10)


def test_means_over_rounds_still_add_up() -> None:
    generator = random.Random(0)
    rounds = []
    for _ in range(7):
        seconds = generator.uniform(0.5, 1.5)
        one = a_slice(main_s=0.5 + seconds, parts={BASE: (0.1, 0), "vote": (0.4 + seconds, 20)})
        rounds.append({"plain": PLAIN, "session": one, "metered": one})
    found = evaluate("short", SIZE, rounds)
    assert sum(found["parts_cpu_ms"].values()) == pytest.approx(found["overhead_cpu_ms"])
    assert found["ratio"]["median"] == pytest.approx(2.0)
    assert found["verdict"] == "missed"
    said = "\n".join(text(found))
    assert all(part in said for part in found["parts_cpu_ms"])
    assert list(found["parts_cpu_ms"])[-1] == REST


@pytest.mark.parametrize(
    ("low", "high", "goal", "said"),
    [
        (0.99, 1.03, 1.03, "met"),
        (0.99, 1.031, 1.03, "INCONCLUSIVE"),
        (1.031, 1.2, 1.03, "missed"),
        (1.03, 1.2, 1.03, "INCONCLUSIVE"),
        (0.90, 1.02, 1.03, "INCONCLUSIVE"),  # below the goal, but so wide that it shows nothing
    ],
)
def test_an_interval_on_both_sides_of_the_goal_says_nothing(
    low: float, high: float, goal: float, said: str
) -> None:
    assert output.verdict(low, high, goal) == said


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(5)
    samples = [[generator.gauss(1.0, 0.05) for _ in range(25)] for _ in range(120)]
    covered = sum(low <= 1.0 <= high for low, high in map(output.interval, samples))
    assert 0.88 <= covered / len(samples) <= 1.0
    assert output.interval(samples[0]) == output.interval(samples[0])
    assert output.interval([1.5]) == (1.5, 1.5)


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--slice-steps", "0"], ["--json", "/nowhere/here.json"]]
)
def test_bad_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        run("overhead", words)


def test_every_part_is_there() -> None:
    """A method that has got another name would not be metered."""
    for part, owner, methods in PARTS:
        assert all(callable(getattr(owner, name, None)) for name in methods.split()), part
