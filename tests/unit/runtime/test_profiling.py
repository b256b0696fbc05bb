"""What a step is said to have cost: nothing unless it is asked for, and nothing of the step before."""

import time
from typing import Any

import pytest

from swift import events
from swift.runtime.profiling import ENV_PROFILE, StepProfile


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "emit", lambda event, **fields: found.append({"event": event, **fields}))
    return found


def step(profile: StepProfile, number: int, size: int) -> None:
    profile.begin()
    for _ in range(2):
        with profile.computing(3, "F"):
            time.sleep(0.01)
        profile.logged("s3.F", size)
    profile.read(7, 0.5)
    time.sleep(0.02)  # for a collective
    profile.settled()
    time.sleep(0.005)
    profile.end(number, replay=False)


def test_each_step_by_itself(emitted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_PROFILE, "1")
    profile = StepProfile(5)
    step(profile, 0, 100)
    step(profile, 1, 40)
    first, second = emitted
    assert (first["event"], first["rank"], first["step"], first["replay"]) == ("profiled", 5, 0, False)
    assert (first["logged"], second["logged"]) == ({"s3.F": 200}, {"s3.F": 80})
    assert first["read"] == second["read"] == [7.0, 0.5]
    for event in emitted:
        assert event["seconds"].keys() == {"s3.F"}
        assert event["seconds"]["s3.F"] >= 0.02
        assert event["update_s"] >= 0.005
    # On whatever machine: what came before `settled` is not counted.
    began = time.perf_counter()
    step(profile, 2, 0)
    assert emitted[2]["update_s"] + emitted[2]["seconds"]["s3.F"] < time.perf_counter() - began - 0.02


def test_nothing_unless_it_is_asked_for(
    emitted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_PROFILE, raising=False)
    step(StepProfile(5), 0, 100)
    assert emitted == []
