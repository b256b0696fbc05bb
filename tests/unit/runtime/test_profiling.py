"""What a step is said to have cost: nothing of the step before."""

import time

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.train.profiling import STEPS_KEPT, WARM_STEPS, StepProfile


def counted(
    profile: StepProfile, number: int, size: int, *, replay: bool = False, microbatches: int = 2
) -> None:
    profile.begin()
    for _ in range(microbatches):
        with profile.computing(3, "F"):
            pass
        with profile.computing(3, "B"):
            pass
        profile.sent(3, 4, size)
        profile.sent(3, 2, size + 1)
        profile.beside(5)
    if replay:
        profile.read(7, 0.5)
    profile.end(number, replay=replay)


def measured(profile: StepProfile) -> pb.RankMeasured:
    found = profile.measured({3: 11}, None, None)
    assert found is not None
    return found


def test_recent_steps_are_measured() -> None:
    profile = StepProfile()
    for number in range(WARM_STEPS):
        counted(profile, number, 1000)
    assert profile.measured({3: 11}, None, None) is None  # the first steps are like no other
    for number in range(WARM_STEPS, WARM_STEPS + 3):
        counted(profile, number, 100)
    found = measured(profile)
    assert (found.step, found.steps, found.microbatches, found.other_bytes) == (4, 3, 2, 10)
    (stage,) = found.stages
    assert (stage.stage, stage.gradient_bytes) == (3, 11)
    assert list(stage.sent) == [pb.Sent(destination=2, bytes=202), pb.Sent(destination=4, bytes=200)]
    assert not found.HasField("log_read_bytes")


def test_no_more_than_the_last_steps_count() -> None:
    profile = StepProfile()
    for number in range(WARM_STEPS + STEPS_KEPT):
        counted(profile, number, 100)
    for number in range(STEPS_KEPT // 2 + 1):
        counted(profile, 100 + number, 300)
    found = measured(profile)
    assert (found.steps, found.stages[0].sent[1].bytes) == (STEPS_KEPT, 600)


def test_replayed_steps_tell_of_the_log_alone() -> None:
    profile = StepProfile()
    for number in range(WARM_STEPS + 1):
        counted(profile, number, 100)
    for number in range(3):
        counted(profile, number, 9, replay=True, microbatches=1)
    found = measured(profile)
    assert (found.step, found.steps, found.microbatches) == (WARM_STEPS, 1, 2)
    assert found.stages[0].sent[1].bytes == 200
    assert (found.log_read_bytes, found.log_read_wait_s) == (21, 1.5)
    counted(profile, 3, 100)
    counted(profile, 3, 9, replay=True)  # another replay
    found = measured(profile)
    assert (found.log_read_bytes, found.log_read_wait_s) == (7, 0.5)


def test_a_step_that_is_dropped_leaves_nothing() -> None:
    profile = StepProfile()
    for number in range(WARM_STEPS):
        counted(profile, number, 100)
    profile.begin()
    with pytest.raises(RuntimeError), profile.computing(3, "F"):
        raise RuntimeError("a peer is gone")
    profile.sent(3, 4, 1)
    profile.beside(1)
    counted(profile, WARM_STEPS, 100)
    found = measured(profile)
    assert (found.microbatches, found.other_bytes, found.stages[0].sent[1].bytes) == (2, 10, 200)


def test_times_are_of_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    profile = StepProfile()
    for number, slow in enumerate([0.0] * WARM_STEPS + [0.0, 0.0, 4.0]):  # one step of three was held up
        profile.begin()
        for kind, seconds in (("F", 1.0), ("F", 3.0 + slow), ("B", 4.0), ("B", 4.0), ("W", 2.0), ("W", 2.0)):
            with profile.computing(0, kind):
                now[0] += seconds
            now[0] += 10.0  # for a neighbour
        profile.mark_last_wait()
        now[0] += 0.5
        profile.end(number, replay=False)
    found = measured(profile)
    (stage,) = found.stages
    assert (stage.forward_s, stage.backward_s) == (2.0, 6.0)
    assert (found.step_s, found.update_s) == (76.5, 0.5)
