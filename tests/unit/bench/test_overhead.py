"""What `swift-ft bench overhead` makes of its slices, and intervals of noisy ratios."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.command import run
from swift_ft.lab.bench.overhead import Size, evaluate, evaluate_device, measure, text
from swift_ft.lab.drill.topology import MODELS
from tests.device import simulated

SIZE = Size(model=MODELS["tiny"], goal=1.35)


def test_ratios_are_of_the_same_round_and_cpu_adds_up() -> None:
    rounds = [
        {
            "plain": {"step_s": slow, "cpu_s": {"ranks": 0.1 * slow}, "records_s": []},
            "session": {
                "step_s": 2 * slow,
                "cpu_s": {"ranks": 0.1 * slow, "sidecars": 0.05 * slow},
                "records_s": [1e-4, 1e-5 * slow],
            },
        }
        for slow in (1.0, 3.0, 2.0)
    ]
    found = evaluate("short", SIZE, rounds)
    assert found["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert (found["verdict"], found["step_ms"]) == ("missed", {"plain": 2000.0, "session": 4000.0})
    assert found["cpu_ms"]["session"] == {"ranks": pytest.approx(200), "sidecars": pytest.approx(100)}
    assert found["cpu_ratio"] == pytest.approx(1.5)
    assert found["record_us"] == pytest.approx(65)
    assert text(found)[-3].split() == ["together", "200.00", "300.00"]


def answers(waits: int, held_s: float = 0.0, copies_s: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    """Of two ranks in a slice of two steps."""
    rank = {"waits": waits, "seconds": 1.0, "records_s": [5e-5, 7e-5, 6e-5], "copies_s": [], "held_s": 0.0}
    return [rank, {**rank, "copies_s": list(copies_s), "held_s": held_s}]


@pytest.mark.parametrize(
    ("recording", "late", "held_s", "verdict"),
    [(4, 4, 0.021, "PASS"), (5, 4, 0.021, "FAIL"), (4, 5, 0.021, "FAIL"), (4, 4, 0.038, "FAIL")],
)
def test_a_wait_more_or_more_than_one_late_copy_a_step_fails(
    recording: int, late: int, held_s: float, verdict: str
) -> None:
    slices = {
        "without": answers(4),
        "recording": answers(recording, 0.001, (0.001,)),
        "late": answers(late, held_s, (0.009, 0.01, 0.02)),
    }
    found = evaluate_device([slices] * 3, slice_steps=2)
    assert found["verdict"] == verdict
    assert found["copies_waited_for"] == pytest.approx(held_s / 2 / 0.01)
    assert found["record_us"] == pytest.approx(60)
    assert found["waits"]["without"] == 2


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.skipif(simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device")
def test_recording_on_a_device_adds_no_wait(tmp_path: Path) -> None:
    simulated.library()  # the ranks find it compiled
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root / "tests" / "device" / "plugin"), str(root)])
    words = f"--device {simulated.NAME} --rounds 3 --slice-steps 3 --json {tmp_path / 'found'}".split()
    done = subprocess.run(
        [sys.executable, "-m", "swift_ft.cli", "bench", "overhead", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    # How long a copy holds up the training stream of a simulated device depends on what else the processors do.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    waits = json.loads((tmp_path / "found").read_text())["waits"]
    assert waits["recording"] == waits["late"] == waits["without"] > 0


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


def test_without_the_laboratorys_packages_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "swift_ft.lab.bench.overhead")
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(UsageError) as caught:
        run("overhead", [])
    assert str(caught.value) == "bench overhead: psutil is not installed: pip install 'swift-ft[lab]'"
