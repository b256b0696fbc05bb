"""The benchmark of logging's cost: what it makes of its measurements, and that it sees a writer that is in the way."""

import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import overhead
from swift_ft.lab.bench.command import main
from swift_ft.lab.bench.overhead import Case, evaluate, interval, verdict

CASE = Case(kind="small", dtype="float32", spare=True, rate=250)


def a_round(off: float, on: float, load: float, foreign: float = 0.0) -> dict[str, dict[str, float]]:
    found = {
        mode: {"step_s": step_s, "cpu_s": step_s, "drain_s": 0.01, "foreign_share": foreign}
        for mode, step_s in (("off", off), ("on", on), ("load", load))
    }
    found["load"]["load_rate"] = 250e6
    return found


def measured(
    rounds: list[dict[str, dict[str, float]]], wanted: int = 0, disturbed: int = 0
) -> dict[str, Any]:
    return {
        "bytes_per_step": 3_250_000,
        "record_bytes": 406_250,
        "slice_s": 0.6,
        "rounds": rounds,
        "wanted": wanted or len(rounds),
        "disturbed": [0.5] * disturbed,
    }


def test_ratios_are_taken_within_a_round() -> None:
    # The machine gets ten times slower: medians of each mode would give other ratios.
    found = evaluate(CASE, measured([a_round(f, 1.1 * f, 1.05 * f) for f in (0.01, 0.02, 0.1)]))
    medians = {name: ratio["median"] for name, ratio in found["ratios"].items()}
    assert medians == pytest.approx({"on/off": 1.1, "load/off": 1.05, "on/load": 1.1 / 1.05})
    assert found["trainer_cpu_s_per_gb"] == pytest.approx(0.1 * 0.02 / 0.00325)
    assert found["logged_mb_s"] == pytest.approx(3.25 / 0.022)
    assert found["load_mb_s"] == 250


@pytest.mark.parametrize(
    ("low", "high", "goal", "said"),
    [
        (0.99, 1.03, 1.03, "met"),
        (0.99, 1.031, 1.03, "INCONCLUSIVE"),
        (1.031, 1.2, 1.03, "missed"),
        (1.03, 1.2, 1.03, "INCONCLUSIVE"),
        (0.90, 1.02, 1.03, "INCONCLUSIVE"),  # below the goal, but so wide that it shows nothing
        (0.9, 1.5, None, ""),
    ],
)
def test_an_interval_on_both_sides_of_the_goal_says_nothing(
    low: float, high: float, goal: float | None, said: str
) -> None:
    assert verdict(low, high, goal) == said


def test_noise_gives_a_wide_interval_and_no_verdict() -> None:
    generator = random.Random(1)
    noisy = [a_round(0.013, 0.013 * generator.uniform(0.8, 1.3), 0.013) for _ in range(30)]
    quiet = [a_round(0.013, 0.013 * generator.uniform(1.0, 1.02), 0.013) for _ in range(30)]
    assert evaluate(CASE, measured(noisy))["verdict"] == "INCONCLUSIVE"
    assert evaluate(CASE, measured(quiet))["verdict"] == "met"
    assert evaluate(CASE, measured(quiet, wanted=61))["verdict"] == "INCONCLUSIVE"  # more was asked for


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    generator = random.Random(5)
    samples = [[generator.gauss(1.0, 0.05) for _ in range(25)] for _ in range(120)]
    covered = sum(low <= 1.0 <= high for low, high in map(interval, samples))
    assert 0.88 <= covered / len(samples) <= 1.0
    assert interval(samples[0]) == interval(samples[0])
    assert interval([1.5]) == (1.5, 1.5)


@pytest.mark.parametrize(
    ("change", "goal"),
    [({}, 1.03), ({"kind": "large"}, 1.01), ({"spare": False}, None), ({"rate": 500}, None)],
)
def test_goals_are_those_of_the_spare_core(change: dict[str, Any], goal: float | None) -> None:
    fields = {"kind": "small", "dtype": "float32", "spare": True, "rate": 250, **change}
    assert Case(**fields).goal == goal


def test_a_log_that_lags_behind_is_said() -> None:
    rounds = [a_round(0.013, 0.013, 0.013) for _ in range(4)]
    for one in rounds:
        one["on"]["drain_s"] = 0.4
    found = evaluate(CASE, measured(rounds))
    assert not found["kept_up"]
    assert "the log was 0.40 s behind" in overhead.row(found)


# -- somebody else on the trainer's core --------------------------------------------------------------


class Rounds:
    """In the place of the processes."""

    def __init__(self, shares: list[float]):
        self._shares = iter(shares)
        self.orders: list[tuple[str, ...]] = []
        self.bytes_per_step = 1000
        self.about = {"record_bytes": 125, "layers": 1, "step_s": 0.01}

    def round(self, order: tuple[str, ...]) -> dict[str, dict[str, float]]:
        self.orders.append(tuple(order))
        found = a_round(1.0, 1.0, 1.0)
        found["off"]["foreign_share"] = next(self._shares)
        return found


def test_a_disturbed_round_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = Namespace(rounds=6, slice_s=0.1, directory=None, logger="log")
    bench = Rounds([0.9, *[0.0, 0.2, 0.0, 0.0, 0.06, 0.0, 0.0, 0.05]])  # the first one is for warming up
    monkeypatch.setattr(overhead, "Bench", lambda *_: bench)
    found = overhead.measure(CASE, arguments)
    assert (len(found["rounds"]), found["disturbed"]) == (6, [0.2, 0.06])
    assert len(set(bench.orders[1:])) == 6  # every order counts once
    bench = Rounds([1.0] * 19)
    found = overhead.measure(CASE, arguments)
    assert (len(found["rounds"]), len(found["disturbed"])) == (0, 18)
    result = evaluate(CASE, found)
    assert result["verdict"] == "INCONCLUSIVE"
    assert "somebody else computed" in overhead.row(result)


def test_who_computes_on_a_core() -> None:
    core = min(os.sched_getaffinity(0))
    burn = (
        "import os, sys\nwhile os.times().user < 1.0: sum(range(100000))\nprint(flush=True)\nsys.stdin.read()"
    )
    everybody, own = overhead.user_seconds(core)
    with overhead.pinned({core}):
        process = subprocess.Popen(
            [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        assert process.pid in overhead.descendants()
        everybody_now, own_now = overhead.user_seconds(core)
    finally:
        process.communicate()
    assert 0.8 <= own_now - own <= everybody_now - everybody + 0.05
    everybody_then, own_then = overhead.user_seconds(core)
    assert own_then < own_now  # it is gone, and what remains on the core is not ours
    assert everybody_then >= everybody_now


# -- the real thing -----------------------------------------------------------------------------------


def run(tmp_path: Path, logger: str) -> dict[str, Any]:
    path = tmp_path / f"{logger}.json"
    cores = "spare" if len(os.sched_getaffinity(0)) > 1 else "none"
    words = ["--rounds", "5", "--slice-s", "0.15", "--cores", cores, "--step", "small", "--dtype", "float32"]
    words += ["--rate", "50"]  # there is no goal for this one
    assert main(["overhead", *words, "--logger", logger, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["logger"] == logger
    found: dict[str, Any] = result["cases"][0]
    return found


@pytest.mark.matrix
def test_a_writer_in_the_trainers_thread_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control burns four steps' time in every step: more than a busy machine adds to one of the modes alone."""
    monkeypatch.setattr(overhead, "STEP_S", {"small": 0.004})
    monkeypatch.setattr(overhead, "BURNED_SHARE", 4.0)
    monkeypatch.setattr(overhead, "DISTURBED_SHARE", float("inf"))
    burned, nothing = run(tmp_path, "burn"), run(tmp_path, "nothing")
    assert burned["ratios"]["on/off"]["median"] > 2
    assert burned["ratios"]["on/off"]["median"] > 1.5 * nothing["ratios"]["on/off"]["median"]
    assert burned["ratios"]["on/load"]["median"] > 1.5 * nothing["ratios"]["on/load"]["median"]
    assert burned["trainer_cpu_s_per_gb"] > 5 * abs(nothing["trainer_cpu_s_per_gb"])


def test_logging_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "STEP_S", {"small": 0.004})
    monkeypatch.setattr(overhead, "DISTURBED_SHARE", float("inf"))
    found = run(tmp_path, "log")
    rounds = found["measured"]["rounds"]
    assert len(rounds) == found["rounds"] == 5
    assert (
        found["measured"]["record_bytes"] == int(50e6 * found["measured"]["calibrated_step_s"] / 8) // 64 * 64
    )
    assert found["measured"]["bytes_per_step"] == 8 * found["measured"]["record_bytes"]
    assert found["logged_mb_s"] > 0
    assert found["load_mb_s"] > 0
    assert found["trainer_cpu_s_per_gb"] > 0
    assert found["verdict"] == ""


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--slice-s", "0"], ["--rate", "0"], ["--json", "/nowhere/here.json"]]
)
def test_bad_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        overhead.main(words)


def test_a_spare_core_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert overhead.cores_for(False) == (3, 3)
    with pytest.raises(ServiceError, match="--cores none"):
        overhead.cores_for(True)
