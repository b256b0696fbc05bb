"""What ranks have measured: nothing that cannot be comes into the coordinator."""

import math
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import check_measured

STAGE = pb.StageMeasured(stage=1, forward_s=0.1, backward_s=0.2, sent=(pb.Sent(destination=2, bytes=7),))
ONE = pb.RankMeasured(step=9, steps=4, microbatches=4, step_s=2.0, update_s=0.1, stages=(STAGE,))


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
    check_measured(ONE)
    with pytest.raises(ValueError, match=why):
        check_measured(pb.RankMeasured(**{"steps": 1, **change}))
