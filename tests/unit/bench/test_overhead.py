"""What `swift-ft bench overhead` makes of its slices, and intervals of noisy ratios."""

import os
import random
import time

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.command import run
from swift_ft.lab.bench.overhead import Size, evaluate, measure, text
from swift_ft.lab.drill.topology import MODELS

SIZE = Size(model=MODELS["tiny"], goal=1.35)


def test_ratios_are_of_the_same_round_and_cpu_adds_up() -> None:
    rounds = [
        {
            "plain": {"step_s": slow, "cpu_s": {"ranks": 0.1 * slow}},
            "session": {"step_s": 2 * slow, "cpu_s": {"ranks": 0.1 * slow, "sidecars": 0.05 * slow}},
        }
        for slow in (1.0, 3.0, 2.0)
    ]
    found = evaluate("short", SIZE, rounds)
    assert found["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert (found["verdict"], found["step_ms"]) == ("missed", {"plain": 2000.0, "session": 4000.0})
    assert found["cpu_ms"]["session"] == {"ranks": pytest.approx(200), "sidecars": pytest.approx(100)}
    assert found["cpu_ratio"] == pytest.approx(1.5)
    assert text(found)[-2].split() == ["together", "200.00", "300.00"]


@pytest.mark.matrix
def test_every_process_of_a_session_is_counted() -> None:
    (found,) = measure(SIZE, rounds=1, slice_steps=3, stages=2)
    assert found["plain"]["cpu_s"].keys() == {"ranks"}
    others = {"sidecars", "log server", "coordinator", "launcher"}
    assert found["session"]["cpu_s"].keys() == {"ranks", *others}
    assert all(seconds > 0 for mode in found.values() for seconds in mode["cpu_s"].values())


def test_cpu_seconds_of_a_process() -> None:
    assert output.cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.005)


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
