"""What ranks have measured, on its way through the coordinator: whole, and nothing that cannot be."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import RankMeasured, Sent, StageMeasured
from swift_ft.rpc.codec import from_message, to_message

SECONDS = st.floats(0, 1e9)
COUNTS = st.integers(0, 1 << 62)
STAGES = st.builds(
    StageMeasured,
    stage=st.integers(0, 1 << 20),
    forward_s=SECONDS,
    backward_s=SECONDS,
    sent=st.lists(
        st.builds(Sent, destination=st.integers(0, 1 << 20), bytes=COUNTS),
        max_size=4,
        unique_by=lambda sent: sent.destination,
    ).map(tuple),
    gradient_bytes=COUNTS,
)
MEASURED = st.builds(
    RankMeasured,
    step=COUNTS,
    steps=st.integers(1, 1 << 62),
    microbatches=COUNTS,
    step_s=SECONDS,
    update_s=SECONDS,
    stages=st.lists(STAGES, max_size=4, unique_by=lambda stage: stage.stage).map(
        lambda stages: tuple(sorted(stages, key=lambda stage: stage.stage))
    ),
    other_bytes=COUNTS,
    state_bytes=st.none() | COUNTS,
    checkpoint_bytes=st.none() | COUNTS,
    checkpoint_s=st.none() | SECONDS,
    checkpoint_stall_s=st.none() | SECONDS,
    log_write_bytes_per_s=st.none() | st.floats(0, 1e18),
    log_full=st.booleans(),
    log_read_bytes=st.none() | COUNTS,
    log_read_wait_s=st.none() | SECONDS,
)
STAGE = StageMeasured(stage=1, forward_s=0.1, backward_s=0.2, sent=(Sent(destination=2, bytes=7),))
ONE = RankMeasured(step=9, steps=4, microbatches=4, step_s=2.0, update_s=0.1, stages=(STAGE,))


@given(MEASURED)
def test_what_is_said_is_what_is_heard(measured: RankMeasured) -> None:
    wire = to_message(measured).SerializeToString()
    assert from_message(pb.RankMeasured.FromString(wire)) == measured


def test_what_was_not_measured_is_no_zero() -> None:
    heard = from_message(to_message(replace(ONE, checkpoint_bytes=0)))
    assert (heard.checkpoint_bytes, heard.checkpoint_s, heard.log_read_wait_s) == (0, None, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 0}, "steps is 0: nothing was measured"),
        ({"step": (1 << 62) + 1}, "step is"),
        ({"step_s": math.nan}, "step_s is nan"),
        ({"update_s": -1.0}, "update_s is -1.0"),
        ({"checkpoint_s": math.inf}, "checkpoint_s is inf"),
        ({"log_write_bytes_per_s": 1e19}, "log_write_bytes_per_s is"),
        ({"stages": [{"stage": 2}, {"stage": 1}]}, "stages must ascend"),
        ({"stages": [{"stage": n} for n in range(65)]}, "at most 64"),
        ({"stages": [{"sent": [{"destination": n} for n in range(17)]}]}, "at most 16"),
        ({"stages": [{"sent": [{"destination": 1}, {"destination": 1}]}]}, "names a destination twice"),
        ({"stages": [{"stage": -1}]}, "stage is -1"),
        ({"stages": [{"forward_s": math.inf}]}, "forward_s is inf"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], why: str) -> None:
    message = pb.RankMeasured(**{"steps": 1, **change})
    with pytest.raises(ValueError, match=why):
        from_message(message)
