"""What is told of a replay while it goes on. Real processes, a real log."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import ServiceError, UnknownJob
from swift_ft.lab.drill.cluster import COORDINATOR, JOB
from tests.integration.forked import ForkedCluster
from tests.integration.trainer_world import run_trainer

pytestmark = pytest.mark.timeout(200)

STEPS, VICTIM = 6, 1
PROGRESS: list[pb.ReplayProgress | None] = []
"""Of the victim, as the coordinator told it; None: it did not replay."""


class Watched(ForkedCluster):
    """Its coordinator is asked again and again, as an operator would."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._asked = 0.0
        PROGRESS.clear()

    def poll(self) -> int | None:
        """Once more when all is over: that answer comes last."""
        code = super().poll()
        over = code is not None
        if COORDINATOR in self._addresses and (over or time.monotonic() - self._asked > 0.1):
            self._asked = time.monotonic()
            self._look()
        return code

    def _look(self) -> None:
        client = CoordinatorClient(self._addresses[COORDINATOR], JOB, patience_s=5.0)
        try:
            with contextlib.suppress(ServiceError, UnknownJob):  # nobody has joined yet
                ranks = {rank.rank: rank for rank in client.status().ranks}
                if VICTIM in ranks:
                    PROGRESS.append(ranks[VICTIM].replay if ranks[VICTIM].HasField("replay") else None)
        finally:
            client.close()


def test_how_far_it_is_can_be_asked_for(tmp_path: Path) -> None:
    """Of five steps of half a second each a heartbeat tells most."""
    fault = {"rank": VICTIM, "step": STEPS - 1, "microbatch": 0, "phase": "forward"}
    run = run_trainer(tmp_path, "reading.py", 0.12, STEPS, ranks=3, faults=[fault], make=Watched)
    (end,) = [e for e in run["events"] if e["event"] == "replay_end" and e["rank"] == VICTIM]
    assert end["steps"] == STEPS - 1
    said = [one for one in PROGRESS if one is not None]
    assert {one.target for one in said} == {STEPS - 1}
    versions = [one.version for one in said]
    assert versions == sorted(versions)
    by_pace = [one for one in said if 2 <= one.version < STEPS - 1]
    assert by_pace
    # Never more than what the steps that are not done take at the pace of those that are, the first one left out.
    ended = {e["step"] + 1: e["t"] for e in run["events"] if e["event"] == "step_end" and e["replay"]}
    for one in by_pace:
        each_s = (ended[one.version] - ended[1]) / (one.version - 1)
        assert 0 <= one.seconds_left < (STEPS - 1 - one.version) * 1.5 * each_s
    assert any(one.seconds_left > 0 for one in by_pace)
    assert PROGRESS[-1] is None  # nothing is replayed any more
