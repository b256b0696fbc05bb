"""What a rank says when it cannot do as planned."""

from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.errors import ReplayRefused, ServiceError
from swift.runtime.config import SessionConfig
from swift.runtime.faults import FaultInjector
from swift.runtime.restore import Restorer
from swift.runtime.state import TrainerState
from swift.runtime.updates import Updates


def test_a_step_that_cannot_be_taken_back_is_refused_and_leaves_no_state() -> None:
    updates = Updates(SessionConfig(), None, FaultInjector(0), lambda: None)
    state = TrainerState(1, updates)
    state.present = True

    def fails() -> list[Any]:
        raise ServiceError("this step cannot be taken back: the step made parameters NaN")

    updates.undo = fails  # type: ignore[method-assign]
    nothing: Any = None
    restorer = Restorer(0, nothing, nothing, state, nothing, FaultInjector(0), nothing)
    plan = pb.Plan(
        target_version=0, exact=True, ranks=[pb.RankPlan(rank=0, strategy=pb.UNDO, from_version=0)]
    )
    with pytest.raises(ReplayRefused, match="made parameters NaN"):
        restorer.follow(plan, nothing, [], lambda: None)
    assert not state.present  # the next report says so, and the plan copies or restores
